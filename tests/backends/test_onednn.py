"""What convolutions take for themselves is what the profiler of torch sees."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ftrain.backends.onednn import BLOCKS, scratch

KNOWN = torch.backends.cpu.get_cpu_capability().startswith(tuple(BLOCKS))
pytestmark = pytest.mark.skipif(not KNOWN, reason="the blocks of oneDNN are known for AVX2 and AVX-512 alone")
LAST = torch.channels_last


def most(call):
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
    events = profiler.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()) if event.name() == "[memory]"]
    returned = sum(each.nbytes for each in ([kept] if isinstance(kept, torch.Tensor) else kept) if each is not None)
    return max(sum(sizes[: count + 1]) for count in range(len(sizes))), returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 32), (32, 32), (64, 32), (32, 64)])
def test_a_convolution_takes_what_is_said(inputs, outputs, layout, dtype):
    x = torch.randn(32, inputs, 32, 32, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(outputs, inputs, 3, 3, dtype=dtype).to(memory_format=layout)
    options = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    grad = torch.randn(32, outputs, 32, 32, dtype=dtype).to(memory_format=layout)
    forward, backward = (x, weight, None, *options), (grad, x, weight, None, *options, [True, True, False])
    for name, args in (("convolution", forward), ("convolution_backward", backward)):
        taken, returned = most(lambda name=name, args=args: getattr(torch.ops.aten, name)(*args))
        assert returned + scratch(name, args) == pytest.approx(taken, rel=0.15), (name, taken, returned)
        assert (scratch(name, args) > 0) == (layout is not LAST)


SHAPES = {
    "to a few channels": ((8, 32, 48, 48), (3, 32, 3, 3), 1),
    "from a few channels": ((8, 3, 48, 48), (32, 3, 3, 3), 1),
    "of channels that fill no block": ((8, 12, 32, 32), (32, 12, 3, 3), 1),
    "of sequences": ((32, 16, 256), (64, 16, 5), 1),
    "of sequences, in steps": ((8, 128, 512), (64, 128, 3), 2),
    "of volumes": ((4, 16, 16, 16, 16), (16, 16, 3, 3, 3), 1),
}


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (True, False, False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_convolutions_of_all_kinds_take_what_is_said(name, dtype, mask):
    shape, kernel, stride = SHAPES[name]
    axes = len(shape) - 2
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(kernel, dtype=dtype)
    options = [stride] * axes, [kernel[-1] // 2] * axes, [1] * axes, False, [0] * axes, 1
    grad = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *options))
    forward, backward = (x, weight, None, *options), (grad, x, weight, None, *options, list(mask))
    for name, args in (("convolution", forward), ("convolution_backward", backward)):
        taken, returned = most(lambda name=name, args=args: getattr(torch.ops.aten, name)(*args))
        assert returned + scratch(name, args) == pytest.approx(taken, rel=0.1), (name, taken, returned)


def test_what_comes_in_two_layouts_is_brought_into_one():
    x = torch.randn(32, 32, 16, 16).to(memory_format=LAST)
    weight, grad = torch.randn(32, 32, 3, 3), torch.randn(32, 32, 16, 16)
    args = grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    taken, returned = most(lambda: torch.ops.aten.convolution_backward(*args))
    assert returned + scratch("convolution_backward", args) == pytest.approx(taken, rel=0.1)
    assert scratch("convolution_backward", args) == grad.nbytes + weight.nbytes


def test_what_is_taken_as_it_is():
    x, weight, grad = torch.randn(8, 3, 16, 16), torch.randn(32, 3, 3, 3), torch.randn(8, 32, 16, 16)
    args = grad, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    assert grad.nbytes <= scratch("convolution_backward", args) < grad.nbytes + x.nbytes
    assert scratch("mm", (x, weight)) == 0


def test_one_number_for_all_axes():
    x, weight = torch.randn(4, 32, 9, 9), torch.randn(32, 32, 3, 3)
    found = {scratch("convolution", (x, weight, None, [2] * n, [1] * n, [1] * n, False)) for n in (1, 2)}
    assert len(found) == 1
    assert found.pop() > x.nbytes
