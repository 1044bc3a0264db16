"""Compilation of a step: as one graph, or split into loss and update."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ftrain import backends, random, tree
from ftrain._torch import compile as torch_compile
from ftrain.errors import ComposeError, OptionError, TraceError, as_path, require_positive, require_switches
from ftrain.parallel.mesh import Group, groups
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.step.across_ranks import combines_ranks
from ftrain.step.core import Eager, assemble
from ftrain.step.eval_step import EvalStep
from ftrain.step.lowered import Lowered
from ftrain.step.shared_memory import copy_shared, overlaps
from ftrain.step.step import Step
from ftrain.step.wrapper import OnLoss, OnStep, Wrapper, wrapper
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.cache import CompiledCache, split_runner
from ftrain.transforms.compile.compiled_blocks import compile_blocks, require_compilable
from ftrain.transforms.compile.compiled_function import FAILED, CompiledFunction
from ftrain.transforms.compile.constants import Constants
from ftrain.transforms.compile.evaluation import compile_evaluation
from ftrain.transforms.compile.fallback import CompilerError
from ftrain.transforms.compile.lowered import count_nodes, explain, peak_bytes, traffic
from ftrain.transforms.compile.microbatch_loop import in_a_loop, stock_draws
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import RNG, Gradients, Hyper, Loss, LossFn, Metrics, PyTree, Runner, TrainState, UpdateFn, replace

LOWERINGS = ("auto", "whole", "split", "blocks")
SPLIT_IN_BACKWARD = (
    "a split step cannot be updated within its backward pass, which is one operation there and returns all gradients"
)
OFFLOADED = "the loss alone: the optimizer's state is copied to the device in parts"
log = logging.getLogger("ftrain")


@wrapper
def compiled(
    *,
    lowering: Literal["auto", "whole", "split", "blocks"] = "auto",
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
    """Compile the step. The result agrees with that of the eager step within rounding.

    ``"whole"`` captures forward, backward, clipping, optimizer and all other wrappers as one graph. ``"split"`` passes
    the loss to `torch.compile`, which may break its graph, and captures only the update. ``"blocks"`` passes the
    repeated layers of a module to `torch.compile`, and the rest of the step runs eagerly: layers of one class share one
    graph, so that the time to compile does not grow with their number. ``"auto"`` captures the whole step, splits it if
    that cannot be captured or compiled, and runs it eagerly if the compiler fails on the parts too, or the first run of
    a graph that does not donate fails; the log and `print` say which and why. If compiling takes long, the log says so.

    Learning rates are inputs of the graph; another shape of the batch is another graph, and so is another value of a
    Python number that the loss reads in a closure, a global, an attribute, a dict or a list (`Constants`). Metrics that
    are Python numbers keep their first value. In a whole graph, modules that draw from torch's global generators draw
    from the key of the state instead. On a device with CUDA graphs, a whole step that donates is recorded when its
    state is in the same memory for the second time, and replayed from then on.

    A plain function ``(state, batch) -> (state, metrics)`` is captured too. One that calls Steps runs uncompiled, since
    Steps also compute on the host: compile the Steps. An `EvalStep` becomes one graph for each kind of batch. With
    ``"split"``, or if it cannot be captured, only its loss is compiled. Nothing is donated. On ranks that gather block
    by block it runs eagerly, unless the lowering is ``"blocks"``.

    Args:
        lowering: ``"auto"``, ``"whole"``, ``"split"`` or ``"blocks"``.
        donate: reuse the memory of the old state for the new one; the old state is then consumed.
        backend: backend of `torch.compile`. Default: `Backend.compile_backend` of the device.
        mode: mode of Inductor, such as ``"max-autotune"``. CUDA graphs that a mode adds are ignored: see `replay`.
        fullgraph: raise an error if a graph of `torch.compile` breaks: that of a loss or a block.
        dynamic: compile for changing shapes; the lowering is then ``"split"``, unless it is ``"blocks"``.
        replay: record and replay on the device. Default: where that is possible.
        cache_dir: directory in which Inductor keeps its code for the next process. Default: the environment variable
            ``TORCHINDUCTOR_CACHE_DIR``, else a temporary directory of the user.
        max_graphs: the largest number of graphs to compile for one step, or of kinds of batches with ``"blocks"``;
            before torch 2.13 at most 8 for an evaluation, a split step, or the layers of a class. Not used with
            ``dynamic=True``.
        options: options of Inductor, by name, such as ``max_autotune=True``.

    Raises:
        OptionError: for an unknown lowering, backend, mode or option, or for options that exclude each other.
        ComposeError: for ``"blocks"``, if the loss has no module with repeated layers; or with a policy of `remat`, or
            `sync_batch_norm`.
        TraceError: from the step, when ``lowering="whole"`` and it cannot be captured; when ``lowering="split"`` or
            ``"blocks"``, and the loss differentiates a gradient that it has taken.
        Exception: from the step, whatever the compiler raises, unless the lowering is ``"auto"``.
        BatchError: from the step, when batches need more than `max_graphs` graphs.
    """
    if lowering not in LOWERINGS:
        raise OptionError(f"compiled: lowering is {lowering!r}; choices are {', '.join(LOWERINGS)}")
    require_switches("compiled", donate=donate, fullgraph=fullgraph, dynamic=dynamic, replay=replay or False)
    if dynamic and lowering == "whole":
        raise OptionError("compiled: dynamic=True needs lowering='split'; a whole step is one graph for each shape")
    require_positive("compiled", "max_graphs", max_graphs)
    settings = capture.require_backend(backend or capture.INDUCTOR, mode, options)
    cache = None if cache_dir is None else as_path("compiled", "cache_dir", cache_dir)
    compiler = Compiler(backend, settings, fullgraph, dynamic, replay, cache, max_graphs)
    if lowering == "blocks":
        if replay:
            raise OptionError("compiled: replay=True needs one graph of the whole step; leave out lowering='blocks'")
        return _by_block(compiler, donate=donate)

    def make_runner(step: Step) -> Runner:
        is_split = dynamic or step.optimizer.offloaded
        return _Compiled(step, "split" if is_split else lowering, compiler, may_fall_back=lowering == "auto")

    def validate(step: Step) -> None:
        if step.updates_in_backward and (dynamic or lowering == "split"):
            raise ComposeError(f"compiled: {SPLIT_IN_BACKWARD}; leave out lowering='split' and dynamic=True")
        if step.optimizer.offloaded and (step.updates_in_backward or lowering == "whole"):
            raise ComposeError(
                f"compiled: no graph can hold the state of {step.optimizer.text}, which is copied to the device in "
                "parts; leave out " + ("update_in_backward" if step.updates_in_backward else "lowering='whole'")
            )

    wrap_function = partial(CompiledFunction, compiler=compiler, donate=donate)
    wrap_evaluation = partial(compile_evaluation, compiler=compiler, lowering="split" if dynamic else lowering)
    on_step = OnStep(make_runner, wrap_function, wrap_evaluation, donate)
    return Wrapper("compiled", step=on_step, validate=validate)


def _by_block(compiler: Compiler, *, donate: bool) -> Wrapper:
    def wrap_evaluation(step: EvalStep) -> EvalStep:
        return EvalStep(compile_blocks(step.loss, compiler))

    def wrap_loss(loss: Loss) -> Loss:
        return compile_blocks(loss, compiler)

    on_step = OnStep(wrap_evaluation=wrap_evaluation, donate=donate)
    return Wrapper("compiled", loss=OnLoss(wrap_loss, order=2), step=on_step, validate=require_compilable)


class _Compiled:
    """Run a step compiled: as one graph, or split into loss and update; eagerly when the compiler fails."""

    def __init__(self, step: Step, lowering: str, compiler: Compiler, *, may_fall_back: bool) -> None:
        self._step, self._lowering, self._compiler = step, lowering, compiler
        self._may_fall_back, self._eager = may_fall_back, Eager(step)
        # Why the step has its lowering, for print.
        self._why = OFFLOADED if step.optimizer.offloaded else ""
        self._cache: CompiledCache | None = None
        self._run: Callable[..., Any] = self._split() if lowering == "split" else self._whole()

    @property
    def text(self) -> str:
        """How the step prints: with the lowering that was chosen, and the beginning of the reason if there is one."""
        graphs = {f"{each.text:.400}": None for each in self._cache.graphs if each.text} if self._cache else {}
        donate = ["donate"] if self._step.donate else []
        text = f"compiled({', '.join([self._lowering, *donate, *graphs])})"
        return f"{text}  # {self._why:.400}" if self._why else text

    def lower(self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], key_data: tuple[int, int]) -> Lowered:
        """Compile for a state and a batch like these, and describe what was compiled."""
        if self._lowering in ("auto", "whole"):
            try:
                captured = self._cache.graph_for(*self._inputs(state, batch, hyper, key_data)).captured  # type: ignore[union-attr]
                self._lowering = "whole"
                sends = traffic(captured, _groups(self._step))
                return Lowered("whole", 1, count_nodes(captured), peak_bytes(captured), traffic=sends)
            except FAILED as error:
                self._fall_back(error)
        updates = []
        if not self._step.optimizer.offloaded:
            # The update is compiled when it gets gradients.
            self._run_split(tree.clone(state), tree.clone(batch), hyper, key_data)
            if self._lowering == "eager":
                return Lowered("eager", 0, {}, None)
            updates = [self._cache.graphs[-1].captured]  # type: ignore[union-attr]
        device, loss = tree.device_of(state.params), self._step.loss
        key = random.to_device(random.wrap_key_data(key_data), device) if loss.needs_rng else None
        params = tree.overlay(state.params, state.frozen)
        graphs, breaks = explain(loss.fn, params, batch, rng=key, buffers=tree.clone(state.buffers))
        return Lowered("split", len(graphs) + len(updates), count_nodes(*graphs, *updates), None, breaks)

    def _whole(self) -> Callable[..., Any]:
        """Return ``(state, batch, packed) -> (state, metrics)`` as one graph."""
        step = self._step
        if any(wrapper.grad and wrapper.grad.compile_inner for wrapper in step.wrappers):
            return in_a_loop(step, self._compiler, self._cached_update, self._unpack)
        core = assemble(step)

        def whole(state: TrainState, batch: PyTree, packed: Tensor) -> tuple[TrainState, Metrics]:
            keys, hyper = self._unpack(packed)
            with stock_draws(step.base.module, self._compiler, keys[1]):
                return core(state, batch, hyper, keys[0] if step.base.needs_rng else None)

        # Only a donated state stays at its addresses, which a replayed graph needs.
        constants, donate = Constants(step.base.fn, step.base.module), step.donate
        self._cache = CompiledCache(
            whole, self._compiler, step.base.name, donate=donate, replay=donate, constants=constants
        )
        return self._cache

    def _split(self) -> Callable[..., Any]:
        """Return ``(state, batch, hyper, key_data) -> (state, metrics)`` with loss and update compiled."""
        step, is_updating = self._step, False
        _warn_of_shared_buffers(step.base.module)

        def around_update(update: UpdateFn) -> UpdateFn:
            compiled_update = update if step.optimizer.offloaded else self._cached_update(update)

            def updating(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
                nonlocal is_updating
                is_updating = True
                return compiled_update(state, gradients, hyper, donate=donate)

            return updating

        def around_loss(loss: LossFn) -> LossFn:
            return step.loss.on_compiled(self._compiler.compile_loss(loss))

        run = Eager(step, around_loss=around_loss, around_update=around_update)

        def split(
            state: TrainState, batch: PyTree, hyper: Hyper, key_data: tuple[int, int]
        ) -> tuple[TrainState, Metrics]:
            nonlocal is_updating
            is_updating = False
            return run(state, batch, hyper, key_data)

        # The update is the first to write to the state.
        return split_runner(split, self._compiler, step.base.name, lambda: is_updating)

    def _cached_update(self, update: UpdateFn) -> UpdateFn:
        def carried(state: TrainState, gradients: Gradients, hyper: Hyper) -> tuple[TrainState, None]:
            return update(state, gradients, hyper, donate=False), None

        cache = self._cache = CompiledCache(carried, self._compiler, donate=self._step.donate)

        def updating(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            new: TrainState
            if self._step.donate:
                gradients = _without_shared_memory(gradients, state)
            # Without metrics: one that is a Python number would be a constant of the graph.
            gradients = replace(gradients, metrics={})
            new, _ = cache(replace(state, step=None, rng=None), gradients, self._as_tensors(hyper, state))
            return new

        return updating

    def _as_tensors(self, hyper: Hyper, state: TrainState) -> Hyper:
        """Return scheduled values as tensors, which do not recompile a graph when they change."""
        device = tree.device_of(state.params)
        numbers = [name for name, value in hyper.items() if not isinstance(value, Tensor)]
        values = torch.tensor([hyper[name] for name in numbers], dtype=backends.widest(device), device=tree.HOST)
        return {**hyper, **dict(zip(numbers, random.to_device(values, device).unbind(), strict=True))}

    def _inputs(
        self, state: TrainState, batch: PyTree, hyper: Hyper, key_data: tuple[int, int]
    ) -> tuple[TrainState, PyTree, Tensor]:
        """Return the inputs of a graph; keys and scheduled values are packed into one int64 tensor on the device."""
        device = tree.device_of(state.params)
        keys = *key_data, *random.stock_key_data(key_data), *random.update_key_data(key_data)
        # Without float64, two numbers share an int64; "0q" pads the last one.
        float_code = "d" if backends.widest(device) == torch.float64 else "f"
        packed = bytearray(struct.pack(f"{len(keys)}q{len(hyper)}{float_code}0q", *keys, *hyper.values()))
        on_device = random.to_device(torch.frombuffer(packed, dtype=torch.int64), device)
        return replace(state, step=None, rng=None), batch, on_device

    def _unpack(self, packed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the keys of the loss and of stock modules, shape (2, 2), and the `Hyper` of the optimizer."""
        values = packed[6:].view(backends.widest(packed.device)).unbind()
        hyper = dict(zip(self._step.optimizer.schedules, values, strict=False))
        if self._step.optimizer.needs_rng:
            hyper[RNG] = packed[4:6]
        return packed[:4].reshape(2, 2), hyper

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], key_data: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        if self._lowering in ("auto", "whole"):
            try:
                output: tuple[TrainState, Metrics] = self._run(*self._inputs(state, batch, hyper, key_data))
            except FAILED as error:
                self._fall_back(error)
            else:
                self._lowering = "whole"
                return output
        return self._run_split(state, batch, hyper, key_data)

    def _run_split(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], key_data: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Run the step split, or eagerly when that has failed."""
        if self._lowering == "eager":
            return self._eager(state, batch, hyper, key_data)
        try:
            return self._run(state, batch, hyper, key_data)  # type: ignore[no-any-return]
        except FAILED as error:
            why = self._reason(error)
        # Outside of the handler, which keeps the tensors of the error alive. An error of the loss is raised here again.
        output = self._eager(state, batch, hyper, key_data)
        self._run_eagerly(why)
        return output

    def _run_eagerly(self, why: str) -> None:
        log.warning("compiled: the step runs eagerly, since the compiler failed: %s", why)
        self._lowering, self._why = "eager", why

    def _fall_back(self, error: TraceError | CompilerError) -> None:
        """Split a step that failed as one graph, or run it eagerly where it cannot be split."""
        updates_in_backward = self._step.updates_in_backward
        if isinstance(error, TraceError) and (updates_in_backward or not self._may_fall_back):
            more = f"; {SPLIT_IN_BACKWARD}: leave out update_in_backward or compiled" if updates_in_backward else ""
            raise TraceError(f"compiled: the step cannot be captured as one graph: {error}{more}") from error
        why = self._reason(error)
        if updates_in_backward or combines_ranks(self._step.wrappers):
            self._run_eagerly(why)
            return
        failed_stage = "captured" if isinstance(error, TraceError) else "compiled"
        log.warning("compiled: split into loss and update, since the whole step cannot be %s: %s", failed_stage, why)
        self._lowering, self._run, self._why = "split", self._split(), why

    def _reason(self, error: TraceError | CompilerError) -> str:
        """Return why the step falls back to another lowering; raise the error itself if it may not."""
        if not self._may_fall_back:
            cause = error.__cause__ if isinstance(error, CompilerError) and error.__cause__ else error
            raise cause
        if isinstance(error, TraceError):
            return str(error)
        lowering = "whole" if self._lowering == "auto" else self._lowering
        return f"{error} (lowering={lowering!r} raises the whole error)"


def _without_shared_memory(gradients: Gradients, state: TrainState) -> Gradients:
    """Return gradients whose buffers and slots share no memory with the state, which a donated update overwrites."""
    returned = gradients.buffers, gradients.slots, gradients.accepted_slots
    if all(map(tree.is_blank, returned)):
        return gradients
    buffers, slots, accepted_slots = copy_shared(returned, (state.buffers, state.slots))
    return replace(gradients, buffers=buffers, slots=slots, accepted_slots=accepted_slots)


def _warn_of_shared_buffers(module: nn.Module | None) -> None:
    """Log which buffers share memory: a split step does not see whether the model changes one of them in place."""
    if module is None:
        return
    for first, second in overlaps(dict(module.named_buffers())):
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


_RUN = {kind.__call__.__code__ for kind in (_Compiled, CompiledFunction)}
_COMPILE = {capture.capture.__code__, Compiler.compile.__code__}


def is_compiling(frame: FrameType | None) -> bool:
    """Return whether a frame is within a compiled step that is still being compiled, and has written nothing."""
    codes = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    # Torch compiles a loss, and later its backward pass, within a context of its own.
    compiles = not codes.isdisjoint(_COMPILE) or torch_compile.is_compiling()
    return compiles and not codes.isdisjoint(_RUN)
