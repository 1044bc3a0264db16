"""Precision: the scale of fp16, what may be asked for together, evaluation in a narrow dtype, float32 products."""

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
from tests.laws.test_pipelines import train_on

# The scale of fp16


def overflowing(params, batch):
    """Gradients that are finite or not as the batch says."""
    return squares(params, batch) * 2.0**-8 * batch.get("factor", 1.0)


BAD = {**batch(), "factor": torch.tensor(float("inf"))}


@pytest.mark.parametrize("more", [(), (ft.donated(),), (ft.accumulate(2),), (ft.compiled(backend="eager"),)])
def test_the_metrics_have_the_scale_that_the_step_used(more):
    step = make(overflowing, ft.with_amp("fp16"), ft.skip_nonfinite(), *more)
    state, seen = step.init(params()), []
    for inputs in (batch(), BAD, BAD, batch()):
        state, metrics = step(state, inputs if not more or "factor" in inputs else {**inputs, "factor": torch.ones(())})
        assert metrics["loss_scale"].shape == ()
        assert metrics["loss_scale"].dtype == torch.float32
        seen.append(metrics)
    # Read at the end: nothing that came later has written over them.
    assert [float(metrics["loss_scale"]) for metrics in seen] == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    assert [bool(metrics["skipped"]) for metrics in seen] == [False, True, True, False]
    assert float(state.slots["with_amp"]["scale"]) == 2.0**14


def test_the_metric_shares_no_memory_with_the_state():
    step = make(squares, ft.with_amp("fp16"))
    state = step.init(params())
    new, metrics = step(state, batch())
    held = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((state, new))}
    assert metrics["loss_scale"].untyped_storage().data_ptr() not in held


def test_fit_records_the_scale():
    step = make(overflowing, ft.with_amp("fp16"), ft.accumulate(2))
    _, history = ft.fit(step, step.init(params()), [batch(), BAD, batch()], progress=False)
    assert history["loss_scale"] == [2.0**16, 2.0**16, 2.0**15]
    assert "loss_scale" not in progress.describe(history[-1], {}, 1.0, 0)


def test_other_dtypes_have_no_scale():
    step = make(squares, ft.with_amp("bf16"))
    assert set(step(step.init(params()), batch())[1]) == {"loss", "lr"}


def test_a_metric_of_that_name_is_refused():
    step = make(lambda params, batch: (squares(params, batch), {"loss_scale": torch.ones(())}), ft.with_amp("fp16"))
    with failing(LossError, "with_amp", "'loss_scale'", "rename"):
        step(step.init(params()), batch())


# What may be asked for together


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "tf32"), ("fp16", "fp16")])
def test_two_precisions_at_once(names):
    first, second = names
    with failing(ComposeError, f"with_amp({second})", "already has the wrapper with_amp", f"<- with_amp({first})"):
        make(squares, ft.with_amp(first), ft.with_amp(second))


@pytest.mark.parametrize("dtype", [torch.float32, "fp32", "BF16", None, 16, ["bf16"], {}])
def test_an_unknown_dtype(dtype):
    with failing(OptionError, "with_amp", repr(dtype), "bf16, fp16, tf32, fp8"):
        ft.with_amp(dtype)
    if dtype is not None:
        with failing(OptionError, "evaluate", repr(dtype), "bf16, fp16 and None"):
            ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype=dtype)


NARROW = [("fp16", torch.bfloat16), ("fp16", torch.float16), ("bf16", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), NARROW)
def test_narrow_parameters_do_not_train_in_mixed_precision(name, dtype):
    """`torch.amp.GradScaler` refuses float16 gradients, and unscales bfloat16 ones within bfloat16."""
    step = make(squares, ft.with_amp(name))
    inputs = {"w": params()["w"].to(dtype), "b": params()["b"]}
    with failing(
        StructureError, f"with_amp({name})", "params.w", str(dtype).removeprefix("torch."), "float32", "freeze"
    ):
        step.init(inputs)
    wide = step.init(params())
    with failing(StructureError, f"with_amp({name})", "params.w"):
        step(dataclasses.replace(wide, params=inputs), batch())


@pytest.mark.parametrize(("name", "dtype"), [*NARROW, ("bf16", torch.bfloat16)])
def test_what_is_frozen_may_be_narrow(name, dtype):
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


def test_bfloat16_parameters_train_under_bf16_as_they_are():
    step = make(squares, ft.with_amp("bf16"))
    state, _ = step(step.init(tree.cast(params(), torch.bfloat16)), batch())
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.bfloat16}


