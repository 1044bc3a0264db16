"""Hints: each of them for a step with that problem, and none for a step without problems."""

import dataclasses
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, ConsumedError, DataError, StructureError
from ftrain.profiling import rates
from ftrain.profiling.hints import Facts, Remedy, calls, facts_of, run, run_rules
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.hints.rules import FASTEST, MIDDLE, SLOWEST, Attention, Matmul
from ftrain.profiling.timing import Interval, Loading
from tests.profiling.problem import assert_unchanged, batch, make, scripted

BF16, F32 = torch.bfloat16, torch.float32


def matmul(rows=1024, inner=768, columns=3072, dtype=BF16, exact=False, module="up"):
    return Matmul(module, rows, inner, columns, dtype, exact, 2 * rows * inner * columns)


FINE = Facts(
    matmuls=[matmul()],
    attentions=[Attention("attend", FASTEST, {})],
    compiled=False,
    mixed=True,
    operations=100,
    flops=3 * 10**12,
    multiple=lambda dtype: 64 if dtype == BF16 else 32,
    tf32=True,
    rate=1e14,
    launch=1e-6,
    seconds=0.03,
    loading=Loading(0.001, 0.03, 0.0301),
    tried={Remedy.LARGER_BATCH: Interval(0.98, 1.0, 1.02)},
)
"""Facts of a step without problems: the device is busy with bfloat16 matmuls of suitable dimensions."""


def hint_names(**changes):
    """Return the names of the hints for `FINE` with changed facts."""
    return [hint.name for hint in run_rules(dataclasses.replace(FINE, **changes))]


def hint_text(**changes):
    """Return the text of the only hint for `FINE` with changed facts."""
    (hint,) = run_rules(dataclasses.replace(FINE, **changes))
    return str(hint)


def test_a_step_without_problems_has_no_hints():
    assert hint_names() == []
    assert hint_names(tried={}, loading=None, matmuls=[], attentions=[]) == []


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"rows": 1000}, "1,000 rows of up (1,024 would be, +2.4%)"),
        ({"inner": 100}, "100 inputs of up (128 would be, +28.0%)"),
        ({"columns": 50257, "module": "head"}, "50,257 outputs of head (50,304 would be, +0.1%)"),
    ],
)
def test_dimensions_that_are_no_multiples_of_64_are_named(inputs, text):
    hint = hint_text(matmuls=[matmul(**inputs)])
    assert hint.startswith("dimensions: not multiples of 64: ")
    assert text in hint
    # No hint if the device needs no multiples, or if almost nothing is computed in that matmul.
    assert hint_names(matmuls=[matmul(**inputs)], multiple=lambda dtype: 1) == []
    assert hint_names(matmuls=[matmul(), matmul(rows=7, inner=8, columns=8)]) == []


def test_multiples_of_8_suffice_if_the_device_says_so():
    odd = matmul(rows=1000, inner=72)
    assert hint_names(matmuls=[odd]) == ["dimensions"]
    assert hint_names(matmuls=[odd], multiple=lambda dtype: 8) == []


def test_dimensions_do_not_matter_for_exact_float32_matmuls():
    exact = matmul(rows=1000, dtype=F32, exact=True)
    assert "dimensions" not in hint_names(matmuls=[exact])
    assert "dimensions" in hint_names(matmuls=[matmul(rows=1000, dtype=F32)])


def test_most_matmuls_in_exact_float32_give_the_hint_tf32():
    exact = [matmul(dtype=F32, exact=True)]
    assert hint_names(matmuls=exact) == ["TF32 off"]
    assert "100% of the matmuls are in float32" in hint_text(matmuls=exact)
    assert hint_names(matmuls=exact, tf32=False) == []
    assert hint_names(matmuls=[matmul(dtype=F32)]) == []
    assert hint_names(matmuls=[*exact, matmul(), matmul()]) == []
    assert hint_names(matmuls=[matmul(dtype=torch.float64, exact=True)]) == []


def test_a_step_that_was_measured_to_be_faster_in_bfloat16():
    faster = {Remedy.BFLOAT16: Interval(1.2, 1.4, 1.5)}
    assert "the step is 1.40 times as fast in bfloat16. Use ft.with_amp" in hint_text(tried=faster, mixed=False)
    assert hint_names(tried=faster) == []
    assert hint_names(tried={Remedy.BFLOAT16: Interval(1.0, 1.4, 1.5)}, mixed=False) == []
    assert hint_names(mixed=False) == []


