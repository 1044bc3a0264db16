"""Functions of trees as compiled graphs, one for each kind of arguments, found again at little cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import BatchError
from ftrain.parallel.stand_in import running_graphs
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.fallback import attempted
from ftrain.tree.fast_flatten import reader
from ftrain.types import PyTree

Carrying: TypeAlias = Callable[..., tuple[PyTree, PyTree]]
"""``(carry, *rest) -> (carry, extra)`` on trees; the carry keeps its structure."""

Compile: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Tensor], int], capture.Flat]
"""Compiles a captured graph for inputs like those given, of which so many are the carry."""


class ShapeRegistry:
    """Counts the kinds of batches that came, each of which needs a graph of its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Hashable, dict[str, str]] = {}

    def admit(self, **inputs: PyTree) -> bool:
        """Take note of the inputs of a graph; return whether they are the first of their kind.

        Raises:
            BatchError: when they are of one kind too many; names the leaf that differs most often.
        """
        kind = cache_key(inputs)
        if kind in self._known:
            return False
        leaves = tree.leaves(inputs)
        shown = {name: _shown(leaf) for name, leaf in zip(tree.leaf_names(inputs), leaves, strict=True)}
        if len(self._known) >= self._most:
            raise BatchError(self._too_many(shown))
        self._known[kind] = shown
        return True

    def _too_many(self, shown: dict[str, str]) -> str:
        seen = [*self._known.values(), shown]
        values = {name: {kind.get(name, "nothing") for kind in seen} for name in shown}
        name = max(values, key=lambda name: len(values[name]), default="batch")
        return (
            f"compiled: {len(seen)} kinds of batches need as many graphs, and max_graphs is {self._most}; {name} "
            f"came as {', '.join(sorted(values.get(name, ())))}. Pad to a few lengths, drop the last short batch, make "
            "a tensor of a number that changes, or raise max_graphs"
        )


def _shown(leaf: Any) -> str:
    return tree.describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)


def cache_key(trees: PyTree) -> Hashable:
    """Return what a graph depends on: the structure, of each tensor its metadata, of another leaf its value; threads.

    Inductor's code for a CPU has as many partial sums as there are threads when it is compiled.

    Raises:
        BatchError: for a leaf that is neither a tensor nor hashable.
    """
    leaves, spec = tree.flatten(trees)
    return spec, tuple(_static(leaf) for leaf in leaves), torch.get_num_threads()