def test_small_gradients_are_what_narrow_parameters_would_lose():
    """Why: a gradient of 2**-26 is representable when it is scaled, and not when it is scaled back to float16."""
    loss = lambda params, batch: (params["w"] * batch).sum()  # noqa: E731
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), ft.with_amp("fp16"))
    state = step.init({"w": torch.zeros(2)})
    state, _ = step(state, torch.full((2,), 2.0**-26))
    assert state.params["w"].tolist() == [-(2.0**-26)] * 2
    assert torch.tensor(2.0**-26).half() == 0


# Evaluation in a narrow dtype


class Casts(TorchDispatchMode):
    """Counts the casts of tensors of at least two axes to narrow dtypes, by shape."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and returned.dtype in (torch.bfloat16, torch.float16):
            self.found.append(tuple(returned.shape))
        return returned


def trained(*wrappers):
    loss = ft.from_module(make_model(0.3, torch.float32), token_loss)
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.05)), *wrappers)
    return step, train_on(step, [make_batch(index) for index in range(2)])[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.bfloat16, "float16"])
def test_an_evaluation_casts_once_and_leaves_the_state(dtype):
    step, state = trained()
    kept, counts = tree.clone(state), []
    evaluation = ft.eval_step(step.base)
    for number in (1, 4):
        with Casts() as casts:
            ft.evaluate(evaluation, state, [make_batch(index) for index in range(number)], dtype=dtype)
        counts.append(len([shape for shape in casts.found if shape in {tuple(p.shape) for p in state.params.values()}]))
    # Parameters, and the float buffers whose shapes are those of parameters: once, however many batches there are.
    assert counts[0] == counts[1] == len(state.params) + sum("running" in name for name in state.buffers)
    assert_bitwise(state, kept)
    actual = ft.evaluate(evaluation, state, [make_batch(7)], dtype=dtype)
    expected = ft.evaluate(evaluation, state, [make_batch(7)])
    assert actual != expected
    assert actual["loss"] == pytest.approx(expected["loss"], rel=2e-2)


def test_an_evaluation_computes_in_the_dtype_throughout():
    seen = {}

    def criterion(model, batch):
        hooks = [
            part.register_forward_hook(lambda part, inputs, out, name=name: seen.update({name: out.dtype}))
            for name, part in model.named_modules()
            if not list(part.children()) and not isinstance(part, nn.ModuleList)
        ]
        actual = token_loss(model, batch)
        for hook in hooks:
            hook.remove()
        seen["params"] = {leaf.dtype for leaf in model.parameters()}
        seen["buffers"] = {name: leaf.dtype for name, leaf in model.named_buffers()}
        return actual

    model = make_model(0.3, torch.float32)
    state = ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)).init()
    ft.evaluate(ft.eval_step(ft.from_module(model, criterion)), state, [make_batch(0)], dtype="bf16")
    assert seen.pop("params") == {torch.bfloat16}
    buffers = seen.pop("buffers")
    assert {dtype for name, dtype in buffers.items() if "running" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in buffers.items() if "num_batches" in name} == {torch.int64}
    assert set(seen.values()) == {torch.bfloat16}


def test_an_evaluation_takes_buffers_that_the_model_computes_again_in_float32():
    """As the rotary embeddings of transformers do whose frequencies depend on the length."""

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
    """Its mean is NaN, or 0 where that was guarded against."""
    state, inputs = make().init(params()), batch()
    empty = {name: leaf[:0] for name, leaf in inputs.items()}
    for loss in (squares, lambda params, batch: squares(params, batch).nan_to_num()):
        expected = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype=dtype)
        assert ft.evaluate(ft.eval_step(loss), state, [empty, inputs, empty], dtype=dtype) == expected


def test_labels_and_weights_of_a_batch_stay_exact():
    seen = []

    def loss(params, batch):
        seen.append((batch["y"].dtype, batch["y"].tolist()))
        return ft.Mean(squares(params, batch) * 0 + batch["y"].sum(), torch.tensor(1.0))

    inputs = {**batch(), "y": torch.tensor([1.0, 257.0, 70001.0, 0.1])}
    state = make().init(params())
    actual = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype="fp16")
    assert seen == [(torch.float32, inputs["y"].tolist())]
    assert actual["loss"] == float(inputs["y"].sum())


def test_trees_with_other_leaves_frozen_parts_and_adapters():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    # The outputs lie within 3.2 of zero, so the differences from 9 do not vanish: 1 in 100 is more than bfloat16 errs.
    loss = ft.from_module(model, lambda model, batch: (model(batch).float() - 9).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(2, targets=["0"]))
    state, kept = (step.init(seed=3), step.init(seed=3))
    actual = ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)], dtype="bf16")
    assert actual["loss"] == pytest.approx(
        ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)])["loss"], rel=0.01
    )
    assert_bitwise(state, kept)

    def counting(params, batch, buffers):
        assert buffers["n"].dtype == torch.int64
        assert buffers["mean"].dtype == torch.bfloat16
        return squares(params, batch), {}, buffers

    plain = ft.train_step(counting, ft.optim.sgd(0.1))
    state = plain.init(params(), buffers={"n": torch.tensor(3), "mean": torch.ones(2)})
    ft.evaluate(ft.eval_step(counting), state, [batch()], dtype="bf16")
    assert state.buffers["mean"].dtype == torch.float32


@pytest.mark.parametrize(("trained_in", "dtype"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", torch.float16)])
def test_an_evaluation_in_another_dtype_than_that_of_the_loss(trained_in, dtype):
    step, state = trained(ft.with_amp(trained_in))
    with failing(ComposeError, "evaluate", repr(dtype), f"computes in {trained_in}", f"with_amp({trained_in})"):
        ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=dtype)
    ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=trained_in)
    ft.evaluate(ft.eval_step(step.base), state, [make_batch(0)], dtype=dtype)


# Float32 products


@torch.library.custom_op("ftrain_tests::precision", mutates_args=())
def precision(x: torch.Tensor) -> torch.Tensor:
    """What the precision of float32 matmuls is when this runs; the compiled code of a step has it as an operation."""
    SEEN.append(torch.get_float32_matmul_precision())
    return x.clone()


precision.register_fake(torch.empty_like)
precision.register_autograd(lambda ctx, grad: precision(grad))
SEEN = []


def probing(params, batch):
    return squares({**params, "w": precision(params["w"])}, batch)


WAYS = {
    "eager": (),
    "whole": (ft.compiled(lowering="whole", backend="aot_eager"),),
    "split": (ft.compiled(lowering="split", backend="aot_eager"),),
    "inductor": (ft.compiled(lowering="whole", donate=True),),
}
ways = pytest.mark.parametrize("way", choose(WAYS, ["eager", "whole", "split"]))


@pytest.fixture(autouse=True)
def _precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    yield
    assert torch.get_float32_matmul_precision() == before
    SEEN.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@ways
def test_each_step_keeps_its_own_precision(way):
    # Inductor takes its time, and two steps that take turns show it as three do.
    names = ("medium", "high", "highest")[way == "inductor" :]
    steps = {name: make(probing, ft.matmul_precision(name), *WAYS[way]) for name in names}
    states = {name: step.init(params()) for name, step in steps.items()}
    for turn in range(3):
        for name, step in steps.items():
            SEEN.clear()
            states[name], _ = step(states[name], batch())
            # Forward and backward, and where it is compiled, the runs that capture it.
            assert len(SEEN) >= 2
            assert set(SEEN) == {name}, turn
            assert torch.get_float32_matmul_precision() == "highest"


def test_a_step_within_another_scope_and_an_error_put_it_back():
    torch.set_float32_matmul_precision("medium")
    try:
        step = make(probing, ft.matmul_precision("highest"))
        state = step.init(params())
        step(state, batch())
        assert set(SEEN) == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(KeyError):
            step(state, {})
        assert torch.get_float32_matmul_precision() == "medium"
        SEEN.clear()
        make(probing)(state, batch())
        assert set(SEEN) == {"medium"}
    finally:
        torch.set_float32_matmul_precision("highest")


def test_steps_within_a_step_keep_theirs():
    """As of two networks that train each other: the inner one's precision holds until it is done."""
    inner = make(probing, ft.matmul_precision("high"))
    held = inner.init(params())

    def outer_loss(params, batch):
        start = probing(params, batch)
        inner(held, batch)
        return start + probing(params, batch)

    outer = make(outer_loss, ft.matmul_precision("medium"))
    outer(outer.init(params()), batch())
    assert SEEN == ["medium", "high", "high", "medium", "medium", "medium"]


