"""Modules and criteria that do not give a loss, and states that do not fit a module."""

import copy
import threading

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, LossError, StructureError
from tests.faults.problem import failing, params

SGD = ft.optim.sgd(0.1)


def total(model, batch):
    return model(batch).sum()


def step_of(module, criterion=None):
    return ft.train_step(ft.from_module(module, criterion), SGD)


def test_a_model_without_a_loss_is_an_error():
    step = step_of(nn.Linear(3, 1))
    with failing(LossError, "from_module", "Linear(**batch) has no .loss", "input", "criterion(model, batch)"):
        step(step.init(), {"input": torch.zeros(2, 3)})


def test_a_model_without_arguments_of_the_names_in_the_batch_is_an_error():
    step = step_of(nn.Linear(3, 1))
    batch = {"x": torch.zeros(2, 3), "y": torch.zeros(2, 1)}
    with failing(LossError, "from_module", "Linear(**batch)", "'x'", "it has x, y", "criterion(model, batch)"):
        step(step.init(), batch)


def test_a_type_error_within_a_model_is_raised():
    class Wrong(nn.Linear):
        def forward(self, input):  # noqa: A002
            return super().forward(input, weight=input)

    step = step_of(Wrong(3, 1))
    with pytest.raises(TypeError, match="weight"):
        step(step.init(), {"input": torch.zeros(2, 3)})


def test_a_model_whose_loss_is_none_is_an_error():
    class Output(nn.Linear):
        loss = None

        def forward(self, input):  # noqa: A002
            return self

    step = step_of(Output(3, 1))
    with failing(LossError, "from_module", "Output(**batch) has no .loss", "labels"):
        step(step.init(), {"input": torch.zeros(2, 3)})


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (torch.zeros(2, 3),), None])
def test_without_a_criterion_a_batch_that_is_not_a_mapping_is_an_error(batch):
    step = step_of(nn.Linear(3, 1))
    with failing(LossError, "from_module", type(batch).__name__, "dict", "criterion(model, batch)"):
        step(step.init(), batch)


@pytest.mark.parametrize("module", [3, None, total, nn.Linear])
def test_an_object_that_is_not_a_module_is_an_error(module):
    with pytest.raises(ft.errors.FtrainError, match="from_module") as caught:
        ft.from_module(module, total)
    assert type(caught.value) in (LossError, ComposeError)
    assert "Module" in str(caught.value)


@pytest.mark.parametrize("criterion", [3, "mse"])
def test_a_criterion_that_is_not_a_function_is_an_error(criterion):
    with failing(LossError, "from_module", repr(criterion), "criterion(model, batch)"):
        ft.from_module(nn.Linear(3, 1), criterion)


@pytest.mark.parametrize(
    "criterion", [lambda model: None, lambda model, batch, labels: None, nn.CrossEntropyLoss()], ids=["1", "3", "torch"]
)
def test_a_criterion_with_other_arguments_is_an_error(criterion):
    with pytest.raises(LossError, match="from_module") as caught:
        ft.from_module(nn.Linear(3, 1), criterion)
    assert "(model, batch)" in str(caught.value)


def test_a_criterion_that_is_a_module_is_an_error_that_says_why():
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, model, batch):
            return self.scale * model(batch).sum()

    with failing(LossError, "Scaled(model, batch) is a module; needs a function criterion(model, batch)"):
        ft.from_module(nn.Linear(3, 1), Scaled(2.0))
    with failing(LossError, "Scaled is a module with parameters", "Put both into one module", "nn.ModuleDict"):
        ft.from_module(nn.Linear(3, 1), Scaled(nn.Parameter(torch.ones(()))))


def test_a_criterion_that_does_not_return_a_loss_is_an_error():
    step = step_of(nn.Linear(3, 1), lambda model, batch: model(batch))
    with failing(LossError, "loss(Linear)", "float32[2, 1]", "0-d tensor"):
        step(step.init(), torch.zeros(2, 3))


def test_init_with_parameters_that_do_not_fit_the_module_is_an_error():
    step = step_of(nn.Linear(3, 1), total)
    with failing(StructureError, "Step.init", "Linear", "weight: missing", "bias: missing"):
        step.init(params())
    with failing(StructureError, "Step.init", "Linear", "weight: found [1, 4], needs [1, 3]"):
        step.init({"weight": torch.zeros(1, 4), "bias": torch.zeros(1)})


def test_to_module_with_a_state_of_other_shapes_changes_nothing():
    state = step_of(nn.Linear(3, 1), total).init()
    module = nn.Linear(4, 1)
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    with failing(StructureError, "to_module", "Linear", "weight: found [1, 3], needs [1, 4]"):
        ft.to_module(module, state)
    for name, leaf in module.state_dict().items():
        assert torch.equal(leaf, before[name])


def test_to_module_with_missing_or_unexpected_names_is_an_error():
    state = step_of(nn.Linear(3, 3), total).init()
    with failing(StructureError, "to_module", "Linear", "bias: unexpected"):
        ft.to_module(nn.Linear(3, 3, bias=False), state)
    with failing(StructureError, "to_module", "BatchNorm1d", "running_mean: missing", "num_batches_tracked: missing"):
        ft.to_module(nn.BatchNorm1d(3), state)


