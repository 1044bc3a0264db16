"""Compilation: the whole step as one graph, or its loss and its update as two."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from ftrain import backends, random, tree
from ftrain.errors import ComposeError, OptionError, TraceError, require_positive
from ftrain.parallel.mesh import Group, groups
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.step.across_ranks import combines_ranks
from ftrain.step.core import Eager, assemble
from ftrain.step.lowered import Lowered
from ftrain.step.shared_memory import overlaps
from ftrain.step.step import Step
from ftrain.step.wrapper import OnStep, Wrapper, wrapper
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.announce import described, log_if_slow
from ftrain.transforms.compile.cache import ShapeRegistry
from ftrain.transforms.compile.fallback import CompilerError, UntilUpdate
from ftrain.transforms.compile.lowered import count_nodes, explain, peak_bytes, traffic
from ftrain.transforms.compile.microbatch_loop import in_a_loop, stock_draws
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import RNG, Core, Gradients, Hyper, Metrics, PyTree, Runner, TrainState, UpdateFn, replace

LOWERINGS = ("auto", "whole", "split")
SPLIT_IN_BACKWARD = (
    "a split step cannot be updated within its backward pass, which is one operation there and makes all gradients"
)
FAILED = TraceError, CompilerError
log = logging.getLogger("ftrain")


@wrapper
def compiled(
    *,
    lowering: Literal["auto", "whole", "split"] = "auto",
    donate: bool = False,
    backend: str | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool = False,
    replay: bool | None = None,
    cache_dir: str | Path | None = None,
    max_graphs: int = 8,
    **options: Any,
) -> Wrapper:
    """Compile the step. The result agrees with the eager one within rounding.

    ``"whole"`` captures forward, backward, clipping, optimizer and the rest as one graph. ``"split"``
    hands the loss to `torch.compile`, which may break its graph, and captures only the update.
    ``"auto"`` takes the whole step, splits it when that cannot be captured or compiled, and runs it eagerly
    when the compiler fails on its parts, too; one log line says which and why, and so does `print`. What fails
    when a compiled graph first runs counts as well, but not where it donates: it may have written to the state.
    When compiling takes long, a log line says so. A changing learning rate is an input of the graph; another
    shape of the batch is another graph. Modules that draw from torch's global generators draw from the state's
    key instead in a whole graph, so their random numbers differ from those of the eager step. As under
    `jax.jit`, what is not an argument is read once, when the graph is captured: numbers in closures and
    attributes, and metrics that are Python numbers.

    Where the device can (CUDA graphs), a whole step that donates is recorded when it finds its state in place
    for the second time, and replayed from then on.

    A plain function ``(state, batch) -> (state, metrics)`` is captured as it is; one that calls Steps
    runs uncompiled, since these work on the host as well: compile the Steps.

    Args:
        lowering: ``"auto"``, ``"whole"`` or ``"split"``.
        donate: let the new state take the memory of the old one, which is then consumed.
        backend: of `torch.compile`. Default: `Backend.compile_backend` of the device.
        mode: of Inductor, such as ``"max-autotune"``; the CUDA graphs that some modes add are left to `replay`.
        fullgraph: refuse to break the graph of the loss when the step is split.
        dynamic: compile the loss for changing shapes; needs the split lowering, which ``"auto"`` then is.
        replay: record and replay on the device. Default: where that is possible.
        cache_dir: where Inductor keeps its code for the next start; else in ``TORCHINDUCTOR_CACHE_DIR``, or in
            a temporary directory of the user's.
        max_graphs: as many graphs and no more are compiled for one step.
        options: of Inductor, by name, such as ``max_autotune=True``.

    Raises:
        OptionError: for an unknown lowering, backend, mode or option, or those that exclude each other.
        TraceError: from the step, when ``lowering="whole"`` cannot be captured.
        Exception: from the step, whatever the compiler raises, unless the lowering is ``"auto"``.
        BatchError: from the step, when batches need more than `max_graphs` graphs.
    """
    if lowering not in LOWERINGS:
        raise OptionError(f"compiled: lowering is {lowering!r}; choices are {', '.join(LOWERINGS)}")
    if dynamic and lowering == "whole":
        raise OptionError("compiled: dynamic=True needs lowering='split'; a whole step is one graph for each shape")
    require_positive("compiled", "max_graphs", max_graphs)
    settings = capture.require_backend("compiled", backend or capture.INDUCTOR, mode, options)
    may_fall_back = lowering == "auto"
    compiler = Compiler(backend, settings, fullgraph, dynamic, replay, cache_dir, max_graphs)

    def run(step: Step) -> Runner:
        if step.optimizer.offloaded:
            return _CompiledLoss(step, compiler, may_fall_back=may_fall_back)
        return _Compiled(step, "split" if dynamic else lowering, compiler, may_fall_back=may_fall_back)

    def function(plain: Callable[..., Any]) -> Callable[..., Any]:
        return CompiledFunction(plain, compiler, donate=donate)

    def validate(step: Step) -> None:
        if step.updates_in_backward and (dynamic or lowering == "split"):
            raise ComposeError(f"compiled: {SPLIT_IN_BACKWARD}; leave out lowering='split' and dynamic=True")
        if step.optimizer.offloaded and (step.updates_in_backward or lowering == "whole"):
            raise ComposeError(
                f"compiled: no graph can hold the state of {step.optimizer.text}, which visits the device in parts; "
                "leave out " + ("update_in_backward" if step.updates_in_backward else "lowering='whole'")
            )

    return Wrapper("compiled", step=OnStep(run, function, donate), validate=validate)


class _Compiled:
    """Runs a step compiled: whole, split, or whole if that works, else split, and else eagerly."""

    def __init__(self, step: Step, lowering: str, compiler: Compiler, *, may_fall_back: bool) -> None:
        self._step, self._lowering, self._compiler = step, lowering, compiler
        self._names = list(step.optimizer.schedules)
        self._shapes = ShapeRegistry(compiler.max_graphs)
        self._may_fall_back, self._why, self._eager = may_fall_back, "", Eager(step)
        self._core: Callable[..., Any] = self._whole() if lowering != "split" else self._split()

    @property
    def text(self) -> str:
        """How it prints: with the lowering that was chosen, once it was."""
        graphs = {each.text: None for each in self._cache.graphs if each.text}
        return _text(self._lowering, self._step, self._why, *graphs)

    def lower(self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int]) -> Lowered:
        """Compile for a state and a batch like these, and say what was compiled."""
        device = tree.device_of(state.params)
        inputs = replace(state, step=None, rng=None), batch, self._pack(words, hyper, device)
        if self._lowering in ("auto", "whole"):
            try:
                captured = self._cache.graph_for(*inputs).captured
                self._settle()
                travels = traffic(captured, _groups(self._step))
                return Lowered("whole", 1, count_nodes(captured), peak_bytes(captured), traffic=travels)
            except FAILED as error:
                self._fall_back(error)
        copies = tree.clone(inputs)
        self._run(tree.clone(state), batch, hyper, words, copies)
        if self._lowering == "eager":
            return Lowered("eager", 0, {}, None)
        graphs, breaks = _explained(self._step, state, batch, self._unpack(copies[2])[0][0])
        update = self._cache.graphs[-1].captured
        return Lowered("split", len(graphs) + 1, count_nodes(*graphs, update), None, breaks)

    def _whole(self) -> Callable[..., Any]:
        if any(wrapper.grad and wrapper.grad.compile_inner for wrapper in self._step.wrappers):
            return in_a_loop(self._step, self._compiler, self._cached_update, self._unpack)
        # Only a donated state stays where it is.
        donate = self._step.donate
        drawing, what = self._drawing(assemble(self._step)), described(self._step.base)
        self._cache = self._compiler.traced(drawing, what, donate=donate, replay=donate)
        return self._cache

    def _drawing(self, core: Core) -> Callable[..., Any]:
        def drawing(state: TrainState, batch: PyTree, words: Tensor) -> tuple[TrainState, Metrics]:
            keys, hyper = self._unpack(words)
            with stock_draws(self._step.base.module, self._compiler, keys[1]):
                return core(state, batch, hyper, keys[0] if self._step.base.needs_rng else None)

        return drawing

    def _split(self) -> Callable[..., Any]:
        until_update = UntilUpdate()
        core = assemble(
            self._step,
            around_loss=self._compiler.compile_loss,
            around_update=lambda update: until_update.around_update(self._cached_update(update)),
        )
        what = described(self._step.base)
        _warn_of_shared_buffers(self._step.base.module)

        def run(state: TrainState, batch: PyTree, words: Tensor) -> tuple[TrainState, Metrics]:
            new = self._shapes.admit(batch=batch)
            keys, hyper = self._unpack(words)
            with log_if_slow(what) if new else nullcontext(), self._compiler.cache(), until_update.attempted():
                return core(state, batch, hyper, keys[0] if self._step.base.needs_rng else None)

        return run

    def _cached_update(self, update: UpdateFn) -> UpdateFn:
        def carried(state: TrainState, gradients: Gradients, hyper: Hyper) -> tuple[TrainState, None]:
            return update(state, gradients, hyper, donate=False), None

        self._cache = self._compiler.traced(carried, None, donate=self._step.donate)

        def updating(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            new: TrainState
            new, _ = self._cache(state, gradients, hyper)
            return new

        return updating

    def _pack(self, words: tuple[int, int], hyper: Mapping[str, float], device: torch.device) -> Tensor:
        """Bring all that the host knows of a step to the device as one int64 tensor."""
        keys = *words, *random.stock_key_data(words), *random.update_key_data(words)
        # Without float64, numbers lie in pairs; "0q" fills up the last one.
        kind = "d" if backends.widest(device) == torch.float64 else "f"
        packed = bytearray(struct.pack(f"{len(keys)}q{len(hyper)}{kind}0q", *keys, *hyper.values()))
        return random.to_device(torch.frombuffer(packed, dtype=torch.int64), device)

    def _unpack(self, packed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the keys of the loss and of stock modules, shape (2, 2), and what the optimizer gets."""
        values = packed[6:].view(backends.widest(packed.device)).unbind()
        hyper = dict(zip(self._names, values, strict=False))
        if self._step.optimizer.needs_rng:
            hyper[RNG] = packed[4:6]
        return packed[:4].reshape(2, 2), hyper

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        device = tree.device_of(state.params)
        inputs = replace(state, step=None, rng=None), batch, self._pack(words, hyper, device)
        if self._lowering in ("auto", "whole"):
            try:
                output: tuple[TrainState, Metrics] = self._core(*inputs)
            except FAILED as error:
                self._fall_back(error)
            else:
                self._settle()
                return output
        return self._run(state, batch, hyper, words, inputs)

    def _run(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int], inputs: Any
    ) -> tuple[TrainState, Metrics]:
        """Run the step split, or eagerly."""
        if self._lowering == "eager":
            return self._eager(state, batch, hyper, words)
        backend = backends.of(tree.device_of(state.params))
        try:
            with torch.no_grad(), backend.seeded(random.seed_of(words)), backend.deterministic():
                return self._core(*inputs)  # type: ignore[no-any-return]
        except FAILED as error:
            why = self._reason(error)
        # Not in the handler, where the error would hold its tensors. What fails here as well is the loss itself.
        output = self._eager(state, batch, hyper, words)
        log.warning("compiled: the step runs eagerly, since the compiler failed: %s", why)
        self._lowering, self._why = "eager", why
        return output

    def _settle(self) -> None:
        if self._lowering == "auto":
            log.info("compiled: the whole step is one graph")
            self._lowering = "whole"

    def _fall_back(self, error: TraceError | CompilerError) -> None:
        """Let a step be split, or made eagerly, that failed as a whole."""
        updates_in_backward = self._step.updates_in_backward
        if isinstance(error, TraceError) and (updates_in_backward or not self._may_fall_back):
            more = f"; {SPLIT_IN_BACKWARD}: leave out update_in_backward or compiled" if updates_in_backward else ""
            raise TraceError(f"compiled: the step cannot be captured as one graph: {error}{more}") from error
        why = self._reason(error)
        if updates_in_backward or combines_ranks(self._step.wrappers):
            log.warning("compiled: the step runs eagerly, since the compiler failed: %s", why)
            self._lowering, self._why = "eager", why
            return
        what = "cannot be captured" if isinstance(error, TraceError) else "cannot be compiled"
        log.warning("compiled: split into loss and update, since the whole step %s: %s", what, why)
        self._lowering, self._core, self._why = "split", self._split(), why

    def _reason(self, error: TraceError | CompilerError) -> str:
        return _why(error, self._may_fall_back, "whole" if self._lowering == "auto" else self._lowering)