def test_an_evaluation_of_the_steps_loss_has_its_precision():
    step = make(probing, ft.matmul_precision("medium"))
    ft.evaluate(ft.eval_step(step.loss), step.init(params()), [batch()])
    assert set(SEEN) == {"medium"}


def test_it_changes_what_is_computed_where_the_device_can():
    weight, x = torch.randn(256, 256, dtype=torch.float64), torch.randn(64, 256)
    loss = lambda params, batch: (batch @ params["w"]).square().mean()  # noqa: E731
    actual = {}
    for name in ("medium", "highest"):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.matmul_precision(name))
        state, _ = step(step.init({"w": weight.float()}), x)
        actual[name] = state.params["w"]
    torch.set_float32_matmul_precision("medium")
    able = not torch.equal(
        x @ weight.float(), (lambda: (torch.set_float32_matmul_precision("highest"), x @ weight.float())[1])()
    )
    assert torch.equal(actual["medium"], actual["highest"]) is not able


def test_it_prints():
    assert "loss    squares <- matmul_precision(high)" in repr(make(squares, ft.matmul_precision("high")))


@pytest.mark.parametrize("value", ["tf32", "HIGH", None, 1, torch.float32])
def test_an_unknown_precision(value):
    with failing(OptionError, "matmul_precision", repr(value), "highest, high, medium"):
        ft.matmul_precision(value)


