"""The precision of float32 matmuls: while a step runs and after it, with `matmul_precision` and with tf32."""

import dataclasses
import json

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.exhaustive import choose
from tests.faults.problem import batch, failing, make, params, squares

SEEN = []
"""The precision at each call of `record_precision`."""


@torch.library.custom_op("ftrain_tests::record_precision", mutates_args=())
def record_precision(x: torch.Tensor) -> torch.Tensor:
    """Record the current precision of float32 matmuls; as a custom operation, it runs within compiled code too."""
    SEEN.append(torch.get_float32_matmul_precision())
    return x.clone()


record_precision.register_fake(torch.empty_like)
record_precision.register_autograd(lambda ctx, grad: record_precision(grad))


def recording(params, batch):
    return squares({**params, "w": record_precision(params["w"])}, batch)


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


def test_bf16_and_a_matmul_precision_go_together():
    step = make(squares, ft.with_amp("bf16"), ft.matmul_precision("high"))
    assert "with_amp(bf16) <- matmul_precision(high)" in repr(step)


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
