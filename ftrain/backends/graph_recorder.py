"""Record the work of a device as a graph that is launched with one call, as `torch.cuda.CUDAGraph` does.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ftrain.errors import DeviceError


class GraphRecorder:
    """A `Recorder` whose graphs share one memory pool: run them one after another, and copy their outputs.

    `module` is ``torch.<name>``, with streams and a `graph` like those of `torch.cuda`, which gets `options`.
    """

    def __init__(self, module: Any, name: str, options: Mapping[str, Any]) -> None:
        self._module, self._name = module, name
        self._graph_type = f"{name.upper()}Graph"
        self._options = options
        self._pool_graph: Any = None

    def __call__(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Record the work of a function; return a function that replays the work, and the outputs.

        Raises a DeviceError if the vendor's package is too old to have graphs; torch raises a RuntimeError when the
        device cannot record the work.
        """
        if not hasattr(self._module, self._graph_type):
            raise DeviceError(f"torch.{self._name} has no {self._graph_type}")
        if self._pool_graph is None:
            self._make_pool()
        graph = getattr(self._module, self._graph_type)()
        return graph.replay, self._record(graph, work)

    def _make_pool(self) -> None:
        """Make the pool, and an empty graph that keeps it alive: torch cannot record in a pool without a graph."""
        self._pool = self._module.graph_pool_handle()
        # A stream for this recorder alone: the workspace of a library belongs to a stream and to the pool in which it
        # was first used, and graphs of another recorder, which may live longer, must not use it.
        self._stream = self._module.Stream()
        graph = getattr(self._module, self._graph_type)()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Torch warns that the graph is empty.
            self._record(graph, lambda: ())
        self._pool_graph = graph

    def _record(self, graph: Any, work: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        previous = self._module.current_stream()
        try:
            with self._module.graph(graph, pool=self._pool, stream=self._stream, **self._options):
                return work()
        except BaseException:
            # If a recording cannot start or end, torch does not leave the stream of the recording.
            self._module.set_stream(previous)
            raise
