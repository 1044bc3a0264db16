"""16-bit dtypes that a device supports natively or by emulation: its record, and the functions that read it."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.backends import cpu, registry
from ftrain.errors import ComposeError, OptionError, StructureError
from ftrain.profiling import doctor
from ftrain.profiling.hints import facts_of, run_rules
from ftrain.profiling.ladder import run
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares
from tests.profiling.problem import scripted

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def emulating(monkeypatch):
    """Replace the CPU's record by one that emulates these dtypes; the devices of two tests have different names."""
    monkeypatch.setattr(registry, "_records", dict(registry._records))

    def replace(*dtypes, name="some CPU"):
        record = dataclasses.replace(cpu.BACKEND, emulated_dtypes=lambda: dtypes, describe=lambda: name)
        ft.backends.register(record)
        return record

    return replace


# The record of the CPU


CPUS = {
    "AVX2": ("x86_64", {}, "", (False, False), ()),
    "AVX2 with dot products": ("x86_64", {"avx_ne_convert": True}, "", (True, True), ()),
    "AVX-512, which oneDNN computes in bfloat16 with, but by conversion": ("x86_64", {}, "", (True, False), ()),
    "AVX-512 with bfloat16": ("x86_64", {"avx512_bf16": True}, "", (True, False), (BF16,)),
    "AMX": ("x86_64", {"avx512_bf16": True, "avx512_fp16": True}, "", (True, True), (BF16, FP16)),
    "AMX held to AVX2": ("x86_64", {"avx512_bf16": True, "avx512_fp16": True}, "avx2", (True, True), ()),
    "AMX held to AVX-512": ("x86_64", {"avx512_bf16": True, "avx512_fp16": True}, "AVX512_CORE", (True, True), ()),
    "AMX held to its bfloat16": (
        "x86_64",
        {"avx512_bf16": True, "avx512_fp16": True},
        "AVX512_CORE_BF16",
        (True, True),
        (BF16,),
    ),
    "Graviton 3": ("arm64", {"bf16": True}, "", (True, False), (BF16,)),
    "Graviton 2": ("arm64", {}, "", (False, False), ()),
}


@pytest.mark.parametrize("name", CPUS)
def test_the_record_of_the_cpu_tells_native_from_emulated(name, monkeypatch):
    architecture, capabilities, limit, computes, native = CPUS[name]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": architecture, **capabilities})
    monkeypatch.setattr(cpu, "_onednn_computes_in", dict(zip((BF16, FP16), computes, strict=True)).__getitem__)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert cpu.BACKEND.native_dtypes == native
    assert {*native, *cpu.BACKEND.emulated_dtypes()} == {BF16, FP16}


