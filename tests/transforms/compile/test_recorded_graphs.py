"""Which captured graphs a device may record, and which constants of the host are moved to it."""

import dataclasses
import re

import pytest
import torch

from ftrain.backends import cpu
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.host_constants import move_constants
from ftrain.transforms.compile.settings import _why_not_recorded

# Stands for the device, whose tensors are on meta.
BACKEND = dataclasses.replace(cpu.BACKEND, recorder=lambda: None)


def why_not_recorded(captured, inputs):
    return _why_not_recorded(captured, inputs, BACKEND)


def capture_with_constants_moved(function, x):
    captured = capture.capture(function, [x], lambda: None)
    move_constants(captured, x.device)
    return captured


def graph_that_reads(are_read):
    """Return a graph with an input for each flag, which reads the inputs whose flag is set."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"input{number}") for number, _ in enumerate(are_read)]
    read = [node for node, is_read in zip(inputs, are_read, strict=True) if is_read]
    graph.output([graph.call_function(torch.ops.aten.neg.default, (node,)) for node in read])
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_that_reads_a_host_tensor_is_not_recorded():
    """Its value would be recorded, not its address."""
    inputs = [torch.empty((), device="meta"), torch.zeros(())]
    assert why_not_recorded(graph_that_reads([True, False]), inputs) == ""
    assert "reads a tensor on cpu" in why_not_recorded(graph_that_reads([True, True]), inputs)


NUMBER, TABLE, ROWS = torch.tensor(2.0), torch.arange(3.0), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * torch.tensor([1.0, 2.0, 3.0]).to(x.device), ""),
        (lambda x: x * torch.arange(3.0).add(1).to(x.device), ""),
        (lambda x: x * torch.rand(3).to(x.device), r"_to_copy\.default .* on cpu .* one on meta"),
        (lambda x: x * TABLE.to(x.device), "_to_copy.* make what it reads on meta before the step"),
        (lambda x: x.sum().cpu(), r"_to_copy\.default .* on meta .* one on cpu"),
        (lambda x: x[torch.tensor([0, 1])], ""),
        (lambda x: x[ROWS], r"index\.Tensor"),
        (lambda x: x * NUMBER, r"mul\.Tensor"),
        (lambda x: x * torch.tensor(2.0), ""),
        (lambda x: x * torch.full((3,), 2.0, device=x.device), ""),
        (lambda x: torch.topk(x, 2).values, ""),
    ],
    ids=["made", "range", "drawn", "table", "returned", "index", "rows", "closure", "number", "full", "pair"],
)
def test_a_graph_that_copies_between_host_and_device_is_not_recorded(function, reason):
    """Nor one that reads a scalar of the host that may change: its value would be recorded. Constants are moved."""
    x = torch.empty(3, device="meta")
    actual = why_not_recorded(capture_with_constants_moved(lambda x: [function(x)], x), [x])
    if reason:
        assert re.search(reason, actual)
    else:
        assert actual == ""


def by_item():
    x = torch.ones(3)
    x[0] = 2.0
    return x


def by_view():
    x = torch.tensor([1.0, 2.0, 3.0])
    x[1:].mul_(2)
    return x


def by_other_view():
    x = torch.zeros(4)
    returned, written = x[:3], x.view(2, 2)[0]
    written.copy_(torch.arange(1.0, 3.0))
    return returned


def by_list():
    x = torch.ones(3)
    torch._foreach_mul_([x, torch.ones(3)], 2.0)
    return x


def by_view_in_list():
    x = torch.ones(3)
    torch._foreach_mul_([x[:1], x[2:]], 2.0)
    return x


def by_out():
    x = torch.zeros(4)
    torch.add(torch.ones(3), torch.arange(3.0), out=x[:3])
    return x


@pytest.mark.parametrize(
    "write", [by_item, by_view, by_other_view, by_list, by_view_in_list, by_out], ids=lambda f: f.__name__
)
def test_a_tensor_that_is_written_in_place_on_the_host_is_no_constant(write):
    """Nor is a view of it, or the tensor of which it is a view. Another constant is moved."""

    def function(x):
        return [write().sum() * 1, x * write()[:3].to(x.device) * torch.arange(3.0).to(x.device)]

    x = torch.empty(3, device="meta")
    captured = capture_with_constants_moved(function, x)
    assert torch.equal(captured(x)[0], write().sum())
    moved = [node for node in captured.graph.nodes if node.op == "get_attr" and "on_device" in str(node.target)]
    assert len(moved) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups_are_recorded_in_bfloat16_alone(dtype):
    """In other dtypes the kernel reads on the host where the groups end."""

    def product(x, weights, ends):
        return [torch.nn.functional.grouped_mm(x, weights, offs=ends)]

    x, weights = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((16, 16), (2, 16, 16)))
    inputs = [x, weights, torch.empty(2, dtype=torch.int32, device="meta")]
    reason = why_not_recorded(capture.capture(product, inputs, lambda: None), inputs)
    assert ("give it tensors in bfloat16" in reason) == (dtype == torch.float32), reason


def test_a_graph_that_sends_to_other_ranks_is_not_recorded():
    """All ranks would have to record and replay together, and a process group waits for its recordings to be gone."""
    graph = torch.fx.Graph()
    all_reduce = torch.ops._c10d_functional.all_reduce.default
    graph.output((graph.call_function(all_reduce, (graph.placeholder("x"), "sum", "0")),))
    captured = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert "cannot agree" in why_not_recorded(captured, [torch.zeros(())])
