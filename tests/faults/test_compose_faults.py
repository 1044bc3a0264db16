"""Steps, wrappers, optimizers and functions that cannot be composed."""

import logging

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, LossError, OptionError, StructureError
from ftrain.types import Optimizer
from tests.faults.problem import batch, failing, make, params, squares

WRAPPERS = {
    "accumulate": ft.accumulate(2),
    "clip": ft.clip(1.0),
    "remat": ft.remat(),
    "with_amp": ft.with_amp("bf16"),
    "matmul_precision": ft.matmul_precision("high"),
    "ema": ft.ema(0.9),
    "skip_nonfinite": ft.skip_nonfinite(),
    "donated": ft.donated(),
    "offload_opt_state": ft.offload("opt_state"),
    "offload_activations": ft.offload("activations"),
    "update_in_backward": ft.update_in_backward(),
    "compiled": ft.compiled(),
}
wrappers = pytest.mark.parametrize("name", WRAPPERS)


def plain(state, batch):
    return {**state, "count": state["count"] + batch}, {"loss": state["count"]}


@wrappers
def test_a_wrapper_cannot_be_applied_twice(name):
    step = WRAPPERS[name](make())
    with failing(ComposeError, WRAPPERS[name].text, f"already has the wrapper {name}", "loss    squares"):
        WRAPPERS[name](step)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ft.clip(1.0), ft.clip(value=1.0)),
        (ft.with_amp("bf16"), ft.with_amp("fp16")),
        (ft.accumulate(2), ft.accumulate(4)),
    ],
)
def test_a_wrapper_cannot_be_applied_twice_with_different_options_and_another_wrapper_in_between(first, second):
    with failing(ComposeError, second.text, "already"):
        ft.compose(make(), first, ft.ema(0.9), second)


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != "compiled"])
def test_a_plain_function_that_a_wrapper_cannot_act_on_is_an_error(name):
    with failing(ComposeError, WRAPPERS[name].text, "plain is a function", "train_step", "Step") as caught:
        WRAPPERS[name](plain)
    assert isinstance(caught.value, TypeError)


def test_a_plain_function_can_be_compiled():
    step = ft.compiled(backend="eager")(plain)
    state, metrics = step({"count": torch.tensor(1.0)}, torch.tensor(2.0))
    assert float(state["count"]) == 3
    assert float(metrics["loss"]) == 1
    assert "plain" in repr(step)


def test_a_plain_function_of_steps_runs_uncompiled_and_says_so(caplog):
    step = make(squares)

    def twice(state, batch):
        return step(step(state, batch)[0], batch)

    with caplog.at_level(logging.WARNING, "ftrain"):
        compiled = ft.compiled(backend="eager")(twice)
        actual, _ = compiled(step.init(params()), batch())
        again, _ = compiled(step.init(params()), batch())
    assert len(caplog.records) == 1
    assert "twice runs uncompiled" in caplog.text
    expected, _ = twice(step.init(params()), batch())
    for name in params():
        assert torch.equal(actual.params[name], expected.params[name])
        assert torch.equal(again.params[name], expected.params[name])


@wrappers
@pytest.mark.parametrize("argument", [5, None, "step"])
def test_a_wrapper_of_an_object_that_is_not_a_step_is_an_error(name, argument):
    with failing(ComposeError, WRAPPERS[name].text, repr(argument), type(argument).__name__):
        WRAPPERS[name](argument)


@pytest.mark.parametrize("argument", [make(), plain], ids=["step", "plain"])
def test_a_wrapper_without_its_required_option_is_an_error(argument):
    # `ft.accumulate(step)` must name the missing option, and not raise Python's TypeError.
    with pytest.raises(ft.errors.FtrainError, match=r"accumulate\b.*\bn\b"):
        ft.accumulate(argument)