def test_the_state_of_a_pure_function_fits_no_module():
    def loss(params, batch):
        return params[0].sum()

    state = ft.train_step(loss, SGD).init([torch.ones(3)])
    with failing(StructureError, "to_module", "Linear", "weight: missing"):
        ft.to_module(nn.Linear(3, 1), state)


def test_lazy_parameters_are_an_error():
    with failing(StructureError, "Step.init", "weight", "LazyLinear"):
        step_of(nn.LazyLinear(3), total).init()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_parameter_with_a_hook_is_an_error_since_no_step_would_call_it(register):
    module = nn.Linear(3, 1)
    handle = getattr(module.weight, register)(lambda grad: None)
    step = step_of(module, total)
    with failing(StructureError, "Step.init", "weight of Linear", "has a hook", "ft.OnGrad"):
        step.init()
    handle.remove()
    step.init()


@pytest.mark.parametrize("use", ["step", "evaluate", "init", "to_module"])
def test_a_module_that_is_in_a_step_of_another_thread_is_an_error(use):
    module = nn.Linear(3, 1)
    errors = []

    def elsewhere():
        try:
            uses[use]()
        except LossError as error:
            errors.append(error)

    def criterion(model, batch):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return total(model, batch)

    step = step_of(module, criterion)
    state, batch = step.init(), torch.ones(2, 3)
    uses = {
        "step": lambda: step_of(module, total)(state, batch),
        "evaluate": lambda: ft.evaluate(ft.eval_step(ft.from_module(module, total)), state, [batch]),
        "init": step.init,
        "to_module": lambda: ft.to_module(module, state),
    }
    step(state, batch)
    assert "Linear is in a step of another thread" in str(errors[0])
    assert "copy.deepcopy(module)" in str(errors[0])
    # After the step of the other thread it can be used.
    elsewhere()
    assert len(errors) == 1


def test_steps_in_several_threads_draw_the_same_random_numbers_as_one_alone():
    def dropped(model, batch, rng):
        return ft.random.dropout(rng, model(batch), 0.5).sum()

    module, batch, losses = nn.Linear(3, 8), torch.ones(2, 3), []

    def train():
        step = step_of(copy.deepcopy(module), dropped)
        losses.append(ft.fit(step, step.init(), [batch], steps=20, progress=False).history["loss"])

    train()
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses == [losses[0]] * 3


class KeepsParameterInList(nn.Module):
    """A module that keeps a parameter in a list, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.kept = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) + (x @ self.kept[0].t())


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_a_parameter_that_is_used_by_another_reference_is_an_error(wrappers):
    # The list would hold the value from before the training.
    step = ft.compose(step_of(KeepsParameterInList(), total), *wrappers)
    state = step.init()
    for _ in range(2):
        with failing(LossError, "total(KeepsParameterInList)", "layer.weight by another reference", "a list"):
            step(state, torch.ones(2, 3))


def test_parameters_of_another_module_do_not_train_and_are_logged(caplog):
    head = nn.Linear(1, 2)

    def criterion(model, batch):
        return head(model(batch)).sum()

    step = step_of(nn.Linear(3, 1), criterion)
    state = step.init()
    for _ in range(2):
        state, _ = step(state, torch.ones(2, 3))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("criterion(Linear): uses 2 parameters that are not in the state, and do not train: ")
    assert "float32[2, 1]" in message
    caplog.clear()
    head.requires_grad_(False)
    step = step_of(nn.Linear(3, 1), criterion)
    step(step.init(), torch.ones(2, 3))
    assert not caplog.records


@pytest.mark.parametrize(
    "wrappers", [(), (ft.accumulate(2),), (ft.compiled(backend="eager"),)], ids=["eager", "accumulate", "compiled"]
)
def test_a_tensor_outside_of_the_state_that_requires_a_gradient_does_not_train_and_is_logged(wrappers, caplog):
    offset = torch.zeros(1, requires_grad=True)

    def criterion(model, batch):
        x = batch.detach().requires_grad_()  # An input that requires a gradient is not logged.
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return (output + offset).mean() + (slope * x).mean()

    step = ft.compose(step_of(nn.Linear(3, 1), criterion), *wrappers)
    state = step.init()
    for _ in range(3):
        state, _ = step(state, torch.ones(2, 3))
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.startswith(
        "criterion(Linear): uses 1 parameters that are not in the state, and do not train: float32[1]. "
    )


def test_a_module_that_was_changed_after_from_module_is_an_error():
    def head(module):
        module[1] = nn.Linear(3, 1)

    def dropout(module):
        # Evaluations would leave it in training mode.
        module[2] = nn.Dropout()

    def tied(module):
        module[1].weight = module[0].weight

    for change in (head, dropout, tied):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU())
        step = step_of(module, total)
        change(module)
        with failing(StructureError, "Step.init", "Sequential got other submodules", "after the last change"):
            step.init()
