"""The settings of a compilation, and the functions that compile with them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain._torch import compile as torch_compile
from ftrain.backends import Recorder
from ftrain.errors import OptionError, TraceError
from ftrain.step.traffic import collectives_of
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.cuda_graph import NotReplayed, ReplayedGraph, StepRecorder
from ftrain.transforms.compile.host_constants import is_passed_as_number, move_constants, tensors_of
from ftrain.types import LossFn, LossOutput, PyTree

log = logging.getLogger("ftrain")

CACHE = "TORCHINDUCTOR_CACHE_DIR"
GRADIENT_OF_GRADIENT = (
    "compiled: the loss takes a gradient and differentiates it again (create_graph=True), which torch.compile cannot "
    "if it compiles the loss or its blocks alone; compile the whole step (lowering='whole'), or leave compiled out"
)

Compile: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Tensor], int], capture.Flat]
"""``(graph, inputs, number of inputs that are the carry) -> function``: compile a captured graph for such inputs."""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The settings of a compilation, as `compiled` describes them, and functions that compile with them."""

    backend: str | None
    options: Mapping[str, Any]
    fullgraph: bool
    dynamic: bool
    replay: bool | None
    cache_dir: Path | None
    max_graphs: int

    def compile(self, captured: torch.fx.GraphModule, inputs: Sequence[Tensor], carried: int) -> capture.Flat:
        """Compile a captured graph for the device of its inputs, with deterministic kernels.

        On another device than the host, the graph's constants are moved there, in place.
        """
        device = inputs[0].device
        backend, name, options = backends.of(device), self.backend_for(device), self.options_for(device)
        if device != tree.HOST:
            move_constants(captured, device)
        # What autocast casts is already in the graph. It would cast again what runs with autocast off.
        with self.cache(), backend.seeded(0), backend.deterministic(), _torch.without_autocast():
            run = capture.compile_graph(captured, inputs, name, options)

        # Some kernels read these settings when they run. To turn autocast off takes longer than to see that it is off.
        def run_deterministic(*tensors: Tensor) -> Sequence[Tensor]:
            with backend.deterministic():
                if not _torch.any_autocast():
                    return run(*tensors)
                with _torch.without_autocast():
                    return run(*tensors)

        return run_deterministic

    def replaying(self) -> Compile:
        """Return `compile` for the graphs of one step, which the device records and replays if it can.

        It raises an OptionError when ``replay=True`` and the device cannot replay.
        """
        recorders: dict[str, StepRecorder] = {}

        def compile(  # noqa: A001
            captured: torch.fx.GraphModule, inputs: Sequence[Tensor], carried: int
        ) -> capture.Flat:
            run, backend = self.compile(captured, inputs, carried), backends.of(inputs[0].device)
            if self.replay is False or (self.replay is None and backend.recorder is None):
                return run
            why = _why_not_recorded(captured, inputs, backend)
            if why and self.replay:
                raise OptionError(f"compiled: replay=True, and {why}")
            if why:
                log.info("compiled: runs without replay: %s", why)
                return NotReplayed(run, why)
            if backend.name not in recorders:
                recorders[backend.name] = StepRecorder(cast(Callable[[], Recorder], backend.recorder)())
            on_device = [index for index in range(carried) if inputs[index].device == inputs[0].device]
            return ReplayedGraph(run, carried, on_device, recorders[backend.name])

        return compile

    def compile_loss(self, loss: LossFn) -> LossFn:
        """Compile a loss with `torch.compile`, when it is called, with the backend of the device of its parameters.

        The returned function raises a TraceError when the loss differentiates a gradient that it has taken.
        """
        # A kind of batch may need two graphs: for microbatches of two lengths, for an evaluation in bf16.
        compiled_for = self.compile_function(loss, graphs_per_batch=2)
        is_first = True

        def compiled(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            nonlocal is_first
            device, batch = tree.device_of(params), resolved(batch)
            if is_first and torch.is_grad_enabled():
                refuse_gradient_of_gradient(lambda: loss(params, batch, rng=rng, buffers=buffers), device)
                is_first = False
            loss_fn = compiled_for(device)
            return refusing_gradient_of_gradient(lambda: loss_fn(params, batch, rng=rng, buffers=buffers))

        return compiled

    def compile_function(
        self, function: Callable[..., Any], *, graphs_per_batch: int
    ) -> Callable[[torch.device], Callable[..., Any]]:
        """Return ``device -> function``, compiled with `torch.compile` when it is called, by the backend of the device.

        `graphs_per_batch` is the largest number of graphs that one kind of batch needs.
        """
        settings: dict[str, Any] = {"dynamic": self.dynamic, "fullgraph": self.fullgraph}
        parameters = inspect.signature(torch.compile).parameters
        # Otherwise torch's limit of graphs for one function is shared by all steps that use it.
        if "isolate_recompiles" in parameters:
            settings["isolate_recompiles"] = True
        # After that many, torch runs other batches uncompiled.
        if "recompile_limit" in parameters:
            settings["recompile_limit"] = max(8, graphs_per_batch * (1 if self.dynamic else self.max_graphs))

        @functools.cache
        def compiled_for(device: torch.device) -> Callable[..., Any]:
            options = dict(self.options_for(device)) or None
            return torch.compile(function, backend=self.backend_for(device), options=options, **settings)

        return compiled_for

    def backend_for(self, device: torch.device) -> str:
        """Return the backend of the settings, or the default one of the device."""
        return self.backend or backends.of(device).compile_backend

    def options_for(self, device: torch.device) -> Mapping[str, Any]:
        """Return the options of the settings, and those that Inductor needs on this device or to be correct."""
        if self.backend_for(device) != capture.INDUCTOR:
            return self.options
        # Imported here: it registers an operation.
        from ftrain.transforms.compile import graph_passes

        # Asked for with torch.use_deterministic_algorithms. For other devices Inductor measures which code is fastest,
        # which may be another one the next time, and add in another order. On the CPU ftrain itself asks for it.
        asked = device != tree.HOST and torch.are_deterministic_algorithms_enabled()
        measures_nothing = {"deterministic": True} if asked else {}
        return {**capture.options_of_cpu(), **graph_passes.options(), **measures_nothing, **self.options}

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Context in which what `compile_loss` and `compile_function` have compiled is called."""
        with self.cache(), torch_compile.running_parts():
            yield

    @contextmanager
    def cache(self) -> Iterator[None]:
        """Context in which Inductor keeps its code in `cache_dir`."""
        outer = os.environ.get(CACHE)
        if self.cache_dir is not None:
            os.environ[CACHE] = str(self.cache_dir)
        try:
            yield
        finally:
            if outer is not None:
                os.environ[CACHE] = outer
            elif self.cache_dir is not None:
                del os.environ[CACHE]


def refuse_gradient_of_gradient(loss: Callable[[], LossOutput], device: torch.device) -> None:
    """Raises a TraceError if a loss differentiates a gradient that it has taken, with a torch that does not show it.

    It then calls the loss once, uncompiled.
    """
    if torch_compile.SHOWS_COMPILED_GRADIENTS:
        return
    with backends.of(device).seeded(0), torch.compiler.set_stance("force_eager"):
        if torch_compile.differentiates_gradient(loss):
            raise TraceError(GRADIENT_OF_GRADIENT)


def refusing_gradient_of_gradient(loss: Callable[[], LossOutput]) -> LossOutput:
    """Return the result of a compiled loss. Raises a TraceError if it differentiates a gradient that it has taken."""
    try:
        output = loss()
    except RuntimeError as error:
        if "double backward" not in str(error):
            raise
        raise TraceError(GRADIENT_OF_GRADIENT) from error
    if torch_compile.has_compiled_gradient(output[0].total):
        raise TraceError(GRADIENT_OF_GRADIENT)
    return output


def resolved(trees: PyTree) -> PyTree:
    """Return trees without tensors that are conjugated or negated by a bit, which Inductor's code ignores (2.13)."""
    return tree.map(lambda leaf: leaf.resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf, trees)


def _why_not_recorded(captured: torch.fx.GraphModule, inputs: Sequence[Tensor], backend: backends.Backend) -> str:
    """Return why a graph cannot be recorded on the device of its first input; empty if it can."""
    if backend.recorder is None:
        return f"{backend.name} cannot record and replay graphs"
    # Each rank decides by itself when to record, but all ranks must record and launch a collective together
    # (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html), and a process group cannot be
    # destroyed while a recording uses it.
    if collectives_of(captured):
        return "the ranks of a step cannot agree on when to record what they send"
    device = inputs[0].device
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(placeholders, inputs, strict=True):
        if node.users and tensor.device != device:
            return f"it reads a tensor on {tensor.device}, whose value the recording would keep; move it to {device}"
    for node in captured.graph.nodes:
        why = _why_it_waits(node, device)
        if why:
            return why
    return ""


def _why_it_waits(node: torch.fx.Node, device: torch.device) -> str:
    """Return why the host waits in an operation of a graph for a device that records; empty if it does not."""
    # Imported here: it registers operations.
    from ftrain.transforms.compile.graph_fixes import GROUPED_IN_ANY_DTYPE

    if node.target is GROUPED_IN_ANY_DTYPE:
        return "grouped_mm reads on the host where its groups end, except in bfloat16; give it tensors in bfloat16"
    results = {tensor.device for tensor in tensors_of(node)}
    if node.op != "call_function" or not results:
        return ""
    for used in node.all_input_nodes:
        others = {tensor.device for tensor in tensors_of(used)} - results
        if others and not is_passed_as_number(used, node):
            read = "/".join(sorted(map(str, others)))
            returned = "/".join(sorted(map(str, results)))
            return (
                f"{node.target} reads a tensor on {read} and returns one on {returned}, and the host would wait for "
                f"the copy; make what it reads on {device} before the step, or leave it there"
            )
    return ""