def _static(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride()
    try:
        hash(leaf)
    except TypeError:
        raise BatchError(
            f"compiled: the batch holds a {type(leaf).__name__}, which is neither a tensor nor hashable; "
            "convert it to a tensor, or leave it out"
        ) from None
    return type(leaf), leaf


class CompiledCache:
    """A function of trees as compiled graphs, one for each kind of its arguments.

    Args:
        function: ``(carry, *rest) -> (carry, extra)`` on trees; the carry keeps its structure.
        compiler: compiles what was captured.
        max_graphs: how many graphs there may be.
        donate: write the new carry into the tensors of the old one.
        around: makes a context for the time in which a graph is captured and compiled.
    """

    def __init__(
        self,
        function: Carrying,
        compiler: Compile,
        max_graphs: int,
        *,
        donate: bool,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._function, self._compiler, self._donate, self._around = function, compiler, donate, around
        self._shapes = ShapeRegistry(max_graphs)
        self.graphs: list[Graph] = []

    def __call__(self, carry: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        """Run the graph for trees like these, which is compiled when they are the first."""
        arguments = (carry, *rest)
        with torch.no_grad():
            for graph in self.graphs:
                leaves = graph.read(arguments)
                if leaves is not None:
                    return graph(leaves)
            return self.graph_for(*arguments)(tree.leaves(arguments))

    def graph_for(self, *arguments: PyTree) -> Graph:
        """Return the graph for trees like these, compiled now if need be."""
        kind = cache_key(arguments)
        # The quick look may fail on what is the same, in another context.
        known = next((graph for graph in self.graphs if graph.kind == kind), None)
        if known is None:
            self._shapes.admit(state=arguments[0], batch=arguments[1])
            with self._around():
                known = Graph(self._function, arguments, kind, self._compiler, donate=self._donate)
            self.graphs.append(known)
        return known


class Graph:
    """One compiled graph and how its inputs and outputs fit into trees.

    Args:
        function: what to capture.
        arguments: those of its first call.
        kind: what `cache_key` says of them.
        compiler: compiles what was captured.
        donate: write the new carry into the tensors of the old one.
    """

    def __init__(
        self, function: Carrying, arguments: tuple[PyTree, ...], kind: Hashable, compiler: Compile, *, donate: bool
    ) -> None:
        self.kind, self._donate, self._threads = kind, donate, torch.get_num_threads()
        leaves, spec = tree.flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._others = [(index, leaf) for index, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._read, self._is_like = reader(spec), _torch.tensor_guard(tensors)
        flat = self._flat(function, leaves, spec)
        self.captured = capture.capture(flat, tensors, lambda: function(*tree.clone(arguments)))
        carried = sum(isinstance(leaf, Tensor) for leaf in leaves[: self._size])
        with attempted():
            self._compiled = compiler(self.captured, tensors, carried)
        self._run = self._compiled if donate else self._first_run

    def _first_run(self, *tensors: Tensor) -> Sequence[Tensor]:
        # Nothing has been written when it fails, for its inputs are left alone.
        with attempted():
            outputs = self._compiled(*tensors)
        self._run = self._compiled
        return outputs

    @property
    def text(self) -> str:
        """What the compiled graph says of itself."""
        return getattr(self._compiled, "text", "")

    def _flat(self, function: Carrying, leaves: list[Any], spec: optree.PyTreeSpec) -> capture.Flat:
        def flat(*inputs: Tensor) -> list[Tensor]:
            tensors = iter(inputs)
            carry, *rest = tree.unflatten(
                spec, [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            )
            new, extra = function(carry, *rest)
            old_leaves, (new_leaves, self._spec) = tree.leaves(carry), tree.flatten(new)
            self._changed = [i for i, (a, b) in enumerate(zip(new_leaves, old_leaves, strict=True)) if a is not b]
            self._size = len(old_leaves)
            extras, self._extra_spec = tree.flatten(extra)
            self._extras = [None if isinstance(leaf, Tensor) else leaf for leaf in extras]
            # A metric may be the very tensor that donation overwrites.
            outputs = [leaf.clone() for leaf in extras if isinstance(leaf, Tensor)]
            if not self._donate:
                return outputs + [new_leaves[i] for i in self._changed]
            # What a new leaf shares with an old one is read before it is written.
            held = {_torch.storage_id(leaf) for leaf in old_leaves}
            values = [new_leaves[i] for i in self._changed]
            values = [value.clone() if _torch.storage_id(value) in held else value for value in values]
            for i, value in zip(self._changed, values, strict=True):
                old_leaves[i].copy_(value)
            return outputs

        return flat

    def read(self, arguments: tuple[PyTree, ...]) -> list[Any] | None:
        """Return the leaves of trees for which this graph was made, of others None."""
        leaves = self._read(arguments)
        if leaves is None or not self._fits(leaves):
            return None
        return leaves

    def _fits(self, leaves: list[Any]) -> bool:
        if torch.get_num_threads() != self._threads:
            return False
        for index, value in self._others:
            if type(leaves[index]) is not type(value) or leaves[index] != value:
                return False
        return self._is_like(*self._tensors(leaves))

    def _tensors(self, leaves: list[Any]) -> list[Tensor]:
        return [leaves[index] for index in self._places] if self._others else leaves

    def __call__(self, leaves: list[Any]) -> tuple[PyTree, PyTree]:
        """Run the graph on the leaves of its arguments."""
        tensors, stand_in = self._tensors(leaves), running_graphs()
        outputs = iter(self._run(*tensors) if stand_in is None else stand_in.run(self._run, self.captured, tensors))
        extra = tree.unflatten(self._extra_spec, [next(outputs) if e is None else e for e in self._extras])
        carried = leaves[: self._size]
        if not self._donate:
            for i in self._changed:
                carried[i] = next(outputs)
        return tree.unflatten(self._spec, carried), extra
