"""A rank that runs out of memory in a compiled graph makes the collectives that are left, so that no rank waits for it.

What it sends is of no use, and it needs no values for that: the graph says which collectives there are, and of what
shapes. All ranks then know that the results must be discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ftrain import _torch, tree
from ftrain._torch.collectives import wait
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError
from ftrain.parallel.agreement import Agreement
from ftrain.step.traffic import NAMES

Run: TypeAlias = Callable[..., Sequence[Tensor]]


class OutOfMemoryOnRankError(DeviceError):
    """Memory ran out on one rank at least, and all know it."""


def collectives_of(captured: fx.GraphModule) -> list[fx.Node]:
    """Return the collectives of a captured graph, in the order in which ranks start them."""
    return [node for node in captured.graph.nodes if _is_collective(node.target)]


def _is_collective(target: Any) -> bool:
    if not isinstance(target, _torch.OpOverload) or target.namespace != "_c10d_functional":
        return False
    # A compiler may choose the one that overwrites its input.
    return target.overloadpacket.__name__.removesuffix("_") in NAMES


class GraphStandIn:
    """Runs the compiled graphs of a step on all ranks, or on none.

    Args:
        agreement: of the ranks.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which compiled graphs are run by this object."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def run(self, run: Run, captured: fx.GraphModule, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what a compiled graph returns; the hosts of all ranks wait for each other.

        Args:
            run: the graph.
            captured: of what it was compiled.
            inputs: of the graph; they may be overwritten in part when it fails.

        Raises:
            OutOfMemoryOnRankError: on every rank, when one had no memory for it.
            DeviceError: when there is no memory for a collective either; or for a compiler that has changed which
                collectives there are, as some options of Inductor let it.
        """
        collectives, started = collectives_of(captured), _Started()
        outputs, why = None, None
        try:
            with started:
                outputs = run(*inputs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = error
        else:
            _require_all(started.count, len(collectives))
        if why is not None:
            release(why, inputs[0].device)
            for node in collectives[started.count :]:
                _join(node)
        if self._agreement.largest(int(outputs is None)) or outputs is None:
            raise OutOfMemoryOnRankError("fit: memory ran out on a rank") from why
        return outputs


_active: ContextVar[GraphStandIn | None] = ContextVar("ftrain_graph_stand_in", default=None)


def active() -> GraphStandIn | None:
    """Return what runs compiled graphs; None where they are simply called."""
    return _active.get()


class _Started(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that have been started."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # One that has no memory for its result is not started.
        self.count += _is_collective(function)
        return result


def _require_all(started: int, captured: int) -> None:
    # A replayed recording starts none from the host.
    if started not in (0, captured):
        raise DeviceError(
            f"fit: on_oom='split' needs to know the collectives of a compiled step: {captured} were captured, and the "
            f"compiler made {started} of them; leave out options of compiled() that join or remove collectives"
        )


def _join(node: fx.Node) -> None:
    """Take part in a collective of a graph, with zeros."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        value: Tensor = leaf.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    target: Any = node.target
    try:
        wait(target(*tree.map(zeros, node.args), **tree.map(zeros, node.kwargs)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            "fit: memory ran out on this rank, which has none for what it must send to the others; use ft.remat(), a "
            "higher level of ft.sharded or smaller batches"
        ) from error