CALLS = {
    "fit": lambda step, state: ft.fit(step, state, [batch()]),
    "iterate": lambda step, state: next(ft.iterate(step, state, [batch()])),
    "evaluate": lambda step, state: ft.evaluate(step, state, [batch()]),
    "anatomy": lambda step, state: ft.anatomy(step, state, batch()),
    "hints": lambda step, state: ft.hints(step, state, batch()),
    "ladder": lambda step, state: ft.ladder(step, state, batch()),
    "tune": lambda step, state: ft.tune(step, state, batch()),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_step_and_a_state_in_the_wrong_order_are_an_error(name):
    step = ft.eval_step(squares) if name == "evaluate" else make()
    with failing(ComposeError, f"{name}: the step and the state are swapped; needs {name}(step, state, "):
        CALLS[name](make().init(params()), step)


@pytest.mark.parametrize("name", ["hints", "ladder", "tune", "anatomy"])
def test_an_argument_that_is_not_a_state_is_an_error_of_the_called_function(name):
    with failing(StructureError, f"{name}: the state is dict; needs the TrainState of step.init()"):
        getattr(ft, name)(make(), params(), batch())


@pytest.mark.parametrize("name", list(CALLS))
def test_a_class_in_place_of_the_step_is_an_error(name):
    class Homemade:
        def __call__(self, state, batch):
            return state, {}

    with failing(
        ComposeError, f"{name}: the step is the class Homemade; needs an instance of it: {name}(step, state, "
    ):
        CALLS[name](Homemade, make().init(params()))


def test_iterate_with_a_step_that_is_not_a_function_is_an_error():
    with failing(ComposeError, "iterate: the step is NoneType; needs a Step or a function (state, batch)"):
        CALLS["iterate"](None, make().init(params()))


@pytest.mark.parametrize("name", ["fit", "iterate"])
def test_a_module_in_place_of_the_step_is_an_error(name):
    with failing(ComposeError, f"{name}: the step is the module Linear; needs a step that trains it"):
        CALLS[name](torch.nn.Linear(2, 1), make().init(params()))


@pytest.mark.parametrize(("wrapper", "verb"), [(ft.compiled, "wraps"), (ft.remat, "changes the loss of")])
def test_a_wrapper_of_a_module_is_an_error(wrapper, verb):
    with failing(ComposeError, f"{verb} a Step, and the argument is a Linear", "ft.train_step(loss_fn, optimizer)"):
        wrapper()(torch.nn.Linear(2, 1))


def test_a_step_that_returns_no_pair_is_an_error():
    with failing(ComposeError, "iterate: the step returned TrainState; needs a pair (state, metrics)"):
        CALLS["iterate"](lambda state, batch: state, make().init(params()))


@pytest.mark.parametrize("metrics", [3.0, torch.ones(()), [torch.ones(())]])
def test_a_step_that_returns_no_dict_of_metrics_is_an_error(metrics):
    name = type(metrics).__name__
    with failing(
        ComposeError, f"fit: the step returned {name} as the metrics of step 1; needs a dict of values by name"
    ):
        CALLS["fit"](lambda state, batch: (state, metrics), make().init(params()))


def test_an_eval_step_of_a_step_is_an_error():
    with failing(LossError, "eval_step: the loss is a Step; pass its loss: eval_step(step.loss)"):
        ft.eval_step(make())


def plain_of_blocks(name, module):
    return "full"


@pytest.mark.parametrize("wrapper", [ft.remat, ft.clip], ids=["remat", "clip"])
def test_an_option_by_position_is_not_taken_for_a_step(wrapper):
    with failing(ComposeError, wrapper.__name__, "plain_of_blocks is a function", "Pass options by name"):
        wrapper(plain_of_blocks)


@pytest.mark.parametrize("blocks", ["0", torch.nn.Linear, {torch.nn.Linear}, 3])
def test_wrong_blocks_are_an_error(blocks):
    with failing(OptionError, f"remat: blocks is {blocks!r}", "a list of types and dotted names"):
        ft.remat(blocks=blocks)


@pytest.mark.parametrize("blocks", [[torch.nn.Linear], {"torch.nn.Linear": "dots"}, torch.nn.Linear])
def test_blocks_by_position_are_an_error(blocks):
    with failing(OptionError, "remat: policy is", "Blocks are given as blocks="):
        ft.remat(blocks)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda step: ft.accumulate(step, 4),
        lambda step: ft.clip(step, max_norm=1.0),
        lambda step: ft.remat(step, "dots"),
    ],
    ids=["accumulate", "clip", "remat"],
)
def test_a_step_among_the_options_of_a_wrapper_is_an_error(wrap):
    with failing(ComposeError, "got a step and options", "(...)(step)"):
        wrap(make())


def test_compose_with_a_wrapper_that_lacks_its_option_is_an_error():
    with failing(ComposeError, "accumulate: needs the argument n: accumulate(n)(step)"):
        ft.compose(make(), ft.accumulate)


@pytest.mark.parametrize("argument", [None, 1.0, "clip"])
def test_compose_with_an_object_that_is_not_a_wrapper_is_an_error(argument):
    with failing(ComposeError, "compose", "argument 2", repr(argument), "ft.clip(1.0)"):
        ft.compose(make(), ft.ema(0.9), argument)


