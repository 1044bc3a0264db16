"""A compiled step equals the eager one within rounding: with Inductor, split, over many steps, with stock dropout."""

import inspect
import logging

import pytest
import torch

import ftrain as ft
from ftrain.errors import TraceError
from ftrain.transforms.compile import capture as capturing
from tests.bits import assert_same_bits
from tests.exhaustive import choose, exhaustive
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.pipelines import assert_trees_near, blocks_for, build, label, train
from tests.laws.registry import ALONE, STACKS, is_narrow

WIDE = ("accumulate", "clip", "ema", "swa", "skip")
"""A stack that computes in float64 and is compared with a smaller tolerance than the stacks in 16 bits."""


def assert_same_state(actual, expected, names, **tolerance):
    for part in ("params", "buffers", "opt_state", "slots"):
        assert_trees_near(getattr(actual, part), getattr(expected, part), names, **tolerance)


# `make test` compiles a stack of two wrappers with Inductor in `test_families`.
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [("clip", "ema"), *ALONE, WIDE, STACKS[0]], ids=label)
def test_inductor_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    compiled = ft.compiled(lowering="whole", donate=True)(step)
    actual, metrics = train(compiled)
    expected, eager_metrics = train(step)
    if is_narrow(names):
        # Inductor rounds to 16 bits in other places than autocast does. The first gradients agree well. Adam divides a
        # gradient by its size, so that rounding of a small one moves its parameter as far as a large one does: single
        # parameters then differ much, but the norm of all differences is small.
        first_state, first_expected = train(compiled, 1)[0], train(step, 1)[0]
        assert_close_in_norm(first_state.opt_state["mu"], first_expected.opt_state["mu"], 1e-2)
        assert_close_in_norm(actual.params, expected.params, 5e-2)
    else:
        assert_same_state(actual, expected, names)
    row, rtol = (0, 1e-3) if is_narrow(names) else (-1, 1e-5)
    assert metrics[row]["loss"] == pytest.approx(eager_metrics[row]["loss"], rel=rtol)


def assert_close_in_norm(actual, expected, rtol):
    difference = ft.tree.global_norm(ft.tree.map(torch.sub, actual, expected))
    assert float(difference) < rtol * float(ft.tree.global_norm(expected))


@pytest.mark.exhaustive
def test_inductor_repeats_its_dropout_in_a_second_call_and_in_a_recomputation():
    _, step = build(("remat",))
    whole = ft.compiled(lowering="whole")(step)
    state = whole.init()
    random_state = torch.get_rng_state()
    first, second = whole(state, make_batch(0)), whole(state, make_batch(0))
    assert_same_bits(first, second)
    assert torch.equal(torch.get_rng_state(), random_state)
    actual, _ = train(whole)
    other, _ = train(whole, seed=1)
    assert not torch.equal(other.params["embed.weight"], actual.params["embed.weight"])
    plain, _ = train(ft.compiled(lowering="whole", donate=True)(build(())[1]))
    assert_trees_near(actual.params, plain.params, ())


@pytest.mark.exhaustive
def test_inductor_donation_changes_no_bit():
    _, step = build(STACKS[0])
    donated, plain = (train(ft.compiled(lowering="whole", donate=donate)(step))[0] for donate in (True, False))
    assert_same_bits(donated, plain)


# Dynamo reads the .grad of every tensor it traces, which makes torch warn.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("names", choose([*ALONE, *STACKS], [()]), ids=label)
def test_split_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    actual, _ = train(ft.compiled(lowering="split", backend="aot_eager", donate=True)(step))
    assert_same_state(actual, train(step)[0], names)


# Without `remat_dots`, which is refused.
WITHOUT_POLICY = [names for names in (*ALONE, *STACKS) if "remat_dots" not in names]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("names", choose(WITHOUT_POLICY, [STACKS[0], STACKS[2], STACKS[5]]), ids=label)
def test_compiled_blocks_equal_eager(names):
    # In 16 bits torch.compile rounds in other places of dropout.
    _, step = build(names, p=0.0 if is_narrow(names) else 0.3)
    actual, _ = train(ft.compiled(lowering="blocks", backend="aot_eager", donate=True)(step))
    assert_same_state(actual, train(step)[0], names)


@pytest.mark.parametrize("names", choose(STACKS, [STACKS[3]]), ids=label)
def test_functionalised_graph_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    actual, _ = train(ft.compiled(lowering="whole", backend="aot_eager", donate=True)(step))
    assert_same_state(actual, train(step)[0], names)


