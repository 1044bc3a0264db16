"""Functions of trees as compiled graphs: one graph for each structure, shapes and dtypes of the arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np
import optree
import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import BatchError, TraceError, listed, log_on_first_rank
from ftrain.parallel.stand_in import graph_runner
from ftrain.step.microbatch import OPEN_OBJECT, holds_tensor
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.constants import MISSING, Constants, changed
from ftrain.transforms.compile.fallback import attempted
from ftrain.transforms.compile.log_if_slow import log_if_slow
from ftrain.transforms.compile.settings import Compile, Compiler, resolved
from ftrain.tree.fast_flatten import reader
from ftrain.tree.wrapped_tensors import context_of, of_plain_tensors, parts_of, plain_tensors
from ftrain.types import PyTree

Carrying: TypeAlias = Callable[..., tuple[PyTree, PyTree]]
"""``(carry, *rest) -> (carry, extra)`` on trees; the new carry has the structure of the old one."""

Key: TypeAlias = tuple[optree.PyTreeSpec, tuple[Hashable, ...], Hashable]
"""What a graph depends on: the structure, what is known of each leaf, the settings of torch."""


class ShapeRegistry:
    """The different inputs that a step had, each of which needs its own graph: at most `max_graphs`."""

    def __init__(self, max_graphs: int) -> None:
        self._max_graphs = max_graphs
        self._known: dict[Hashable, dict[str, str]] = {}

    def admit(self, **inputs: PyTree) -> bool:
        """Add the inputs of a graph; return whether they are new.

        Raises a BatchError that names the leaf with the most different values, if they need one graph too many.
        """
        key = cache_key(inputs)[:-1]
        if key in self._known:
            return False
        leaves = tree.leaves(inputs)
        described = {
            name: tree.describe(leaf) if isinstance(leaf, Tensor) else repr(leaf)
            for name, leaf in zip(tree.leaf_names(inputs), leaves, strict=True)
        }
        if len(self._known) >= self._max_graphs:
            raise BatchError(self._too_many(described))
        self._known[key] = described
        return True

    def _too_many(self, described: dict[str, str]) -> str:
        seen = [*self._known.values(), described]
        values = {name: {each.get(name, "nothing") for each in seen} for name in described}
        name = max(values, key=lambda name: len(values[name]), default="batch")
        return (
            f"compiled: {len(seen)} kinds of batches need as many graphs, and max_graphs is {self._max_graphs}; {name} "
            f"came as {', '.join(sorted(values.get(name, ())))}. Pad to a few lengths, drop the last short batch, make "
            "a tensor of a number that changes, leave out a text that the loss does not read, or raise max_graphs"
        )


def split_runner(
    function: Callable[..., Any], compiler: Compiler, name: str, has_written: Callable[[], bool] = lambda: False
) -> Callable[..., Any]:
    """Return a function ``(tensors, batch, ...)`` whose loss `torch.compile` compiles, with the settings of a compiler.

    It raises a CompilerError for an error before `has_written`, and a BatchError when batches need too many graphs.
    """
    # One graph of changing shapes takes any number of them.
    shapes = ShapeRegistry(sys.maxsize if compiler.dynamic else compiler.max_graphs)

    def run(tensors: PyTree, batch: PyTree, *more: Any) -> Any:
        logging_slow = log_if_slow(name) if shapes.admit(batch=batch) else nullcontext()
        with logging_slow, attempted(has_written), compiler.in_parts():
            return function(tensors, batch, *more)

    return run


def cache_key(trees: PyTree) -> Key:
    """Return what a graph depends on; of a tensor it is the metadata, of another leaf the value.

    Raises a BatchError for a leaf that is neither a tensor nor hashable, or an object that holds tensors.
    """
    leaves, spec = tree.flatten(trees)
    return spec, tuple(_static(leaf) for leaf in leaves), _settings(leaves)


def _settings(leaves: Sequence[Any]) -> Hashable:
    """Return the settings of torch that a graph depends on: the threads, the default dtype, autocast.

    Inductor's code for a CPU has as many partial sums as there are threads when it is compiled.
    """
    autocast = None
    if _torch.any_autocast():
        kinds = filter(torch.is_autocast_enabled, {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)})
        autocast = frozenset((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
    return torch.get_num_threads(), torch.get_default_dtype(), autocast


def _static(leaf: Any) -> Hashable:
    """Return what a graph holds of a leaf: all but a tensor's values. Raises a BatchError if it is not hashable."""
    if isinstance(leaf, Tensor):
        if _is_ragged(leaf):
            return leaf.layout, leaf.dtype, leaf.device, leaf.ndim
        metadata = leaf.shape, leaf.dtype, leaf.device, leaf.stride()
        return (*metadata, *context_of(leaf)) if _is_wrapped(leaf) else metadata
    if holds_tensor(leaf):
        raise BatchError(
            f"compiled: the batch holds a {type(leaf).__name__} with tensors in it, which would be constants of the "
            f"graph; {OPEN_OBJECT}"
        )
    try:
        hash(leaf)
    except TypeError:
        raise BatchError(
            f"compiled: the batch holds a {type(leaf).__name__}, which is neither a tensor nor hashable; "
            "convert it to a tensor, or leave it out"
        ) from None
    # 0.0 is equal to -0.0, and NaN not to itself.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex | np.inexact) else leaf


