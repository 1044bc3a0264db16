"""What a step is compiled with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftrain import backends, graph, tree
from ftrain.backends import Recorder
from ftrain.devicegraph import Replayed
from ftrain.errors import OptionError
from ftrain.traced import Carrying, Compile, Traced
from ftrain.types import LossFn, LossOutput, PyTree

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The settings of a compilation."""

    backend: str | None
    options: Mapping[str, Any]
    fullgraph: bool
    dynamic: bool
    replay: bool | None
    cache_dir: str | Path | None
    max_graphs: int

    def compile(self, captured: torch.fx.GraphModule, inputs: Sequence[Tensor], carried: int) -> graph.Flat:
        """Compile a captured graph for the device of its inputs."""
        with self.cache(), backends.of(inputs[0].device).seeded(0):
            return graph.compile_graph(captured, inputs, self.backend_for(inputs[0].device), self.options)

    def plan(self, captured: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> graph.Plan | None:
        """Let Inductor plan how it runs a captured graph, if it is who compiles it."""
        device = inputs[0].device
        if self.backend_for(device) != graph.INDUCTOR:
            return None
        with backends.of(device).seeded(0):
            return graph.plan_graph(captured, inputs, self.options)

    def replaying(self) -> Compile:
        """Return `compile` for the graphs of one step, which the device records and replays if it can.

        Raises:
            OptionError: from what it returns, when the device cannot and ``replay=True``.
        """
        recorders: dict[str, Recorder] = {}

        def compile(  # noqa: A001
            captured: torch.fx.GraphModule, inputs: Sequence[Tensor], carried: int
        ) -> graph.Flat:
            run, backend = self.compile(captured, inputs, carried), backends.of(inputs[0].device)
            if self.replay and backend.recorder is None:
                raise OptionError(f"compiled: replay=True, and {backend.name} has nothing to record and replay with")
            if self.replay is False or backend.recorder is None:
                return run
            if backend.name not in recorders:
                recorders[backend.name] = backend.recorder()
            return Replayed(run, carried, recorders[backend.name])

        return compile

    def compile_loss(self, loss: LossFn) -> LossFn:
        """Hand a loss to `torch.compile`, with the backend of the device that it is first called on."""
        settings: dict[str, Any] = {"dynamic": self.dynamic, "fullgraph": self.fullgraph}
        settings["options"] = dict(self.options) or None
        found: dict[str, LossFn] = {}

        def compiled(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            backend = self.backend_for(tree.device_of(params))
            if backend not in found:
                found[backend] = torch.compile(loss, backend=backend, **settings)
            return found[backend](params, batch, rng=rng, buffers=buffers)

        return compiled

    def backend_for(self, device: torch.device) -> str:
        """The backend that was asked for, or the one that suits the device."""
        return self.backend or backends.of(device).compile_backend

    def traced(self, function: Carrying, *, donate: bool, replay: bool = False) -> Traced:
        """Return a function of trees that is compiled with these settings."""
        return Traced(function, self.replaying() if replay else self.compile, self.max_graphs, donate=donate)

    @contextmanager
    def cache(self) -> Iterator[None]:
        """Let Inductor keep its code in `cache_dir`."""
        if self.cache_dir is None:
            yield
            return
        before = os.environ.get(CACHE)
        os.environ[CACHE] = str(Path(self.cache_dir).expanduser())
        try:
            yield
        finally:
            if before is None:
                del os.environ[CACHE]
            else:
                os.environ[CACHE] = before