def test_arguments_of_attention_that_force_a_slow_kernel():
    attentions = [Attention("a", MIDDLE, {"attn_mask": "bool[8, 1, 64, 64]"}), Attention("b", FASTEST, {})]
    assert "1 of 2 calls run with a slower kernel because of attn_mask=bool[8, 1, 64, 64]" in hint_text(
        attentions=attentions
    )
    attentions = [Attention("a", SLOWEST, {"dropout_p": "0.1", "need_weights": "True"})]
    hint = hint_text(attentions=attentions)
    assert "no fused kernel because of dropout_p=0.1, need_weights=True" in hint
    assert "Apply dropout after attention, not within it. Call it with need_weights=False." in hint
    # Without a known cause there is no advice.
    assert hint_names(attentions=[Attention("a", SLOWEST, {})]) == []


def test_operations_that_take_longer_to_launch_than_to_run():
    assert hint_names(operations=100_000) == ["launches"]
    assert "100,000 operations take at least 100.0 ms to launch (1.0 µs each), and their matmuls 30.0 ms" in hint_text(
        operations=100_000
    )
    assert hint_names(operations=100_000, compiled=True) == []
    # Without matmuls, the measured time of the step decides: large operations take longer than their launch.
    assert hint_names(operations=100_000, flops=0) == ["launches"]
    assert hint_names(operations=100_000, flops=0, seconds=1.0) == []
    assert hint_names(operations=100_000, tried={Remedy.COMPILE: Interval(0.9, 0.95, 1.0)}) == []


def test_a_batch_that_is_too_small():
    assert "twice the batch makes 1.60 times the examples per second" in hint_text(
        tried={Remedy.LARGER_BATCH: Interval(1.5, 1.6, 1.7)}
    )
    assert hint_names(tried={Remedy.LARGER_BATCH: Interval(1.0, 1.6, 1.7)}) == []


def test_a_device_that_waits_for_the_loader():
    hint = hint_text(loading=Loading(alone=0.01, ready=0.03, together=0.04))
    assert "a batch takes 10.0 ms to load and 30.0 ms to train on; the device waits 25% of the time" in hint
    assert hint_names(loading=Loading(0.001, 0.03, 0.0301)) == []


# The matmuls and attentions of a step


class Attend(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24, bias=False)
        self.bias = nn.Parameter(torch.zeros(1, 1, 8, 8)) if options.pop("learned", False) else None
        self.options = options

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        options = dict(self.options)
        if self.bias is not None:
            options["attn_mask"] = self.bias
        return self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


def step_state_and_batch(model, *wrappers):
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    return step, step.init(), torch.randn(4, 8, 24)


def test_matmuls_are_recorded_with_module_shape_and_dtype():
    matmuls, _ = record_calls(*step_state_and_batch(Attend()))
    actual = {(each.module, each.rows, each.inner, each.columns) for each in matmuls}
    assert actual == {("qkv", 32, 24, 72), ("out", 32, 24, 24)}
    assert all(
        each.exact and each.dtype == F32 and each.flops == 2 * each.rows * each.inner * each.columns for each in matmuls
    )
    matmuls, _ = record_calls(
        *step_state_and_batch(Attend(), ft.with_amp("bf16"), ft.accumulate(2), ft.remat(blocks=["qkv"]))
    )
    assert {(each.module, each.rows) for each in matmuls} == {("qkv", 16), ("out", 16)}
    assert {each.dtype for each in matmuls} == {BF16}


@pytest.mark.parametrize(
    ("options", "rank", "causes"),
    [
        ({}, FASTEST, {}),
        ({"is_causal": True}, FASTEST, {}),
        # The fused kernel for CPUs takes masks, but has neither dropout nor the gradient of a mask.
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, FASTEST, {}),
        ({"dropout_p": 0.1}, SLOWEST, {"dropout_p": "0.1"}),
        ({"learned": True}, SLOWEST, {"attn_mask": "float32[1, 1, 8, 8]"}),
        # Each of the two alone is a cause.
        ({"learned": True, "dropout_p": 0.1}, SLOWEST, {"attn_mask": "float32[1, 1, 8, 8]", "dropout_p": "0.1"}),
    ],
)
def test_the_causes_of_a_slow_attention_kernel_are_recorded(options, rank, causes):
    _, (attention,) = record_calls(*step_state_and_batch(Attend(**options)))
    assert (attention.module, attention.rank, attention.causes) == ("", rank, causes)