def test_nothing_is_native_without_onednn(monkeypatch):
    assert all(cpu._onednn_computes_in(dtype) for dtype in cpu.BACKEND.native_dtypes)
    everything = {"architecture": "x86_64", "avx512_bf16": True, "avx512_fp16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: everything)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cpu.BACKEND.native_dtypes == (BF16, FP16)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert cpu.BACKEND.native_dtypes == ()


def test_a_cpu_that_is_held_to_avx2_emulates_both(monkeypatch):
    """On ARM the variable has no effect."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    if str(torch.cpu.get_capabilities()["architecture"]).startswith("x86"):
        assert cpu.BACKEND.emulated_dtypes() == (BF16, FP16)


def test_by_default_all_autocast_dtypes_of_a_record_are_native():
    record = dataclasses.replace(cpu.BACKEND, emulated_dtypes=tuple)
    assert record.native_dtypes == record.autocast_dtypes()


# with_amp("auto")


@pytest.mark.parametrize("more", [(), (ft.compiled(backend="eager", lowering="whole"),)], ids=["", "whole"])
@pytest.mark.parametrize(("emulated", "dtypes"), [((BF16, FP16), ()), ((FP16,), ("bf16",)), ((BF16,), ())], ids=str)
def test_auto_is_bf16_where_that_is_native_and_else_nothing(emulated, dtypes, more, emulating):
    """Never fp16: the structure of the state does not depend on the device."""
    emulating(*emulated)
    states = []
    for wrappers in ([ft.with_amp("auto")], [ft.with_amp(dtype) for dtype in dtypes]):
        step = make(squares, *wrappers, *more)
        state = step.init(params())
        for _ in range(3):
            state, _ = step(state, batch())
        states.append(state)
    assert_same_bits(*states)


def test_auto_is_the_default():
    assert ft.with_amp().text == ft.with_amp("auto").text == "with_amp(auto)"
    assert "with_amp(auto)" in repr(ft.with_amp(make()))


def test_print_shows_the_dtype_of_auto_after_init(emulating):
    for emulated, dtype in ((BF16,), "float32"), ((), "bf16"):
        emulating(*emulated)
        step = make(squares, ft.with_amp("auto"), ft.clip(1.0))
        assert repr(step).splitlines()[0] == "loss    squares <- with_amp(auto)"
        step.init(params())
        assert repr(step).splitlines()[0] == f"loss    squares <- with_amp(auto) [auto: {dtype} on cpu]"


def test_a_split_step_is_compiled_with_the_dtype_of_auto(emulating):
    """The traced loss reads what was chosen, and does not look at the device again."""
    for emulated, explicit in ((BF16,), []), ((), [ft.with_amp("bf16")]):
        record, states = emulating(*emulated), []
        for wrappers in ([ft.with_amp("auto")], explicit):
            step = make(squares, *wrappers, ft.compiled(backend="eager", lowering="split"))
            state = step.init(params())
            vars(state)["_origin"] = step._origin  # checked already, so that nothing but the loss is run
            ft.backends.register(dataclasses.replace(record, emulated_dtypes=lambda: 1 / 0))
            states.append(step(state, batch())[0])
            ft.backends.register(record)
        assert_same_bits(*states)


@pytest.mark.filterwarnings("ignore:.* parameters in float16:UserWarning")
def test_auto_refuses_float16_parameters_only_where_it_computes_in_bf16(emulating):
    half = {name: leaf.half() for name, leaf in params().items()}
    emulating(BF16, FP16)
    make(squares, ft.with_amp("auto")).init(half)
    emulating()
    with failing(StructureError, "with_amp(bf16)", "params.b", "float16"):
        make(squares, ft.with_amp("auto")).init(half)


def test_auto_is_not_watched():
    with failing(OptionError, "with_amp", "watch=True with auto", "watch bf16 or fp16"):
        ft.with_amp("auto", watch=True)


def test_anatomy_counts_the_copies_that_auto_makes(emulating):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    loss = ft.from_module(model, lambda model, batch: model(batch).float().square().mean())
    totals = {}
    for emulated in ((BF16,), ()):
        emulating(*emulated)
        step = ft.with_amp("auto")(ft.train_step(loss, ft.optim.sgd(0.1)))
        anatomy = ft.anatomy(step, step.init(), torch.randn(8, 64), measure=False)
        totals[emulated] = sum(anatomy.bytes_per_parameter.values())
    # A copy of each parameter in bfloat16.
    assert totals[()] == totals[(BF16,)] + 2


@pytest.mark.parametrize(("emulated", "dtype_of_auto"), [((BF16, FP16), None), ((FP16,), "bf16")], ids=str)
def test_an_evaluation_in_auto(emulated, dtype_of_auto, emulating):
    emulating(*emulated)
    state, data = make().init(params()), [batch(), batch(2)]
    expected = ft.evaluate(ft.eval_step(squares), state, data, dtype=dtype_of_auto)
    assert ft.evaluate(ft.eval_step(squares), state, data, dtype="auto") == expected
    # A loss with `with_amp("auto")` may be evaluated in auto, and in bf16.
    step = make(squares, ft.with_amp("auto"))
    for dtype in ("auto", "bf16", None):
        ft.evaluate(ft.eval_step(step.loss), step.init(params()), data, dtype=dtype)
    with failing(ComposeError, "evaluate", "'fp16'", "computes in auto"):
        ft.evaluate(ft.eval_step(step.loss), state, data, dtype="fp16")


# An emulated dtype that is named


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_emulated_dtype_works_and_one_warning_says_what_it_costs(dtype, emulating, caplog):
    emulating(BF16, FP16, name=f"a CPU without {dtype}")
    with caplog.at_level(logging.WARNING, "ftrain"):
        for _ in range(2):
            step = make(squares, ft.with_amp(dtype))
            state, metrics = step(step.init(params()), batch())
            assert metrics["loss"] > 0
            step(state, batch())
    (message,) = [record.getMessage() for record in caplog.records]
    for piece in ("with_amp", f"{dtype} is emulated on a CPU without {dtype}", "ten times", "'auto'", "float32"):
        assert piece in message


def test_an_evaluation_in_an_emulated_dtype_warns_too(emulating, caplog):
    emulating(BF16, name="a CPU that evaluates")
    for _ in range(2):
        ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype="bf16")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("evaluate: bf16 is emulated on a CPU that evaluates")


def test_there_is_no_warning_of_a_native_dtype_or_of_auto(emulating, caplog):
    emulating(name="a CPU with both")
    make(squares, ft.with_amp("fp16")).init(params())
    emulating(BF16, FP16, name="a CPU that computes in float32")
    make(squares, ft.with_amp("auto")).init(params())
    ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype="auto")
    assert caplog.records == []


# hints, ladder, doctor


def linear(*wrappers):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).float().square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers), {"x": torch.randn(32, 64)}


def hints_of(step, batch):
    return {hint.name: str(hint) for hint in run_rules(facts_of(step, step.init(), batch, 1.0))}


def test_a_hint_names_an_emulated_dtype(emulating):
    emulating(BF16, FP16)
    for wrapper in (ft.with_amp("bf16"), ft.with_amp("fp16")):
        hint = hints_of(*linear(wrapper))["emulated dtype"]
        assert "100% of the matmuls" in hint
        assert 'Use ft.with_amp("auto")' in hint
    assert "emulated dtype" not in hints_of(*linear(ft.with_amp("auto")))
    emulating()
    assert "emulated dtype" not in hints_of(*linear(ft.with_amp("bf16")))


def test_the_row_of_a_ladder_says_emulated(emulating, monkeypatch):
    monkeypatch.setattr(run, "race", scripted({}))
    monkeypatch.setattr(run, "run_rules", lambda facts: [])
    emulating(FP16)
    step, data = linear()
    ladder = ft.ladder(step, step.init(), data, techniques=["mixed precision"], stacked=False, rounds=1)
    assert [row.name for row in ladder.rows if row.emulated] == ['with_amp("fp16")']
    # The row, and the line that explains the word.
    lines = repr(ladder).splitlines()
    assert [line.split()[1:2] for line in lines if "emulated" in line] == [["emulated"], ["the"]]
    assert [row["emulated"] for row in ladder.as_dict()["rows"]] == [False, False, True, False]
    # Without an emulated dtype the word is not explained.
    emulating()
    ladder = ft.ladder(step, step.init(), data, techniques=['with_amp("fp16")'], stacked=False, rounds=1)
    assert "emulated" not in repr(ladder)


def test_the_doctor_prints_which_dtypes_are_native(emulating):
    assert doctor._dtypes(emulating(FP16)) == "bfloat16 (native), float16 (emulated)"
    assert doctor._dtypes(dataclasses.replace(cpu.BACKEND, autocast_dtypes=tuple)) == "none"