def _text(lowering: str, step: Step, why: str, *more: str) -> str:
    """Return how a compiled step prints, with the reason for its lowering if there is one."""
    donate = ["donate"] if step.donate else []
    text = f"compiled({', '.join([lowering, *donate, *more])})"
    return f"{text}  # {why}" if why else text


def _why(error: TraceError | CompilerError, may_fall_back: bool, lowering: str) -> str:
    """Say why a step runs in another way; where it may not, or the error says nothing of compiling, raise it."""
    cause = error.__cause__ if isinstance(error, CompilerError) and error.__cause__ else error
    if not may_fall_back:
        raise cause
    return str(error) if isinstance(error, TraceError) else f"{error} (lowering={lowering!r} raises the whole error)"


def _warn_of_shared_buffers(module: nn.Module | None) -> None:
    """Log which buffers a split step may not change in place; what it changes is only known while it is compiled."""
    for first, second in overlaps(dict(module.named_buffers())) if module is not None else ():
        log.warning(
            "compiled: the buffers %s and %s have memory in common. A split step does not see whether the model "
            "changes one of them in place; the other would keep its old value. Eager and whole steps raise an error",
            first,
            second,
        )


def _groups(step: Step) -> Mapping[str, Group]:
    """Return the groups in which the ranks of a step communicate."""
    meshes = [wrapper.options["mesh"] for wrapper in step.wrappers if wrapper.name == SHARDED and wrapper.options]
    return groups(meshes[0]) if meshes else {}