@pytest.mark.parametrize(
    "options", [{"policy": "full"}, {"policy": "dots"}, {"policy": "attention"}, {"budget": 0.5}], ids=str
)
def test_attention_within_rematerialised_blocks_is_recorded(options):

    def attentions_of(*wrappers):
        blocks = nn.Sequential(Attend(learned=True), Attend(dropout_p=0.1), Attend())
        return record_calls(*step_state_and_batch(blocks, *wrappers))[1]

    assert attentions_of(ft.remat(**options, blocks=[Attend])) == attentions_of()
    assert [each.rank for each in attentions_of()] == [SLOWEST, SLOWEST, FASTEST]


def test_multihead_attention_that_returns_its_weights():
    class Multihead(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.attend = nn.MultiheadAttention(24, 3, batch_first=True, dropout=options.pop("dropout", 0.0))
            self.options = options

        def forward(self, x):
            return self.attend(x, x, x, **self.options)[0]

    _, (attention,) = record_calls(*step_state_and_batch(Multihead()))
    assert (attention.module, attention.rank, attention.causes) == ("attend", SLOWEST, {"need_weights": "True"})
    _, (attention,) = record_calls(*step_state_and_batch(Multihead(dropout=0.1)))
    assert attention.causes == {"dropout_p": "0.1", "need_weights": "True"}
    _, (attention,) = record_calls(*step_state_and_batch(Multihead(need_weights=False)))
    assert (attention.rank, attention.causes) == (FASTEST, {})


def test_a_mask_that_only_the_flash_kernel_does_not_take(monkeypatch):
    """As on GPUs. The three ranks are those as called, without any argument, and with the mask alone."""
    ranks = iter([MIDDLE, FASTEST, MIDDLE])
    monkeypatch.setattr(calls, "kernel_rank", lambda operation: next(ranks))
    _, (attention,) = record_calls(*step_state_and_batch(Attend(attn_mask=torch.ones(8, 8, dtype=torch.bool))))
    assert (attention.rank, attention.causes) == (MIDDLE, {"attn_mask": "bool[8, 8]"})


@pytest.mark.parametrize(
    ("name", "rank"),
    [("_scaled_dot_product_efficient_attention", MIDDLE), ("_scaled_dot_product_flash_attention", FASTEST)],
)
def test_the_rank_of_a_kernel(name, rank):
    assert calls.kernel_rank(getattr(torch.ops.aten, name).default) == rank


def test_rates_are_measured_on_random_numbers_without_use_of_the_global_generator(monkeypatch):
    inputs, before = [], torch.get_rng_state()
    monkeypatch.setattr(rates, "fastest", lambda work, device: inputs.extend(work.args) or 1.0)
    rates.matmul_rate(torch.device("cpu"), F32)
    assert all(0.9 < tensor.float().std() < 1.1 and tensor.is_contiguous() for tensor in inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_matmuls_that_run_only_for_watch_are_not_recorded():
    model = nn.Sequential(Attend(), nn.Linear(24, 24))
    plain = record_calls(*step_state_and_batch(model, ft.with_amp("bf16")))
    assert record_calls(*step_state_and_batch(model, ft.with_amp("bf16", watch=True))) == plain


def test_matmuls_are_not_exact_if_the_precision_was_set_for_one_device(monkeypatch):
    def raise_mixed_settings():
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", raise_mixed_settings)
    matmuls, _ = record_calls(*step_state_and_batch(Attend()))
    assert not any(each.exact for each in matmuls)


def test_matmuls_of_a_loss_without_a_module_are_recorded():
    def loss(params, batch, rng):
        return ft.random.dropout(rng, batch @ params["w"], 0.5).square().mean()

    step = ft.train_step(loss, ft.optim.sgd(0.1))
    (recorded,), attentions = record_calls(step, step.init({"w": torch.ones(5, 7)}), torch.ones(3, 5))
    assert (recorded.module, recorded.rows, recorded.inner, recorded.columns) == ("", 3, 5, 7)
    assert attentions == []


def test_facts_of_a_step():
    step, inputs = make(ft.with_amp("bf16"), ft.compiled(backend="eager")), batch()
    state = step.init()
    facts = facts_of(step, state, inputs, 0.5)
    assert (facts.compiled, facts.mixed, facts.tf32, facts.seconds) == (True, True, False, 0.5)
    assert facts.operations > 50
    assert facts.flops > 2 * 64 * 16 * 32 * 6
    assert facts.multiple(BF16) == 1
    assert facts.rate > 1e6
    assert 1e-8 < facts.launch < 1e-2


def test_hints_of_a_step(monkeypatch):
    """With operations that are slow to launch, and data that sleep."""
    monkeypatch.setattr(rates, "launch_seconds", lambda device: 1.0)

    class Slow(list):
        def __iter__(self):
            for item in list.__iter__(self):
                time.sleep(0.01)
                yield item

    step, inputs = make(), batch(4)
    state = step.init()
    before = tree.clone((state, inputs))
    hints = {hint.name: hint for hint in ft.hints(step, state, inputs, data=Slow([inputs] * 4))}
    assert_unchanged(state, inputs, before)
    assert {"launches", "loader"} <= set(hints)
    assert not {"dimensions", "TF32 off", "attention"} & set(hints)
    assert all(hint.evidence and hint.advice for hint in hints.values())


def test_a_model_of_convolutions_is_tried_in_bfloat16_if_that_is_native(monkeypatch):
    cpu = ft.backends.get("cpu")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    monkeypatch.setattr(run, "race", scripted({"BFLOAT16": 0.5}))
    for emulated in ((), (BF16,)):
        changed = dataclasses.replace(cpu, emulated_dtypes=lambda emulated=emulated: emulated)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", changed)
        hints = {hint.name for hint in ft.hints(step, step.init(), torch.randn(2, 1, 4, 4))}
        assert ("float32" in hints) == (not emulated)


def test_a_batch_that_cannot_be_doubled_gives_no_hint_about_its_size():
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    assert "small batch" not in {hint.name for hint in ft.hints(step, step.init({"w": torch.ones(3)}), torch.ones(()))}


def test_twice_the_batch_does_not_run_if_it_is_predicted_not_to_fit(monkeypatch):
    """A host that runs out of memory raises no error: its kernel kills the process."""
    lengths, step, inputs = set(), make(), batch(64)
    state = step.init()
    peak = ft.anatomy(step, state, inputs, measure=False).peak

    def wrap(grad):
        def recording(state, batch, rng):
            lengths.add(len(batch["x"]))
            return grad(state, batch, rng)

        return recording

    record_lengths = ft.Wrapper("record_lengths", grad=ft.OnGrad(wrap))
    for free, expected in ((int(1.5 * peak), {64}), (2 * peak, {64, 128})):
        cpu = dataclasses.replace(ft.backends.get("cpu"), free=lambda free=free: free)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", cpu)
        lengths.clear()
        ft.hints(record_lengths(step), state, inputs)
        assert lengths == expected


def test_hints_refuse_other_steps_other_states_iterators_and_spent_states():
    step, inputs = make(), batch(4)
    with pytest.raises(ComposeError, match="hints: the step is function; needs a Step"):
        ft.hints(lambda state, batch: (state, {}), step.init(), inputs)
    with pytest.raises(StructureError):
        ft.hints(step, make(optimizer=ft.optim.sgd(0.1)).init(), inputs)
    with pytest.raises(DataError):
        ft.hints(step, step.init(), inputs, data=iter([inputs]))
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.hints(step, spent, inputs)


@pytest.mark.parametrize(
    ("capability", "multiples"),
    [((6, 1), (1, 1)), ((7, 0), (8, 1)), ((7, 5), (8, 1)), ((8, 0), (64, 32)), ((9, 0), (64, 32))],
)
def test_the_multiples_of_nvidia(monkeypatch, capability, multiples):
    from ftrain.backends import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert tuple(map(cuda.BACKEND.multiple, (torch.float16, F32))) == multiples


def test_the_free_memory_of_a_device_includes_its_unused_cache(monkeypatch):
    from ftrain.backends.device_module import DeviceModule

    class Module:
        @staticmethod
        def mem_get_info():
            return 1000, 8000

        @staticmethod
        def memory_reserved():
            return 500

        @staticmethod
        def memory_allocated():
            return 200

    device = DeviceModule("toy")
    monkeypatch.setattr(torch, "get_device_module", lambda name: Module)
    assert device.free() == 1300
    monkeypatch.setattr(torch, "get_device_module", lambda name: object())
    assert device.free() is None
