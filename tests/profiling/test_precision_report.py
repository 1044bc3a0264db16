"""Precision: the loss scale of fp16, invalid combinations, evaluation in 16 bits, and float32 matmuls."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, LossError, OptionError, StructureError
from ftrain.training import progress
from tests.exhaustive import choose
from tests.faults.problem import assert_bitwise, batch, failing, make, params, squares
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.pipelines import train_on

# The loss scale of fp16


def overflowing(params, batch):
    """Return a loss whose gradients are finite unless the factor of the batch is not."""
    return squares(params, batch) * 2.0**-8 * batch.get("factor", 1.0)


OVERFLOWING_BATCH = {**batch(), "factor": torch.tensor(float("inf"))}


@pytest.mark.parametrize("wrappers", [(), (ft.donated(),), (ft.accumulate(2),), (ft.compiled(backend="eager"),)])
def test_the_metrics_have_the_scale_that_the_step_used(wrappers):
    step = make(overflowing, ft.with_amp("fp16"), ft.skip_nonfinite(), *wrappers)
    state, history = step.init(params()), []
    finite = {**batch(), "factor": torch.ones(())}
    for inputs in (finite, OVERFLOWING_BATCH, OVERFLOWING_BATCH, finite):
        state, metrics = step(state, inputs)
        assert metrics["loss_scale"].shape == ()
        assert metrics["loss_scale"].dtype == torch.float32
        history.append(metrics)
    # Read at the end, because a later step might have written to the tensors of an earlier one.
    assert [float(metrics["loss_scale"]) for metrics in history] == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    assert [bool(metrics["skipped"]) for metrics in history] == [False, True, True, False]
    assert float(state.slots["with_amp"]["scale"]) == 2.0**14


def test_the_metric_loss_scale_shares_no_memory_with_the_state():
    step = make(squares, ft.with_amp("fp16"))
    state = step.init(params())
    new, metrics = step(state, batch())
    addresses = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((state, new))}
    assert metrics["loss_scale"].untyped_storage().data_ptr() not in addresses


def test_fit_records_the_loss_scale():
    step = make(overflowing, ft.with_amp("fp16"), ft.accumulate(2))
    _, history = ft.fit(step, step.init(params()), [batch(), OVERFLOWING_BATCH, batch()], progress=False)
    assert history["loss_scale"] == [2.0**16, 2.0**16, 2.0**15]
    assert "loss_scale" not in progress.describe(history[-1], {}, 1.0, 0)


def test_bf16_has_no_loss_scale():
    step = make(squares, ft.with_amp("bf16"))
    assert set(step(step.init(params()), batch())[1]) == {"loss", "lr"}


def test_a_metric_called_loss_scale_is_refused():
    step = make(lambda params, batch: (squares(params, batch), {"loss_scale": torch.ones(())}), ft.with_amp("fp16"))
    with failing(LossError, "with_amp", "'loss_scale'", "rename"):
        step(step.init(params()), batch())


# Combinations and dtypes


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "tf32"), ("fp16", "fp16")])
def test_two_precisions_at_once_are_refused(names):
    first, second = names
    with failing(ComposeError, f"with_amp({second})", "already has the wrapper with_amp", f"<- with_amp({first})"):
        make(squares, ft.with_amp(first), ft.with_amp(second))


@pytest.mark.parametrize("dtype", [torch.float32, "fp32", "BF16", None, 16, ["bf16"], {}])
def test_an_unknown_dtype_is_refused(dtype):
    with failing(OptionError, "with_amp", repr(dtype), "bf16, fp16, tf32, fp8"):
        ft.with_amp(dtype)
    if dtype is not None:
        with failing(OptionError, "evaluate", repr(dtype), "bf16, fp16 and None"):
            ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype=dtype)


NARROW = [("fp16", torch.bfloat16), ("fp16", torch.float16), ("bf16", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), NARROW)
def test_16_bit_parameters_do_not_train_in_mixed_precision(name, dtype):
    """`torch.amp.GradScaler` refuses float16 gradients, and unscales bfloat16 ones within bfloat16."""
    step = make(squares, ft.with_amp(name))
    inputs = {"w": params()["w"].to(dtype), "b": params()["b"]}
    with failing(
        StructureError, f"with_amp({name})", "params.w", str(dtype).removeprefix("torch."), "float32", "freeze"
    ):
        step.init(inputs)
    state = step.init(params())
    with failing(StructureError, f"with_amp({name})", "params.w"):
        step(dataclasses.replace(state, params=inputs), batch())


@pytest.mark.parametrize(("name", "dtype"), [*NARROW, ("bf16", torch.bfloat16)])
def test_frozen_parameters_may_have_16_bits(name, dtype):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].to(dtype).requires_grad_(False)
    loss = ft.from_module(model, lambda model, batch: model(batch).float().square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp(name))
    state, losses = step.init(), []
    for _ in range(5):
        state, metrics = step(state, torch.ones(3, 4))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert {leaf.dtype for leaf in tree.leaves(state.frozen)} == {dtype}
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32}


def test_bfloat16_parameters_stay_bfloat16_under_bf16():
    step = make(squares, ft.with_amp("bf16"))
    state, _ = step(step.init(tree.cast(params(), torch.bfloat16)), batch())
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.bfloat16}


def test_small_gradients_are_not_lost_in_fp16():
    """This is why parameters must be float32: the scaled gradient fits into float16, the unscaled one does not."""

    def loss(params, batch):
        return (params["w"] * batch).sum()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), ft.with_amp("fp16"))
    state = step.init({"w": torch.zeros(2)})
    state, _ = step(state, torch.full((2,), 2.0**-26))
    assert state.params["w"].tolist() == [-(2.0**-26)] * 2
    assert torch.tensor(2.0**-26).half() == 0


# Evaluation in 16 bits


class Casts(TorchDispatchMode):
    """Records the shape of each tensor that is cast to 16 bits."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and returned.dtype in (torch.bfloat16, torch.float16):
            self.shapes.append(tuple(returned.shape))
        return returned


