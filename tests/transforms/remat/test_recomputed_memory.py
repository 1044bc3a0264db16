"""A function that is recomputed in the backward pass keeps its arguments alone, and runs no further than it must."""

import gc
import weakref

import pytest
import torch

from tests.bits import assert_same_bits
from tests.transforms.remat.recomputing import catching, random_leaf, recomputing


def test_it_is_recomputed_once_until_the_last_tensor_is_saved():
    lines = []

    def function(x):
        lines.append("first")
        x = x.sin().cos()
        lines.append("second")
        # The last tensor that is saved is the result of exp.
        x = x + x.exp()
        lines.append("third")
        return x + 1

    recomputing(function)(random_leaf()).sum().backward()
    assert lines == ["first", "second", "third", "first", "second"]


def test_without_gradients_it_runs_once():
    runs = []

    def function(x):
        runs.append(x)
        return x.sin()

    with torch.no_grad():
        recomputing(function)(random_leaf())
    assert len(runs) == 1


class Probe(torch.autograd.Function):
    """Records weak references to its saved tensors and nodes, and in each backward pass how many of them are alive."""

    saved, nodes = [], []
    saved_alive, nodes_alive = [], []

    @staticmethod
    def forward(ctx, x):
        saved = x * 2
        ctx.save_for_backward(saved)
        Probe.saved.append(weakref.ref(saved))
        Probe.nodes.append(weakref.ref(ctx))
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        Probe.saved_alive.append(count_alive(Probe.saved))
        Probe.nodes_alive.append(count_alive(Probe.nodes))
        return grad * saved


def count_alive(references):
    return sum(reference() is not None for reference in references)


@pytest.fixture
def probe():
    """An empty `Probe`. Without the garbage collector, so that an object in a cycle of references counts as alive."""
    for records in (Probe.saved, Probe.nodes, Probe.saved_alive, Probe.nodes_alive):
        records.clear()
    gc.collect()
    gc.disable()
    yield Probe
    gc.enable()


@pytest.mark.parametrize("retained", [False, True])
def test_only_the_arguments_are_held_and_nothing_after_the_backward_pass(probe, retained):
    def function(x):
        for _ in range(3):
            x = probe.apply(x).sin()
        return x

    x = random_leaf() * 1
    value, argument = recomputing(function)(x), weakref.ref(x)
    assert len(probe.saved) == 3
    assert count_alive(probe.saved) == 0
    del x
    value.sum().backward(retain_graph=retained)
    # A tensor is freed after its use, and the graph of the second run when that has ended.
    assert probe.saved_alive == [3, 2, 1]
    assert probe.nodes_alive == [3, 3, 3]
    assert count_alive(probe.saved) == 0
    del value
    assert argument() is None


def test_tensors_of_an_output_that_is_gone_are_not_saved_again(probe):
    def function(x):
        return probe.apply(x).sin(), probe.apply(x).cos().sin()

    value, unused = recomputing(function)(random_leaf())
    del unused
    value.sum().backward()
    assert probe.saved_alive == [1]


def test_hooks_around_a_block_get_its_arguments_alone():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    x, w = random_leaf(), random_leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = recomputing(catching)(x, w)
    # Before them comes the empty tensor by which the node of the arguments requires a gradient.
    empty, *arguments = packed
    assert empty.numel() == 0
    assert_same_bits(arguments, [x, w])
    value.sum().backward()