def _explained(
    step: Step, state: TrainState, batch: PyTree, rng: Tensor
) -> tuple[list[fx.GraphModule], tuple[str, ...]]:
    """The graphs of a loss, and where they break; `rng` is the key of the step, if it draws."""
    parts = tree.overlay(state.params, state.frozen), batch
    return explain(step.loss.fn, *parts, rng=rng if step.base.needs_rng else None, buffers=tree.clone(state.buffers))


class _CompiledLoss:
    """Runs a step with its loss compiled, and the rest operation by operation."""

    def __init__(self, step: Step, compiler: Compiler, *, may_fall_back: bool) -> None:
        self._step, self._compiler, self._shapes, self._may_fall_back = (
            step,
            compiler,
            ShapeRegistry(compiler.max_graphs),
            may_fall_back,
        )
        self._until_update, self._described = UntilUpdate(), described(step.base)
        self._run = Eager(step, compiler.compile_loss, self._until_update.around_update)
        self.text = _text("split", step, "the loss alone: the optimizer's state visits the device in parts")

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        new = self._shapes.admit(batch=batch)
        try:
            with (
                log_if_slow(self._described) if new else nullcontext(),
                self._compiler.cache(),
                self._until_update.attempted(),
            ):
                return self._run(state, batch, hyper, words)
        except CompilerError as error:
            why = _why(error, self._may_fall_back, "split")
        eager = Eager(self._step)
        output = eager(state, batch, hyper, words)
        log.warning("compiled: the step runs eagerly, since the compiler failed: %s", why)
        self._run, self.text = eager, _text("eager", self._step, why)
        return output

    def lower(self, state: TrainState, batch: PyTree, hyper: Hyper, words: tuple[int, int]) -> Lowered:
        """Say what of the loss is compiled for a state and a batch like these."""
        rng = random.to_device(random.wrap_key_data(words), tree.device_of(state.params))
        with self._compiler.cache():
            graphs, breaks = _explained(self._step, state, batch, rng)
        return Lowered("split", len(graphs), count_nodes(*graphs), None, breaks)


class CompiledFunction:
    """A plain function ``(state, batch) -> (state, metrics)``, compiled."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler, *, donate: bool) -> None:
        self._function: Callable[..., Any] = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._cache: Callable[..., Any] = compiler.traced(function, self.__name__, donate=donate)

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Run the function, compiled if it can be captured."""
        try:
            return self._cache(state, batch)  # type: ignore[no-any-return]
        except FAILED as error:
            why = "captured" if isinstance(error, TraceError) else "compiled"
            log.warning("compiled: %s runs uncompiled, since it cannot be %s: %s", self.__name__, why, error)
        self._cache = self._function
        return self._function(state, batch)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"compiled({self.__name__})"