def trained(*wrappers):
    loss = ft.from_module(make_model(0.3, torch.float32), token_loss)
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.05)), *wrappers)
    return step, train_on(step, [make_batch(index) for index in range(2)])[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.bfloat16, "float16"])
def test_an_evaluation_casts_once_and_leaves_the_state(dtype):
    step, state = trained()
    before, counts = tree.clone(state), []
    param_shapes = {tuple(param.shape) for param in state.params.values()}
    evaluation = ft.eval_step(step.base)
    for number in (1, 4):
        with Casts() as casts:
            ft.evaluate(evaluation, state, [make_batch(index) for index in range(number)], dtype=dtype)
        counts.append(sum(shape in param_shapes for shape in casts.shapes))
    # The parameters and the running statistics, which have the same shapes: once for any number of batches.
    assert counts[0] == counts[1] == len(state.params) + sum("running" in name for name in state.buffers)
    assert_bitwise(state, before)
    actual = ft.evaluate(evaluation, state, [make_batch(7)], dtype=dtype)
    expected = ft.evaluate(evaluation, state, [make_batch(7)])
    assert actual != expected
    assert actual["loss"] == pytest.approx(expected["loss"], rel=2e-2)


def test_an_evaluation_computes_in_the_dtype_throughout():
    output_dtypes, param_dtypes, buffer_dtypes = {}, set(), {}

    def criterion(model, batch):
        hooks = [
            module.register_forward_hook(lambda module, inputs, out, name=name: output_dtypes.update({name: out.dtype}))
            for name, module in model.named_modules()
            if not list(module.children()) and not isinstance(module, nn.ModuleList)
        ]
        loss = token_loss(model, batch)
        for hook in hooks:
            hook.remove()
        param_dtypes.update(leaf.dtype for leaf in model.parameters())
        buffer_dtypes.update((name, leaf.dtype) for name, leaf in model.named_buffers())
        return loss

    model = make_model(0.3, torch.float32)
    state = ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)).init()
    ft.evaluate(ft.eval_step(ft.from_module(model, criterion)), state, [make_batch(0)], dtype="bf16")
    assert param_dtypes == {torch.bfloat16}
    assert {dtype for name, dtype in buffer_dtypes.items() if "running" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in buffer_dtypes.items() if "num_batches" in name} == {torch.int64}
    assert set(output_dtypes.values()) == {torch.bfloat16}


