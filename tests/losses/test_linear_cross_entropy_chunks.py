"""How `linear_cross_entropy` divides its work: chunks of rows, tiles of classes, padding, one operation of torch."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.backends import registry
from ftrain.losses import chunked, linear_cross_entropy
from ftrain.losses.chunked import auto_chunk, losses_and_gradients
from tests.losses.cases import F64, randn
from tests.losses.linear_cases import (
    CLASS_WEIGHT,
    SMOOTHINGS,
    WIDTH,
    assert_all_close,
    layer,
    loss_and_grads,
    loss_of_logits,
    random_labels,
)


@pytest.mark.parametrize("needs", [[False] * 3, [True, False, True], [True] * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_results_of_the_operation_are_like_real_ones(needs, dtype):
    weight, bias = layer(torch.float32)
    args = randn(9, WIDTH, dtype=torch.float32), weight, bias, random_labels(9), None, -100, 0.1, 4, dtype, needs
    torch.library.opcheck(losses_and_gradients, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("classes", "width", "expected"), [(50257, 256, 256), (2**17, 4096, 512), (10**9, 8, 1)])
def test_the_automatic_chunk_depends_on_the_classes_and_the_size_of_the_weight(classes, width, expected):
    weight = torch.empty(classes, width, device="meta")
    assert auto_chunk(weight, torch.float32, chunked.CHUNK_BYTES) == expected


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 256), (torch.float32, 256), (F64, 128)])
def test_the_automatic_chunk_depends_on_the_bytes_of_a_logit(dtype, expected):
    """Logits are in float32 at least."""
    weight = torch.empty(2**16, 8, device="meta")
    assert auto_chunk(weight, dtype, chunked.CHUNK_BYTES) == expected


def test_tiles_of_the_classes_add_up(monkeypatch):
    hidden, (weight, _), labels = randn(9, WIDTH, dtype=torch.float32), layer(torch.float32), random_labels(9)
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_and_grads(linear_cross_entropy, hidden, weight, labels)
        monkeypatch.setattr(chunked, "TILE", 3 * WIDTH)
        tiled = loss_and_grads(linear_cross_entropy, hidden, weight, labels)
    assert_all_close(tiled, expected, rtol=1e-2, atol=1e-2)
    assert len(chunked._tiles(weight.bfloat16(), torch.float32)) == 4  # Of 3 classes, of 11.
    assert len(chunked._tiles(weight, torch.float32)) == 1


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_classes_are_padded_where_matmuls_need_it(monkeypatch, smoothing):
    """The padding changes neither the loss nor the gradients."""
    needs_padding = dataclasses.replace(ft.backends.get("cpu"), multiple=lambda dtype: 8, immediate=False)
    monkeypatch.setitem(registry._records, "cpu", needs_padding)
    shapes, mm = [], torch.mm

    def record(a, b, **options):
        shapes.append(b.shape)
        return mm(a, b, **options)

    monkeypatch.setattr(torch, "mm", record)
    hidden, (weight, bias), labels = randn(9, WIDTH), layer(), random_labels(9)
    options = {"bias": bias, "label_smoothing": smoothing, "class_weight": CLASS_WEIGHT}
    actual = loss_and_grads(linear_cross_entropy, hidden, weight, labels, chunk=4, **options)
    assert set(shapes) == {(WIDTH, 16)}
    assert_all_close(actual, loss_and_grads(loss_of_logits, hidden, weight, labels, **options))
