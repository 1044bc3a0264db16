"""The estimate of what convolutions take for themselves, which differs from CPU to CPU and is compared with none."""

import pytest
import torch

from ftrain.backends import onednn
from ftrain.backends.onednn import scratch

LAST = torch.channels_last


@pytest.fixture(autouse=True, params=["AVX2", "AVX512"])
def block(request, monkeypatch):
    """The length of oneDNN's blocks on a CPU of each kind, whatever this one is."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    return onednn.BLOCKS[request.param]


def calls(shape=(8, 32, 16, 16), kernel=(32, 32, 3, 3), dtype=torch.float32, mask=(True, True, False), layout=None):
    """The arguments of a convolution and of its backward pass; the length of its axes stays."""
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(kernel, dtype=dtype)
    grad = torch.randn(shape[0], kernel[0], *shape[2:], dtype=dtype)
    if layout is not None:
        x, weight, grad = (each.to(memory_format=layout) for each in (x, weight, grad))
    axes = len(shape) - 2
    options = [1] * axes, [kernel[-1] // 2] * axes, [1] * axes, False, [0] * axes, 1
    return {
        "convolution": (x, weight, None, *options),
        "convolution_backward": (grad, x, weight, None, *options, list(mask)),
    }


def estimates(**changes):
    return [scratch(name, args) for name, args in calls(**changes).items()]


SHAPES = {
    "images": ((8, 32, 16, 16), (32, 32, 3, 3)),
    "few channels": ((8, 3, 16, 16), (32, 3, 3, 3)),
    "sequences": ((8, 16, 64), (64, 16, 5)),
    "volumes": ((2, 16, 8, 8, 8), (16, 16, 3, 3, 3)),
}


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_it_grows_with_the_batch_and_not_faster(name, served, monkeypatch):
    monkeypatch.setattr(onednn, "_is_served", lambda dtype: served)
    (length, *axes), kernel = SHAPES[name]
    once, twice = (estimates(shape=(n, *axes), kernel=kernel) for n in (length, 2 * length))
    assert all(a < b <= 2 * a for a, b in zip(once, twice, strict=True))


def test_channels_that_fill_no_block_are_padded(block):
    """What is copied has its channels in whole blocks; what is returned has not."""
    each = []
    for channels in (block + 4, 2 * block):
        args = calls((8, channels, 16, 16), (32, channels, 3, 3), mask=(False, True, False))["convolution_backward"]
        each.append(scratch("convolution_backward", args) + args[2].nbytes)
    assert each[0] == each[1]


def test_what_has_its_channels_last_is_computed_on_as_it_is():
    assert estimates(layout=LAST) == [0, 0]
    assert min(estimates()) > 0


def test_what_comes_in_two_layouts_is_brought_into_one():
    args = list(calls()["convolution_backward"])
    args[1] = args[1].to(memory_format=LAST)
    assert scratch("convolution_backward", args) == args[0].nbytes + args[2].nbytes


def test_a_gradient_that_is_not_asked_for_takes_nothing():
    both, of_input, of_weight = (
        scratch("convolution_backward", calls(mask=(*mask, False))["convolution_backward"]) + returned
        for mask, returned in (
            ((True, True), 8 * 32 * 256 * 4 + 32 * 32 * 9 * 4),
            ((True, False), 8 * 32 * 256 * 4),
            ((False, True), 32 * 32 * 9 * 4),
        )
    )
    assert both >= max(of_input, of_weight)


def test_what_is_taken_as_it_is():
    x, weight, grad = torch.randn(8, 3, 16, 16), torch.randn(32, 3, 3, 3), torch.randn(8, 32, 16, 16)
    args = grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    assert grad.nbytes <= scratch("convolution_backward", args) < grad.nbytes + x.nbytes
    assert scratch("mm", (x, weight)) == 0


def test_a_dtype_without_products_takes_columns(monkeypatch):
    monkeypatch.setattr(onednn, "_is_served", lambda dtype: False)
    x = calls(dtype=torch.float16)["convolution"][0]
    assert estimates(dtype=torch.float16)[0] == 9 * x.nbytes
    # A kernel of one element sees each place as it is.
    assert estimates(dtype=torch.float16, kernel=(32, 32, 1, 1))[0] == 0


def test_a_cpu_without_blocks_copies_nothing_forward(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert estimates()[0] == 0


def test_one_number_for_all_axes():
    x, weight = torch.randn(4, 32, 9, 9), torch.randn(32, 32, 3, 3)
    found = {scratch("convolution", (x, weight, None, [2] * n, [1] * n, [1] * n, False)) for n in (1, 2)}
    assert len(found) == 1
    assert found.pop() > x.nbytes