def test_an_evaluation_allows_buffers_that_the_model_replaces_by_float32_ones():
    """Rotary embeddings of transformers do so if their frequencies depend on the length."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            self.scale = torch.full((1,), float(len(x)))
            return self.linear(x.to(self.linear.weight.dtype)) * self.scale

    loss = ft.from_module(Scaled(), lambda model, x: model(x).square().mean())
    state, data = ft.train_step(loss, ft.optim.sgd(0.1)).init(), [torch.ones(2, 3)]
    expected = ft.evaluate(ft.eval_step(loss), state, data)["loss"]
    assert ft.evaluate(ft.eval_step(loss), state, data, dtype="bf16")["loss"] == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_batch_without_examples_changes_no_evaluation(dtype):
    """The mean over no example is NaN, or 0 if the loss guards against that."""
    state, inputs = make().init(params()), batch()
    empty = {name: leaf[:0] for name, leaf in inputs.items()}
    for loss in (squares, lambda params, batch: squares(params, batch).nan_to_num()):
        expected = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype=dtype)
        assert ft.evaluate(ft.eval_step(loss), state, [empty, inputs, empty], dtype=dtype) == expected


def test_labels_and_weights_of_a_batch_stay_exact():
    labels = []

    def loss(params, batch):
        labels.append((batch["y"].dtype, batch["y"].tolist()))
        return ft.Mean(squares(params, batch) * 0 + batch["y"].sum(), torch.tensor(1.0))

    inputs = {**batch(), "y": torch.tensor([1.0, 257.0, 70001.0, 0.1])}
    state = make().init(params())
    actual = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype="fp16")
    assert labels == [(torch.float32, inputs["y"].tolist())]
    assert actual["loss"] == float(inputs["y"].sum())


def test_an_evaluation_in_bf16_of_adapters_frozen_parameters_and_integer_buffers():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    # The outputs are within 3.2 of zero, so their differences from 9 are large, and bfloat16 changes the loss by < 1%.
    loss = ft.from_module(model, lambda model, batch: (model(batch).float() - 9).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(2, targets=["0"]))
    state, before = step.init(seed=3), step.init(seed=3)
    actual = ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)], dtype="bf16")
    assert actual["loss"] == pytest.approx(
        ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)])["loss"], rel=0.01
    )
    assert_bitwise(state, before)

    def checked(params, batch, buffers):
        assert buffers["n"].dtype == torch.int64
        assert buffers["mean"].dtype == torch.bfloat16
        return squares(params, batch), {}, buffers

    plain = ft.train_step(checked, ft.optim.sgd(0.1))
    state = plain.init(params(), buffers={"n": torch.tensor(3), "mean": torch.ones(2)})
    ft.evaluate(ft.eval_step(checked), state, [batch()], dtype="bf16")
    assert state.buffers["mean"].dtype == torch.float32


@pytest.mark.parametrize(("trained_in", "dtype"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", torch.float16)])
def test_an_evaluation_in_another_dtype_than_that_of_the_loss_is_refused(trained_in, dtype):
    step, state = trained(ft.with_amp(trained_in))
    with failing(ComposeError, "evaluate", repr(dtype), f"computes in {trained_in}", f"with_amp({trained_in})"):
        ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=dtype)
    ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=trained_in)
    ft.evaluate(ft.eval_step(step.base), state, [make_batch(0)], dtype=dtype)


# Float32 matmuls


@torch.library.custom_op("ftrain_tests::precision", mutates_args=())
def precision(x: torch.Tensor) -> torch.Tensor:
    """Record the current precision of float32 matmuls; as a custom operation, it runs within compiled code too."""
    SEEN.append(torch.get_float32_matmul_precision())
    return x.clone()


precision.register_fake(torch.empty_like)
precision.register_autograd(lambda ctx, grad: precision(grad))
SEEN = []


def recording(params, batch):
    return squares({**params, "w": precision(params["w"])}, batch)


COMPILATIONS = {
    "eager": (),
    "whole": (ft.compiled(lowering="whole", backend="aot_eager"),),
    "split": (ft.compiled(lowering="split", backend="aot_eager"),),
    "inductor": (ft.compiled(lowering="whole", donate=True),),
}
compilations = pytest.mark.parametrize("compilation", choose(COMPILATIONS, ["eager", "whole", "split"]))


@pytest.fixture(autouse=True)
def _precision_is_restored():
    before = torch.get_float32_matmul_precision()
    yield
    assert torch.get_float32_matmul_precision() == before
    SEEN.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@compilations
def test_each_step_keeps_its_own_precision(compilation):
    # Inductor is slow, and two steps in turns are enough.
    names = ("high", "highest") if compilation == "inductor" else ("medium", "high", "highest")
    steps = {name: make(recording, ft.matmul_precision(name), *COMPILATIONS[compilation]) for name in names}
    states = {name: step.init(params()) for name, step in steps.items()}
    for number in range(3):
        for name, step in steps.items():
            SEEN.clear()
            states[name], _ = step(states[name], batch())
            # Forward and backward, and the runs that capture a compiled step.
            assert len(SEEN) >= 2
            assert set(SEEN) == {name}, number
            assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_restores_the_precision_of_the_process_after_errors_too():
    torch.set_float32_matmul_precision("medium")
    try:
        step = make(recording, ft.matmul_precision("highest"))
        state = step.init(params())
        step(state, batch())
        assert set(SEEN) == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError):
            step(state, {})
        assert torch.get_float32_matmul_precision() == "medium"
        SEEN.clear()
        make(recording)(state, batch())
        assert set(SEEN) == {"medium"}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_step_within_the_loss_of_another_keeps_its_precision():
    """The precision of the outer step holds again as soon as the inner one is done."""
    inner = make(recording, ft.matmul_precision("high"))
    inner_state = inner.init(params())

    def outer_loss(params, batch):
        start = recording(params, batch)
        inner(inner_state, batch)
        return start + recording(params, batch)

    outer = make(outer_loss, ft.matmul_precision("medium"))
    outer(outer.init(params()), batch())
    assert SEEN == ["medium", "high", "high", "medium", "medium", "medium"]


def test_an_evaluation_of_the_loss_of_a_step_has_its_precision():
    step = make(recording, ft.matmul_precision("medium"))
    ft.evaluate(ft.eval_step(step.loss), step.init(params()), [batch()])
    assert set(SEEN) == {"medium"}


def test_the_precision_changes_the_result_if_the_device_has_faster_matmuls():
    weight, x = torch.randn(256, 256), torch.randn(64, 256)

    def loss(params, batch):
        return (batch @ params["w"]).square().mean()

    products, params_after_step = {}, {}
    for name in ("medium", "highest"):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.matmul_precision(name))
        state, _ = step(step.init({"w": weight}), x)
        params_after_step[name] = state.params["w"]
        torch.set_float32_matmul_precision(name)
        products[name] = x @ weight
    # The last precision that the loop sets is that of the process, "highest".
    device_is_faster = not torch.equal(products["medium"], products["highest"])
    assert torch.equal(params_after_step["medium"], params_after_step["highest"]) is not device_is_faster


def test_matmul_precision_is_printed_with_the_step():
    assert "loss    squares <- matmul_precision(high)" in repr(make(squares, ft.matmul_precision("high")))


@pytest.mark.parametrize("value", ["tf32", "HIGH", None, 1, torch.float32])
def test_an_unknown_precision_is_refused(value):
    with failing(OptionError, "matmul_precision", repr(value), "highest, high, medium"):
        ft.matmul_precision(value)


def test_matmul_precision_without_an_argument_is_refused():
    with failing(ComposeError, "matmul_precision", "needs the argument precision"):
        ft.matmul_precision(make())


def test_tf32_and_a_matmul_precision_are_refused_together():
    for first, second in (
        (ft.matmul_precision("high"), ft.with_amp("tf32")),
        (ft.with_amp("tf32"), ft.matmul_precision("high")),
    ):
        with failing(ComposeError, second.text, f"{first.text} sets the precision", "leave out one of the two"):
            make(squares, first, second)
    assert "with_amp(bf16) <- matmul_precision(high)" in repr(
        make(squares, ft.with_amp("bf16"), ft.matmul_precision("high"))
    )


SWITCHES = {
    "all": torch.backends,
    "cuda": torch.backends.cuda.matmul,
    "mkldnn": torch.backends.mkldnn.matmul,
}
"""The objects with torch's newer setting, `fp32_precision`, for all devices and for one kind of device."""