def _is_ragged(leaf: Tensor) -> bool:
    """Whether a tensor is nested, or sparse and compressed: it has no strides."""
    return leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo)


def _is_wrapped(leaf: Any) -> bool:
    """Whether a leaf is a tensor that is made of others, which are the inputs of a graph in its place."""
    return type(leaf) is not Tensor and isinstance(leaf, Tensor) and bool(parts_of(leaf))


def _require_strided(arguments: PyTree) -> None:
    """Check that a graph can take the tensors of a tree as inputs: none is nested, or sparse and compressed."""
    ragged = next((leaf for leaf in tree.leaves(arguments) if isinstance(leaf, Tensor) and _is_ragged(leaf)), None)
    if ragged is not None:
        raise TraceError(
            f"the batch holds {tree.describe(ragged)}, which a graph cannot take as an input; pass the dense tensors "
            "that it consists of (values and indices or offsets), and make it in the loss"
        )


def _require_apart(carry: PyTree, *rest: PyTree) -> None:
    """Check that a donated state, which a graph overwrites, shares no memory with its other inputs.

    Torch's cache does not distinguish graphs of inputs that share memory from others (2.13).
    """
    written, read = (
        {_torch.storage_id(leaf) for leaf in tree.leaves(part) if isinstance(leaf, Tensor) and not leaf.is_sparse}
        for part in (carry, rest)
    )
    if written & read:
        raise BatchError(
            "compiled: the batch shares memory with the state, which is donated and overwritten; pass a copy of the "
            "tensor (x.clone())"
        )


