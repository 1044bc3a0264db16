"""Compilation: the whole step as one graph, or its loss and its update as two."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ftrain import backends, graph, random, tree
from ftrain.checks import require_positive
from ftrain.errors import BatchError, OptionError, TraceError
from ftrain.inductor_random import Fused
from ftrain.keyed import Keyed
from ftrain.step import Step
from ftrain.types import (
    Gradients,
    Hyper,
    LossFn,
    Metrics,
    PyTree,
    Runner,
    TrainState,
    UpdateFn,
)
from ftrain.wrapper import Wrapper, wrapper

LOWERINGS = ("auto", "whole", "split")
log = logging.getLogger("ftrain")


@wrapper
def compiled(
    *,
    lowering: str = "auto",
    donate: bool = False,
    backend: str | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    max_graphs: int = 8,
) -> Wrapper:
    """Compile the step. The result agrees with the eager one within rounding.

    ``"whole"`` captures forward, backward, clipping, optimizer and the rest as one graph. ``"split"``
    hands the loss to `torch.compile`, which may break its graph, and captures only the update.
    ``"auto"`` takes the whole step, and splits it when that cannot be captured, with one log line that
    says why. A changing learning rate is an input of the graph; another shape of the batch is another
    graph. Modules that draw from torch's global generators draw from the state's key instead in a
    whole graph, so their random numbers differ from those of the eager step. As under `jax.jit`, what is
    not an argument is read once, when the graph is captured: numbers in closures and attributes, and
    metrics that are Python numbers.

    A plain function ``(state, batch) -> (state, metrics)`` is captured as it is; one that calls Steps
    runs uncompiled, since these work on the host as well: compile the Steps.

    Args:
        lowering: ``"auto"``, ``"whole"`` or ``"split"``.
        donate: let the new state take the memory of the old one, which is then consumed.
        backend: of `torch.compile`; the one that suits the device, unless told.
        mode: of Inductor, such as ``"max-autotune"``.
        options: of Inductor, by name.
        max_graphs: as many graphs and no more are compiled for one step.

    Raises:
        OptionError: for an unknown lowering, backend or mode.
        TraceError: from the step, when ``lowering="whole"`` cannot be captured.
        BatchError: from the step, when batches need more than `max_graphs` graphs.
    """
    if lowering not in LOWERINGS:
        raise OptionError(f"compiled: lowering is {lowering!r}; choices are {', '.join(LOWERINGS)}")
    require_positive("compiled", "max_graphs", max_graphs)
    settings = graph.require_backend("compiled", backend or graph.INDUCTOR, mode, options)
    compiler = Compiler(backend, settings, max_graphs)

    def run(step: Step) -> Runner:
        return _Compiled(step, lowering, compiler)

    def function(plain: Callable[..., Any]) -> Callable[..., Any]:
        return CompiledFunction(plain, compiler, donate=donate)

    return Wrapper("compiled", "compiled", "step", step=run, function=function, donate=donate)


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The settings of a compilation."""

    backend: str | None
    options: Mapping[str, Any]
    max_graphs: int

    def __call__(self, captured: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> graph.Flat:
        """Compile a captured graph for the device of its inputs."""
        return graph.compile_graph(captured, inputs, self.backend_for(inputs[0].device), self.options)

    def compile_loss(self, loss: LossFn) -> LossFn:
        """Hand a loss to `torch.compile`."""
        backend = self.backend or graph.INDUCTOR
        return torch.compile(loss, dynamic=False, backend=backend, options=dict(self.options) or None)

    def backend_for(self, device: torch.device) -> str:
        """The backend that was asked for, or the one that suits the device."""
        return self.backend or backends.of(device).compile_backend


class Kinds:
    """Counts the kinds of batches that came, each of which needs a graph of its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Hashable, dict[str, str]] = {}

    def admit(self, **inputs: PyTree) -> None:
        """Take note of the inputs of a graph.

        Raises:
            BatchError: when they are of one kind too many; names the leaf that differs most often.
        """
        leaves, spec = tree.flatten(inputs)
        kind = spec, tuple(_static(leaf) for leaf in leaves)
        if kind in self._known:
            return
        shown = {name: _shown(leaf) for name, leaf in zip(tree.leaf_names(inputs), leaves, strict=True)}
        if len(self._known) >= self._most:
            raise BatchError(self._too_many(shown))
        self._known[kind] = shown

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


class Traced:
    """A function of trees as compiled graphs, one for each kind of its arguments.

    Args:
        function: ``(carry, *rest) -> (carry, extra)`` on trees; the carry keeps its structure.
        compiler: compiles what was captured.
        donate: write the new carry into the tensors of the old one.
    """

    def __init__(self, function: Callable[..., tuple[PyTree, PyTree]], compiler: Compiler, *, donate: bool) -> None:
        self._function, self._compiler, self._donate = function, compiler, donate
        self._graphs: dict[Hashable, _Graph] = {}
        self._kinds = Kinds(compiler.max_graphs)

    def __call__(self, carry: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        """Run the graph for trees like these, which is compiled when they are the first."""
        leaves, spec = tree.flatten((carry, *rest))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = spec, tuple(_static(leaf) for leaf in leaves)
        found = self._graphs.get(kind)
        if found is None:
            self._kinds.admit(state=carry, batch=rest[0])
            found = _Graph(self._function, leaves, spec, tensors, self._compiler, donate=self._donate)
            self._graphs[kind] = found
        with torch.no_grad():
            return found(carry, tensors)


class _Graph:
    """One compiled graph and how its outputs fit back into trees."""

    def __init__(
        self,
        function: Callable[..., tuple[PyTree, PyTree]],
        leaves: list[Any],
        spec: optree.PyTreeSpec,
        tensors: list[Tensor],
        compiler: Compiler,
        *,
        donate: bool,
    ) -> None:
        self._donate = donate
        trees = tree.unflatten(spec, leaves)
        captured = graph.capture(self._flat(function, leaves, spec), tensors, lambda: function(*tree.clone(trees)))
        self._run = compiler(captured, tensors)

    def _flat(self, function: Callable[..., Any], leaves: list[Any], spec: optree.PyTreeSpec) -> graph.Flat:
        def flat(*inputs: Tensor) -> list[Tensor]:
            given = iter(inputs)
            carry, *rest = tree.unflatten(spec, [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
            new, extra = function(carry, *rest)
            old_leaves, (new_leaves, self._spec) = tree.leaves(carry), tree.flatten(new)
            self._changed = [i for i, (a, b) in enumerate(zip(new_leaves, old_leaves, strict=True)) if a is not b]
            extras, self._extra_spec = tree.flatten(extra)
            self._extras = [None if isinstance(leaf, Tensor) else leaf for leaf in extras]
            # A metric may be the very tensor that donation overwrites.
            outputs = [leaf.clone() for leaf in extras if isinstance(leaf, Tensor)]
            if not self._donate:
                return outputs + [new_leaves[i] for i in self._changed]
            # What a new leaf shares with an old one is read before it is written.
            held = {leaf.untyped_storage()._cdata for leaf in old_leaves}
            values = [new_leaves[i] for i in self._changed]
            values = [value.clone() if value.untyped_storage()._cdata in held else value for value in values]
            for i, value in zip(self._changed, values, strict=True):
                old_leaves[i].copy_(value)
            return outputs

        return flat

    def __call__(self, carry: PyTree, tensors: list[Tensor]) -> tuple[PyTree, PyTree]:
        outputs = iter(self._run(*tensors))
        extra = tree.unflatten(self._extra_spec, [next(outputs) if e is None else e for e in self._extras])
        leaves = tree.leaves(carry)
        if not self._donate:
            for i in self._changed:
                leaves[i] = next(outputs)
        return tree.unflatten(self._spec, leaves), extra


def _static(leaf: Any) -> Hashable:
    """What a graph depends on: of a tensor its metadata, of anything else its value."""
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


class _Compiled:
    """Runs a step compiled: whole, split, or whole if that can be captured and else split."""

    def __init__(self, step: Step, lowering: str, compiler: Compiler) -> None:
        self._step, self._lowering, self._compiler = step, lowering, compiler
        self._kinds = Kinds(compiler.max_graphs)
        self._may_split = lowering == "auto"
        self._core: Callable[..., Any] = self._whole() if lowering != "split" else self._split()

    @property
    def text(self) -> str:
        """How it prints: with the lowering that was chosen, once it was."""
        return f"compiled({self._lowering}{', donate' if self._step.donate else ''})"

    def _whole(self) -> Callable[..., Any]:
        core = self._step.assemble()

        def drawing(state: TrainState, batch: PyTree, hyper: Hyper, keys: Tensor) -> tuple[TrainState, Metrics]:
            draw = Fused if self._compiler.backend_for(keys.device) == graph.INDUCTOR else Keyed
            rng, stock = keys
            with draw(stock):
                return core(state, batch, hyper, rng if self._step.base.needs_rng else None)

        return Traced(drawing, self._compiler, donate=self._step.donate)

    def _split(self) -> Callable[..., Any]:
        core = self._step.assemble(
            around_loss=self._compiler.compile_loss,
            around_update=self._traced_update,
        )
        return lambda state, batch, hyper, keys: core(
            state, batch, hyper, keys[0] if self._step.base.needs_rng else None
        )

    def _traced_update(self, update: UpdateFn) -> UpdateFn:
        def carried(state: TrainState, gradients: Gradients, hyper: Hyper) -> tuple[TrainState, None]:
            return update(state, gradients, hyper, donate=False), None

        traced = Traced(carried, self._compiler, donate=self._step.donate)

        def updating(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            new: TrainState
            new, _ = traced(state, gradients, hyper)
            return new

        return updating

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        if self._lowering == "split":
            self._kinds.admit(batch=batch)
        device = tree.device_of(state.params)
        values = torch.tensor(list(hyper.values()), dtype=torch.float64).to(device, non_blocking=True)
        inputs = (
            dataclasses.replace(state, step=None, rng=None),  # type: ignore[arg-type]
            batch,
            dict(zip(hyper, values.unbind(), strict=True)),
            random.to_device(torch.tensor([words, random.stock_words(words)]), device),
        )
        with torch.no_grad(), backends.of(device).seeded(random.seed_of(words)):
            return self._run(*inputs)

    def _run(self, *inputs: Any) -> tuple[TrainState, Metrics]:
        try:
            made = self._core(*inputs)
        except TraceError as error:
            if not self._may_split:
                raise TraceError(f"compiled: the step cannot be captured as one graph: {error}") from error
            log.warning("compiled: split into loss and update, since the whole step cannot be captured: %s", error)
            self._may_split, self._lowering, self._core = False, "split", self._split()
            return self._core(*inputs)  # type: ignore[no-any-return]
        self._lowering = "whole" if self._lowering == "auto" else self._lowering
        return made  # type: ignore[no-any-return]


class CompiledFunction:
    """A plain function ``(state, batch) -> (state, metrics)``, compiled."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler, *, donate: bool) -> None:
        self._function: Callable[..., Any] = function
        self._traced: Callable[..., Any] = Traced(function, compiler, donate=donate)
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Run the function, compiled if it can be captured."""
        try:
            return self._traced(state, batch)  # type: ignore[no-any-return]
        except TraceError as error:
            log.warning("compiled: %s runs uncompiled, since it cannot be captured: %s", self.__name__, error)
            self._traced = self._function
            return self._function(state, batch)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"compiled({self.__name__})"