def test_two_hundred_steps_with_a_schedule_are_one_graph(monkeypatch):
    graphs = []
    capture = capturing.capture

    def recording_capture(*args):
        graphs.append(capture(*args))
        return graphs[-1]

    monkeypatch.setattr(capturing, "capture", recording_capture)
    schedule = ft.schedules.warmup_cosine(0.01, 10, 200)
    loss = ft.from_module(make_model(0.0), token_loss)
    step = ft.compiled(backend="eager", donate=True)(ft.train_step(loss, ft.optim.sgd(schedule)))
    state = step.init()
    rates = []
    for index in range(200):
        state, metrics = step(state, make_batch(index % 3))
        rates.append(metrics["lr"])
    assert len(graphs) == 1
    assert rates == [schedule(k) for k in range(200)]


def graph_of(names):
    """Return the graph of a step."""
    captured = []
    capture = capturing.capture

    def recording_capture(*args):
        captured.append(capture(*args))
        return captured[-1]

    step = ft.compiled(backend="eager")(build(names)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "capture", recording_capture)
        step(step.init(), make_batch(0))
    return captured[-1].graph


@pytest.mark.parametrize("names", [("remat",), *exhaustive([("remat", "accumulate")])], ids=label)
def test_a_whole_graph_has_no_random_operation_and_computes_blocks_again_after_a_gradient(names):
    """Without the dependence on a gradient, a compiler could recompute in the forward pass and keep the results."""
    nodes = list(graph_of(names).nodes)
    product = torch.ops.aten.addmm.default
    targets = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [target for target in targets if torch.Tag.nondeterministic_seeded in target.tags]
    recomputed = set()
    for node in nodes:
        if node.target is torch.ops.ftrain.after.default or recomputed & {*node.all_input_nodes}:
            recomputed.add(node)
    recomputed_products = sum(node.target is product for node in recomputed)
    # For each microbatch (1, or 2 with accumulate): two products in each of two blocks, in the forward pass and again.
    assert recomputed_products == 4 * len(names)
    assert targets.count(product) == 2 * recomputed_products


def test_products_that_a_policy_keeps_are_once_in_the_graph():
    products = [node for node in graph_of(("remat_dots",)).nodes if node.target is torch.ops.aten.addmm.default]
    assert len(products) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_auto_shows_the_lowering_that_it_chose_and_logs_why(caplog):
    def branching(model, batch):
        loss = token_loss(model, batch)[0]
        return loss if loss.total.item() > 0 else ft.Mean(-loss.total, loss.weight)

    _, step = build((), p=0.0, criterion=branching, blocks=1)
    chosen = ft.compiled(backend="eager")(step)
    assert "compiled(auto)" in repr(chosen)
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        actual, _ = train(chosen)
    assert "compiled(split)" in repr(chosen)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert "loss.total.item() > 0" in message
    assert_same_state(actual, train(step)[0], ())


def test_whole_names_the_line_that_cannot_be_captured():
    _, step = build((), ft.compiled(lowering="whole", backend="eager"), criterion=reads_a_value)
    with pytest.raises(ft.errors.TraceError, match=r"test_compiled\.py.*float\(total\)"):
        step(step.init(), make_batch(0))


def reads_a_value(model, batch):
    total = token_loss(model, batch)[0].total
    return total * float(total)


def test_a_plain_function_is_captured_whole():
    optimizer = ft.optim.sgd(0.1)

    def step(state, batch):
        weight = state["w"].detach().requires_grad_()
        with torch.enable_grad():
            loss = ((batch["x"] @ weight - batch["y"]) ** 2).mean()
            (grad,) = torch.autograd.grad(loss, weight)
        params, _ = optimizer.update({"w": grad}, {}, {"w": state["w"]}, {"lr": torch.tensor(0.1)})
        return params, {"loss": loss.detach()}

    batch = {"x": torch.randn(8, 3), "y": torch.randn(8)}
    state = {"w": torch.zeros(3)}
    actual, metrics = ft.compiled(backend="eager")(step)(state, batch)
    expected, eager_metrics = step(state, batch)
    assert_same_bits(actual, expected)
    assert torch.equal(metrics["loss"], eager_metrics["loss"])


