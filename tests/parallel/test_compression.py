"""Gradients that are sent in fewer bits: the sums, and the residuals that are kept."""

import pytest
import torch

import ftrain as ft
from ftrain.parallel.compression import Exchange
from ftrain.parallel.compression.reduction import compression_of
from ftrain.parallel.compression.sign import packed, unpacked
from ftrain.parallel.mesh import ALL, groups
from tests.bits import assert_same_bits
from tests.parallel.compression import METHODS, REMEMBERING, gradients
from tests.parallel.ranks import run

SHAPES = (7, 5), (), (6,), (4, 3, 3), (0, 4)


def combined(name, size, steps=3):
    """Return for each rank and step its gradients, its old memories, the sums that it got, and its new memories."""

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, history = compression_of(METHODS[name]()), []
        memories = [
            method.init(index, torch.empty(shape, dtype=torch.float64), None) if method.init else {}
            for index, shape in enumerate(SHAPES)
        ]
        for step in range(steps):
            grads = gradients(number, step, SHAPES)
            sums, new = method.combine(grads, memories, Exchange(ranks, [None] * len(SHAPES)))
            history.append((grads, memories, sums, new))
            memories = new
        return history

    return run(size, rank)


def residual(memory):
    return memory.get("residual", torch.zeros(()))


@pytest.mark.parametrize("name", REMEMBERING)
def test_the_sums_and_the_new_residuals_are_the_gradients_and_the_old_residuals(name):
    """Over all ranks together: a rank gets only the sum of what all have sent."""
    for ranks in zip(*combined(name, 3), strict=True):
        for index in range(len(SHAPES)):
            expected = sum(grads[index] + residual(old[index]) for grads, old, _, _ in ranks)
            not_sent = sum(residual(new[index]) for _, _, _, new in ranks)
            for _, _, sums, _ in ranks:
                torch.testing.assert_close(sums[index] + not_sent, expected, rtol=1e-13, atol=1e-13)
    assert any(residual(new[0]).norm() > 0.1 for _, _, _, new in ranks)


def test_every_rank_sends_its_signs_and_its_mean_magnitude():
    for history in combined("sign", 2):
        (grads, _, _, new), *_ = history
        for grad, memory in zip(grads, new, strict=True):
            sent = grad.abs().mean() * ((grad >= 0) * 2 - 1) if grad.numel() else grad
            torch.testing.assert_close(memory["residual"], grad - sent, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_get_the_same_bits(name):
    for steps in zip(*combined(name, 3), strict=True):
        for _, _, sums, _ in steps[1:]:
            assert_same_bits(sums, steps[0][2])


def test_sums_of_no_higher_rank_than_that_of_powersgd_are_exact():
    shape = (8, 9)

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method = ft.parallel.powersgd(2)
        # Each of the two ranks has a gradient of matrix rank 1, so their sum has matrix rank 2.
        column, row = gradients(number, 0, [(8, 1), (1, 9)])
        memory = method.init(0, torch.empty(shape, dtype=torch.float64), None)
        (total,), (new,) = method.combine([column @ row], [memory], Exchange(ranks, [None]))
        return column @ row, total, new["residual"]

    (first, total, first_residual), (second, _, second_residual) = run(2, rank)
    torch.testing.assert_close(total, first + second, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first_residual, torch.zeros(shape).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(second_residual, torch.zeros(shape).double(), rtol=0, atol=1e-12)


def test_a_power_iteration_continues_with_the_factors_of_the_last_step():
    """For a constant gradient, without residuals, the sums converge to the best approximation of that rank."""

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, shape = ft.parallel.powersgd(1), (6, 7)
        grad = gradients(number, 0, [shape])[0]
        memory = method.init(0, torch.empty(shape, dtype=torch.float64), None)
        for _ in range(200):
            (total,), (memory,) = method.combine([grad], [memory], Exchange(ranks, [None]))
            memory = {**memory, "residual": torch.zeros_like(grad)}
        return grad, total

    (first, total), (second, _) = run(2, rank)
    left, values, right = torch.linalg.svd(first + second)
    torch.testing.assert_close(total, values[0] * left[:, :1] @ right[:1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_float16_neither_overflows_nor_loses_small_gradients(scale):
    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        grads = [grad.float() * scale * (number + 1) for grad in gradients(number, 0, SHAPES)]
        sums, _ = compression_of("fp16").combine(grads, [{}] * len(grads), Exchange(ranks, [None] * len(grads)))
        return grads, sums

    results = run(3, rank)
    for index in range(len(SHAPES)):
        exact = sum(grads[index].double() for grads, _ in results)
        largest = max((grads[index].abs().max() for grads, _ in results if grads[index].numel()), default=0.0)
        torch.testing.assert_close(results[0][1][index].double(), exact, rtol=0, atol=float(largest) * 4e-3)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_bits_are_packed_by_eight(length):
    bits = torch.randn(length, generator=torch.Generator().manual_seed(0)) > 0
    assert packed(bits).dtype == torch.uint8
    assert packed(bits).numel() == -(-length // 8)
    assert torch.equal(unpacked(packed(bits), length), bits)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_sum_that_is_not_finite(name, bad):
    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, shape = compression_of(METHODS[name]()), (7, 5)
        grad = gradients(number, 0, [shape])[0]
        grad[2, 3] = bad if number else 1.0
        memory = method.init(0, grad, None) if method.init else {}
        return method.combine([grad], [memory], Exchange(ranks, [None]))[0][0]

    assert not any(total.isfinite().all() for total in run(2, rank))
