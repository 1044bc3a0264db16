"""Hints from given facts: each of them for facts with its problem, and none for facts without problems."""

import dataclasses

import pytest
import torch

from ftrain.profiling.hints import Facts, Remedy, run_rules
from ftrain.profiling.hints.rules import FASTEST, MIDDLE, SLOWEST, Attention, Matmul
from ftrain.profiling.timing import Interval, Loading

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
    multiples_of_8 = matmul(rows=1000, inner=72)
    assert hint_names(matmuls=[multiples_of_8]) == ["dimensions"]
    assert hint_names(matmuls=[multiples_of_8], multiple=lambda dtype: 8) == []


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


def test_a_step_that_was_measured_to_be_faster_in_bfloat16_gets_that_hint():
    faster = {Remedy.BFLOAT16: Interval(1.2, 1.4, 1.5)}
    assert "the step is 1.40 times as fast in bfloat16. Use ft.with_amp" in hint_text(tried=faster, mixed=False)
    assert hint_names(tried=faster) == []
    assert hint_names(tried={Remedy.BFLOAT16: Interval(1.0, 1.4, 1.5)}, mixed=False) == []
    assert hint_names(mixed=False) == []


def test_arguments_of_attention_that_force_a_slow_kernel_are_named():
    attentions = [Attention("a", MIDDLE, {"attn_mask": "bool[8, 1, 64, 64]"}), Attention("b", FASTEST, {})]
    hint = hint_text(attentions=attentions)
    assert "1 of 2 calls run with a slower kernel because of attn_mask=bool[8, 1, 64, 64]" in hint
    attentions = [Attention("a", SLOWEST, {"dropout_p": "0.1", "need_weights": "True"})]
    hint = hint_text(attentions=attentions)
    assert "no fused kernel because of dropout_p=0.1, need_weights=True" in hint
    assert "Apply dropout after attention, not within it. Call it with need_weights=False." in hint
    # Without a known cause there is no advice.
    assert hint_names(attentions=[Attention("a", SLOWEST, {})]) == []


def test_operations_that_take_longer_to_launch_than_to_run_are_a_hint():
    assert hint_names(operations=100_000) == ["launches"]
    hint = hint_text(operations=100_000)
    assert "100,000 operations take at least 100.0 ms to launch (1.0 µs each), and their matmuls 30.0 ms" in hint
    assert hint_names(operations=100_000, compiled=True) == []
    # Without matmuls, the measured time of the step decides: large operations take longer than their launch.
    assert hint_names(operations=100_000, flops=0) == ["launches"]
    assert hint_names(operations=100_000, flops=0, seconds=1.0) == []
    assert hint_names(operations=100_000, tried={Remedy.COMPILE: Interval(0.9, 0.95, 1.0)}) == []


def test_a_batch_that_is_too_small_is_a_hint():
    hint = hint_text(tried={Remedy.LARGER_BATCH: Interval(1.5, 1.6, 1.7)})
    assert "twice the batch makes 1.60 times the examples per second" in hint
    assert hint_names(tried={Remedy.LARGER_BATCH: Interval(1.0, 1.6, 1.7)}) == []


def test_a_device_that_waits_for_the_loader_is_a_hint():
    hint = hint_text(loading=Loading(alone=0.01, ready=0.03, together=0.04))
    assert "a batch takes 10.0 ms to load and 30.0 ms to train on; the device waits 25% of the time" in hint
    assert hint_names(loading=Loading(0.001, 0.03, 0.0301)) == []