def test_a_donating_plain_function_may_return_another_tree_in_the_same_memory():
    def step(state, batch):
        return {"after": state["before"] + batch}, {}

    state = {"before": torch.zeros(2)}
    memory = state["before"].data_ptr()
    actual, _ = ft.compiled(backend="eager", donate=True)(step)(state, torch.ones(2))
    assert actual.keys() == {"after"}
    assert actual["after"].tolist() == [1, 1]
    assert actual["after"].data_ptr() == memory


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="before 2.13, torch counts the graphs of all functions with one code together",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@torch._dynamo.config.patch(recompile_limit=2)
def test_split_steps_with_one_loss_are_all_compiled_from_torch_2_13_on():
    torch._dynamo.utils.counters.clear()
    limit = torch._dynamo.config.recompile_limit
    for width in range(2, limit + 4):
        loss = ft.from_module(torch.nn.Linear(width, 1), lambda model, batch: model(batch).square().mean())
        step = ft.compiled(lowering="split", backend="eager")(ft.train_step(loss, ft.optim.sgd(0.1)))
        step(step.init(), torch.ones(4, width))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == limit + 2


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="before 2.13, torch compiles eight graphs at most, and the setting is that of the process",
)
def test_as_many_shapes_are_compiled_as_max_graphs_says_from_torch_2_13_on():
    torch._dynamo.utils.counters.clear()
    loss = ft.from_module(torch.nn.Linear(3, 1), lambda model, batch: model(batch).square().mean())
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init()
    limit = 9  # One more than the default of torch.
    evaluation = ft.compiled(lowering="split", backend="eager", max_graphs=limit)(ft.eval_step(loss))
    ft.evaluate(evaluation, state, [torch.ones(length, 3) for length in range(2, limit + 2)])
    ft.evaluate(evaluation, state, [torch.ones(2, 3)], dtype="bf16")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == limit + 1


@pytest.mark.parametrize("name", ["nadam", "radam", "lamb", "adafactor", "schedule_free_adamw", "adamw_8bit", "muon"])
def test_a_captured_plain_function_may_give_the_rate_as_a_number(name):
    optimizer = getattr(ft.optim, name)(0.1)

    def function(state, batch):
        return optimizer.update({"w": state[0]["w"] * batch}, state[1], state[0], {"lr": 0.1}), {}

    params = {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)}
    actual = expected = params, optimizer.init(params)
    compiled = ft.compiled(backend="eager")(function)
    # RAdam has another formula from its sixth update on.
    for _ in range(7):
        actual, expected = compiled(actual, torch.tensor(2.0))[0], function(expected, torch.tensor(2.0))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def compiled_in_place(layer):
    layer.compile(backend="eager")
    return layer


def compiled_as_a_module(layer):
    return torch.compile(layer, backend="eager")


def compiled_forward(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")
    return layer


@pytest.mark.parametrize("compile_layer", [compiled_in_place, compiled_as_a_module, compiled_forward])
def test_a_model_with_parts_that_torch_compiles_is_captured_whole(compile_layer):
    torch.manual_seed(0)
    model = torch.nn.Sequential(compile_layer(Layer()), Layer())
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    batch = torch.randn(4, 3, dtype=torch.float64)
    expected, _ = step(step.init(), batch)
    whole = ft.compiled(lowering="whole", backend="eager")(step)
    actual, _ = whole(whole.init(), batch)
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-12, atol=1e-12)


def penalised(params, batch):
    """Return a loss with a gradient penalty, of a function for whose backward pass no parameter is saved."""
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x + params["b"]).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean() + (batch * params["b"]).square().mean()


def penalised_by_value(params, batch):
    return penalised(params, batch) * (1.0 if float(batch[0, 0]) else 2.0)


def curvature(params, batch):
    """Return the mean square of a second derivative, as in a physics-informed net."""
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x * params["b"]).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return second.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("loss", [penalised, penalised_by_value, curvature])
def test_a_split_step_does_not_lose_the_gradient_of_a_gradient(loss):
    step, batch = ft.train_step(loss, ft.optim.sgd(0.1)), torch.linspace(-1, 1, 20).view(4, 5)
    state = step.init({"b": torch.linspace(0.5, 1.5, 5)})
    expected, _ = step(state, batch)
    actual, _ = ft.compiled(backend="aot_eager")(step)(state, batch)
    torch.testing.assert_close(actual.params["b"], expected.params["b"])
    split = ft.compiled(lowering="split", backend="aot_eager")(step)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        # Torch runs such a loss uncompiled.
        torch.testing.assert_close(split(state, batch)[0].params["b"], expected.params["b"])
        return
    with pytest.raises(TraceError, match=r"create_graph=True.*lowering='whole'"):
        split(state, batch)


def test_inductor_scales_what_is_added_to_a_matrix_product():
    def loss(params, batch):
        return (batch @ params["w"]).square().mean()

    step = ft.train_step(loss, ft.optim.sgd(0.1, weight_decay=0.1))
    state, batch = step.init({"w": torch.ones(3, 2)}), torch.linspace(-1, 1, 12).view(4, 3)
    expected, _ = step(state, batch)
    actual, _ = ft.compiled(lowering="whole")(step)(state, batch)
    torch.testing.assert_close(actual.params["w"], expected.params["w"])