class CompiledCache:
    """A function of trees that runs as compiled graphs; a graph is compiled when arguments first need it.

    If that takes long, the log says so with its `name`, if it has one. With `donate` a graph writes the new carry into
    the tensors of the old one; with `replay` the device records and replays it, if the settings allow it. When
    `constants` of the function change, they need another graph.
    """

    def __init__(
        self,
        function: Carrying,
        compiler: Compiler,
        name: str = "",
        *,
        donate: bool,
        replay: bool = False,
        constants: Constants | None = None,
    ) -> None:
        self._function, self._name, self._donate = function, name, donate
        self._constants = constants or Constants()
        self._compile = compiler.replaying() if replay else compiler.compile
        self._shapes = ShapeRegistry(compiler.max_graphs)
        self.graphs: list[Graph] = []

    def __call__(self, carry: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        """Run the function."""
        arguments = (carry, *rest)
        constants = self._constants.values()
        with torch.set_grad_enabled(False):
            for graph in self.graphs:
                leaves = graph.read(arguments, constants)
                if leaves is not None:
                    return graph(carry, leaves)
            graph = self.graph_for(*arguments)
            arguments = resolved(arguments)
            return graph(arguments[0], tree.leaves(arguments))

    def graph_for(self, *arguments: PyTree) -> Graph:
        """Return the graph for arguments like these, which is compiled if there is none."""
        arguments, constants = resolved(arguments), self._constants.values()
        key = cache_key(arguments)
        # `Graph.read` is faster, but misses a graph that was compiled in another context.
        alike = [graph for graph in self.graphs if graph.key == key]
        known = next((graph for graph in alike if graph.has(constants)), None)
        return known or self._new_graph(arguments, key, alike, constants)

    def _new_graph(
        self, arguments: tuple[PyTree, ...], key: Key, alike: Sequence[Graph], constants: Mapping[str, str]
    ) -> Graph:
        """Return a new graph; or the one of `alike`, which were compiled with other constants, that is the same."""
        _require_strided(arguments)
        if self._donate:
            _require_apart(*arguments)
        inputs = {"state": arguments[0], "batch": arguments[1], "constants": dict(constants)}
        if not alike:
            self._shapes.admit(**inputs)
        with log_if_slow(self._name) if self._name else nullcontext():
            generators = self._constants.generators
            graph = Graph(self._function, arguments, key, donate=self._donate, generators=generators)
            graph.constants = self._constants.leave_out(constants)
            for existing in alike:
                if existing.identity == graph.identity:
                    existing.ignore_changes(graph.constants)
                    return existing
            if alike:
                self._shapes.admit(**inputs)
                self._log_changed(alike[-1].constants, constants)
            graph.compile(self._compile, arguments)
        self.graphs.append(graph)
        return graph

    def _log_changed(self, olds: Mapping[str, str], news: Mapping[str, str]) -> None:
        changes = [
            f"{name} is {news.get(name, MISSING)} and was {olds.get(name, MISSING)}" for name in changed(olds, news)
        ]
        log_on_first_rank(
            "compiled: %s is compiled again, since %s; a number that changes often should be a tensor in the batch "
            "('A number that changes with the step' in docs/guide.md)",
            self._name,
            listed(changes),
        )


class Graph:
    """One compiled graph of a `CompiledCache`, with the structures of its inputs and outputs, and its constants."""

    def __init__(
        self,
        function: Carrying,
        arguments: tuple[PyTree, ...],
        key: Key,
        *,
        donate: bool,
        generators: Sequence[Any] = (),
    ) -> None:
        self.key, self._donate = key, donate
        self.constants: Mapping[str, str] = {}
        # Names of constants that do not change the graph.
        self._ignored: set[str] = set()
        leaves, spec = tree.flatten(arguments)
        self._others = [
            (index, _static(leaf))
            for index, leaf in enumerate(leaves)
            if not isinstance(leaf, Tensor) or _is_wrapped(leaf)
        ]
        self._tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._unwraps = any(map(_is_wrapped, leaves))
        tensors = self._tensors(leaves)
        self._read, self._is_like = reader(spec), _torch.tensor_guard(tensors)
        flat = self._flat(function, leaves, spec)
        self.captured = capture.capture(flat, tensors, lambda: function(*tree.clone(arguments)), generators)
        carry = self._spec, self._overwrites, self._changed
        extra = self._extra_spec, [repr(leaf) for leaf in self._extras]
        self.identity = capture.identity_of(self.captured), carry, extra

    def compile(self, compile_: Compile, arguments: tuple[PyTree, ...]) -> None:
        """Compile it for tensors like these."""
        leaves = tree.leaves(arguments)
        carried = sum(len(plain_tensors(leaf)) for leaf in leaves[: self._size] if isinstance(leaf, Tensor))
        with attempted():
            self._compiled = compile_(self.captured, self._tensors(leaves), carried)
        self._run = self._compiled if self._donate else self._first_run

    def _first_run(self, *tensors: Tensor) -> Sequence[Tensor]:
        # It does not donate, so a failure has written nothing.
        with attempted():
            outputs = self._compiled(*tensors)
        self._run = self._compiled
        return outputs

    @property
    def text(self) -> str:
        """How the compiled graph prints: whether it is replayed."""
        return getattr(self._compiled, "text", "")

    def _flat(self, function: Carrying, leaves: list[Any], spec: optree.PyTreeSpec) -> capture.Flat:
        def flat(*inputs: Tensor) -> list[Tensor]:
            tensors = iter(inputs)
            carry, *rest = tree.unflatten(
                spec, [of_plain_tensors(leaf, tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            )
            new, extra = function(carry, *rest)
            (old_leaves, old_spec), (new_leaves, self._spec) = tree.flatten(carry), tree.flatten(new)
            self._overwrites = self._donate and self._spec == old_spec
            self._changed = [i for i, (a, b) in enumerate(zip(new_leaves, old_leaves, strict=True)) if a is not b]
            self._size = len(old_leaves)
            extras, self._extra_spec = tree.flatten(extra)
            self._extras = [None if isinstance(leaf, Tensor) else leaf for leaf in extras]
            # A metric may be the same tensor as a leaf that donation overwrites.
            outputs = [leaf.clone() for leaf in extras if isinstance(leaf, Tensor)]
            if not self._donate:
                return outputs + [new_leaves[i] for i in self._changed]
            # A new leaf that shares memory with an old one is copied before that memory is overwritten.
            old_storages = {_torch.storage_id(leaf) for leaf in old_leaves}
            values = [new_leaves[i] for i in self._changed]
            values = [value.clone() if _torch.storage_id(value) in old_storages else value for value in values]
            for i, value in zip(self._changed, values, strict=True):
                old_leaves[i].copy_(value)
            return outputs

        return flat

    def has(self, constants: Mapping[str, str]) -> bool:
        """Whether it was compiled with these constants."""
        return self._ignored.issuperset(changed(self.constants, constants))

    def ignore_changes(self, constants: Mapping[str, str]) -> None:
        """Ignore the constants that differ from these: the function has the same graph with both values."""
        self._ignored.update(changed(self.constants, constants))

    def read(self, arguments: tuple[PyTree, ...], constants: Mapping[str, str]) -> list[Any] | None:
        """Return the leaves of arguments that this graph was compiled for; None for others, or other constants."""
        if self.constants is not constants and not self.has(constants):
            return None
        leaves = self._read(arguments)
        if leaves is None or _settings(leaves) != self.key[-1]:
            return None
        for index, known in self._others:
            if _static(leaves[index]) != known:
                return None
        return leaves if self._is_like(*self._tensors(leaves)) else None

    def _tensors(self, leaves: list[Any]) -> list[Tensor]:
        if not self._others:
            return leaves
        tensors = [leaves[index] for index in self._tensor_indices]
        return [each for tensor in tensors for each in plain_tensors(tensor)] if self._unwraps else tensors

    def __call__(self, carry: PyTree, leaves: list[Any]) -> tuple[PyTree, PyTree]:
        """Run the graph on the leaves of its arguments, of which `carry` is the first."""
        tensors, runner = self._tensors(leaves), graph_runner()
        outputs = iter(self._run(*tensors) if runner is None else runner(self._run, self.captured, tensors))
        extra = tree.unflatten(self._extra_spec, [next(outputs) if e is None else e for e in self._extras])
        if self._overwrites:
            return carry, extra
        carried = leaves[: self._size]
        if not self._donate:
            for i in self._changed:
                carried[i] = next(outputs)
        return tree.unflatten(self._spec, carried), extra
