"""The matmuls and the attentions of a step, as they are recorded for hints."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain.profiling.hints import calls
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.hints.rules import FASTEST, MIDDLE, SLOWEST


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
    actual = {(matmul.module, matmul.rows, matmul.inner, matmul.columns) for matmul in matmuls}
    assert actual == {("qkv", 32, 24, 72), ("out", 32, 24, 24)}
    for matmul in matmuls:
        assert matmul.exact
        assert matmul.dtype == torch.float32
        assert matmul.flops == 2 * matmul.rows * matmul.inner * matmul.columns


def test_matmuls_of_a_step_with_wrappers_are_recorded():
    wrappers = ft.with_amp("bf16"), ft.accumulate(2), ft.remat(blocks=["qkv"])
    matmuls, _ = record_calls(*step_state_and_batch(Attend(), *wrappers))
    assert {(matmul.module, matmul.rows) for matmul in matmuls} == {("qkv", 16), ("out", 16)}
    assert {matmul.dtype for matmul in matmuls} == {torch.bfloat16}


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
        _, attentions = record_calls(*step_state_and_batch(blocks, *wrappers))
        return attentions

    expected = attentions_of()
    assert [attention.rank for attention in expected] == [SLOWEST, SLOWEST, FASTEST]
    assert attentions_of(ft.remat(**options, blocks=[Attend])) == expected


def test_the_causes_of_a_slow_multihead_attention_are_recorded():
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


def test_a_mask_that_only_the_flash_kernel_does_not_take_is_a_cause(monkeypatch):
    """As on GPUs. The three ranks are of the call as it is, without any argument, and with the mask alone."""
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


def test_matmuls_that_run_only_for_watch_are_not_recorded():
    model = nn.Sequential(Attend(), nn.Linear(24, 24))
    plain = record_calls(*step_state_and_batch(model, ft.with_amp("bf16")))
    assert record_calls(*step_state_and_batch(model, ft.with_amp("bf16", watch=True))) == plain


def test_matmuls_are_not_exact_if_the_precision_was_set_for_one_device(monkeypatch):
    def raise_mixed_settings():
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", raise_mixed_settings)
    matmuls, _ = record_calls(*step_state_and_batch(Attend()))
    assert not any(matmul.exact for matmul in matmuls)


def test_matmuls_of_a_loss_without_a_module_are_recorded():
    def loss(params, batch, rng):
        return ft.random.dropout(rng, batch @ params["w"], 0.5).square().mean()

    step = ft.train_step(loss, ft.optim.sgd(0.1))
    (matmul,), attentions = record_calls(step, step.init({"w": torch.ones(5, 7)}), torch.ones(3, 5))
    assert (matmul.module, matmul.rows, matmul.inner, matmul.columns) == ("", 3, 5, 7)
    assert attentions == []