@pytest.fixture
def switch_to():
    """Return a function that sets `fp32_precision`, which is "none" everywhere before; restored after the test."""
    before = {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    for switch in SWITCHES.values():
        switch.fp32_precision = "none"
    yield lambda name, value: setattr(SWITCHES[name], "fp32_precision", value)
    for name, switch in SWITCHES.items():
        switch.fp32_precision = before[name]


@pytest.mark.parametrize("name", SWITCHES)
def test_a_precision_in_the_newer_setting_is_refused_and_saved(name, switch_to, tmp_path):
    """Torch then refuses to return the precision, so a step cannot restore it; a checkpoint records the setting."""
    step = make(squares, ft.matmul_precision("high"))
    state = step.init(params())
    switch_to(name, "tf32")
    with failing(OptionError, "fp32_precision", "matmul_precision", "leave out"):
        step(state, batch())
    ft.checkpoint.save(tmp_path / "saved", state)
    saved = json.loads((tmp_path / "saved" / "MANIFEST.json").read_text())
    assert "tf32" in saved["environment"]["matmul_precision"]


@pytest.mark.parametrize("name", ["cuda", "mkldnn"])
@pytest.mark.parametrize("set_before", ["none", "ieee"])
def test_the_newer_setting_reaches_matmuls_after_a_step_as_before(name, set_before, switch_to):
    switch_to(name, set_before)
    step = make(squares, ft.matmul_precision("high"))
    step(step.init(params()), batch())
    assert SWITCHES[name].fp32_precision == set_before
    switch_to("all", "tf32")
    assert SWITCHES[name].fp32_precision == ("tf32" if set_before == "none" else "ieee")


# TF32


@pytest.fixture
def cpu_with():
    """Return a function that replaces fields of the record of the CPU; restored after the test."""
    real = ft.backends.get("cpu")
    yield lambda **fields: ft.backends.register(dataclasses.replace(real, **fields))
    ft.backends.register(real)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@compilations
def test_tf32_holds_while_a_step_runs(compilation, cpu_with):
    cpu_with(tf32=lambda: ft.backends.device_module.float32_matmul_precision("high"))
    step = make(recording, ft.with_amp("tf32"), *COMPILATIONS[compilation])
    plain_step = make(recording, *COMPILATIONS[compilation])
    state, plain_state = step.init(params()), plain_step.init(params())
    for _ in range(2):
        SEEN.clear()
        state, _ = step(state, batch())
        assert set(SEEN) == {"high"}
        SEEN.clear()
        plain_state, _ = plain_step(plain_state, batch())
        assert set(SEEN) == {"highest"}


def test_tf32_is_set_on_every_available_device_and_does_not_need_the_default_one(cpu_with, monkeypatch):
    """The state may be on another device than the one that `FTRAIN_BACKEND` chooses for new states."""
    monkeypatch.setattr(ft.backends.registry, "default", lambda: pytest.fail("the default device was asked"))
    entered = []

    @ft.backends.device_module.contextmanager
    def switch():
        entered.append(True)
        yield

    cpu_with(tf32=switch)
    step = make(squares, ft.with_amp("tf32"))
    state = step.init(params())
    entered.clear()
    step(state, batch())
    assert entered == [True]