def test_bare_it_needs_a_precision():
    with failing(ComposeError, "matmul_precision", "needs the argument precision"):
        ft.matmul_precision(make())


def test_tf32_and_a_precision_set_the_same():
    for pair in (
        (ft.matmul_precision("high"), ft.with_amp("tf32")),
        (ft.with_amp("tf32"), ft.matmul_precision("high")),
    ):
        with failing(ComposeError, pair[1].text, f"{pair[0].text} sets the precision", "leave out one of the two"):
            make(squares, *pair)
    assert "with_amp(bf16) <- matmul_precision(high)" in repr(
        make(squares, ft.with_amp("bf16"), ft.matmul_precision("high"))
    )


SWITCHES = {
    "all": torch.backends,
    "cuda": torch.backends.cuda.matmul,
    "mkldnn": torch.backends.mkldnn.matmul,
}
"""What has torch's newer setting of the precision, for all devices and for one."""


@pytest.fixture
def switch_to():
    """Set the newer setting of torch, which is "none" everywhere before, until the test ends."""
    before = {name: switch.fp32_precision for name, switch in SWITCHES.items()}
    for switch in SWITCHES.values():
        switch.fp32_precision = "none"
    yield lambda name, value: setattr(SWITCHES[name], "fp32_precision", value)
    for name, switch in SWITCHES.items():
        switch.fp32_precision = before[name]


@pytest.mark.parametrize("name", SWITCHES)
def test_precisions_that_were_set_for_all_devices_or_for_one(name, switch_to, tmp_path):
    """Torch then refuses to say what the precision is: it cannot be restored, and is saved as it was set."""
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
def test_torchs_newer_setting_reaches_matmuls_afterwards_as_before(name, set_before, switch_to):
    switch_to(name, set_before)
    step = make(squares, ft.matmul_precision("high"))
    step(step.init(params()), batch())
    assert SWITCHES[name].fp32_precision == set_before
    switch_to("all", "tf32")
    assert SWITCHES[name].fp32_precision == ("tf32" if set_before == "none" else "ieee")


# TF32


@pytest.fixture
def cpu_with():
    """Replace the record of the CPU by one with other fields, until the test ends."""
    real = ft.backends.get("cpu")
    yield lambda **fields: ft.backends.register(dataclasses.replace(real, **fields))
    ft.backends.register(real)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@ways
def test_tf32_holds_while_a_step_runs_however_it_does(way, cpu_with):
    cpu_with(tf32=lambda: ft.backends.device_module.float32_matmul_precision("high"))
    step, other = make(probing, ft.with_amp("tf32"), *WAYS[way]), make(probing, *WAYS[way])
    state, plain = step.init(params()), other.init(params())
    for _ in range(2):
        SEEN.clear()
        state, _ = step(state, batch())
        assert set(SEEN) == {"high"}
        SEEN.clear()
        plain, _ = other(plain, batch())
        assert set(SEEN) == {"highest"}


def test_tf32_is_asked_of_every_device_here_and_not_of_the_default_one(cpu_with, monkeypatch):
    """The state may be elsewhere than where `FTRAIN_BACKEND` says that new ones go."""
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