def test_compose_with_a_step_among_the_wrappers_is_an_error():
    with failing(ComposeError, "compose", "argument 1", "needs a wrapper"):
        ft.compose(make(), make())


def test_compose_calls_wrappers_that_need_no_option():
    step = ft.compose(make(), ft.clip, ft.ema, ft.compiled)
    assert [wrapper.name for wrapper in step.wrappers] == ["clip", "ema", "compiled"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [(lambda w, g: w.double() - g, "found float64[2], needs float32[2]"), (lambda w, g: w[None] - g, "[1, 2]")],
)
def test_an_optimizer_of_ones_own_that_returns_other_parameters_is_an_error(rule, message):
    def update(grads, opt_state, params, hyper, *, donate=False):
        return {"w": rule(params["w"], grads["w"])}, opt_state

    optimizer = Optimizer(lambda params: {}, update, {}, "homemade")
    step = ft.train_step(lambda params, batch: params["w"].sum(), optimizer)
    with failing(StructureError, "Step", "what homemade returned", "params.w", message):
        step(step.init({"w": torch.ones(2)}), None)


RETURNS_NOTHING = {
    "the gradient function returned NoneType; needs Gradients": {"grad": ft.OnGrad(lambda grad: lambda *_: None)},
    "the gradient function that its wrap returned is NoneType": {"grad": ft.OnGrad(lambda grad: None)},
    "the update function returned NoneType; needs TrainState": {"update": ft.OnUpdate(lambda _: lambda *_, **__: None)},
    "the update function that its wrap returned is NoneType": {"update": ft.OnUpdate(lambda update: None)},
    "its optimizer returned NoneType; needs an Optimizer": {"update": ft.OnUpdate(optimizer=lambda optimizer: None)},
    "its wrap returned NoneType; needs a Loss": {"loss": ft.OnLoss(lambda loss: None)},
}


@pytest.mark.parametrize(("field", "record"), [("grad", "OnGrad"), ("slot", "SlotSpec")])
def test_a_part_of_a_wrapper_that_is_a_function_and_no_record_is_an_error(field, record):
    with failing(ComposeError, f"Wrapper: {field} of own is a function; needs {field}=ft.{record}(...)"):
        ft.Wrapper("own", **{field: lambda params: {}})


@pytest.mark.parametrize("message", RETURNS_NOTHING)
@pytest.mark.parametrize("outer", [(), (ft.clip(1.0), ft.ema(0.9)), (ft.accumulate(2),)])
def test_a_wrapper_of_ones_own_that_returns_nothing_is_an_error(message, outer):
    wrapper = ft.Wrapper("own", **RETURNS_NOTHING[message])
    with failing(ComposeError, f"own: {message}"):
        step = ft.compose(make(), wrapper, *outer)
        step(step.init(params()), batch())


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1), torch.optim.AdamW, ft.optim.adamw, None, 0.1],
)
def test_an_optimizer_that_is_none_of_ours_is_an_error(optimizer):
    with failing(ComposeError, "train_step", "optimizer", type(optimizer).__name__, "ft.optim.adamw"):
        ft.train_step(squares, optimizer)


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_of_ema_out_of_range_is_an_error(decay):
    with failing(OptionError, "ema", "decay", repr(decay), "[0, 1)"):
        ft.ema(decay)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_of_clip_out_of_range_is_an_error(limit):
    if limit != float("inf"):  # It reports the norm alone.
        with failing(OptionError, "clip", repr(limit), "positive"):
            ft.clip(limit)
    with failing(OptionError, "clip", repr(limit), "positive"):
        ft.clip(value=limit)


def test_clip_without_a_limit_is_an_error():
    with failing(OptionError, "clip", "None", "positive"):
        ft.clip(None)


def test_clip_by_norm_and_value_at_once_is_an_error():
    with failing(OptionError, "clip", "max_norm=1.0", "value=2.0", "one of them"):
        ft.clip(1.0, value=2.0)


@pytest.mark.parametrize("limit", [0, -3, 1.5, None])
def test_a_limit_of_skip_nonfinite_out_of_range_is_an_error(limit):
    with failing(OptionError, "skip_nonfinite", "limit", repr(limit), "whole number"):
        ft.skip_nonfinite(limit)


def test_a_step_within_autocast_is_warned_of():
    step = ft.train_step(squares, ft.optim.sgd(0.1))
    first = step.init(params())
    later, _ = step(first, batch())
    for state in (first, later):
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match=r"autocast.*ft\.with_amp"):
            step(state, batch())
