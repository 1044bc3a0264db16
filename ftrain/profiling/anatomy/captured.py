"""The timeline of a step that is one graph: what each of its nodes takes, until the last that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftrain import tree
from ftrain.profiling.anatomy.timeline import Operation, Piece, Scratch, Timeline, Tracker, phase_now
from ftrain.step.flops import flops, group_of, is_view
from ftrain.transforms.compile.lowered import storages
from ftrain.transforms.compile.plan import FORWARD, UPDATE
from ftrain.types import PyTree

PHASE, MODULE = "ftrain_phase", "ftrain_module"


class Noting(Tracker):  # type: ignore[no-untyped-call]
    """Writes into the nodes of a graph that is being captured in which phase and module they are."""

    operations = 0
    """So far, of those that are no views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note what was recorded for it."""
        returned = func(*args, **(kwargs or {}))
        for node in self.unnoted():
            node.meta[PHASE], node.meta[MODULE] = phase_now(), self.running.name
            self.operations += is_operation(node)
        return returned

    def unnoted(self) -> Iterator[fx.Node]:
        """Yield the nodes that were recorded since the last operation, the newest first."""
        mode: Any = get_proxy_mode()
        for node in reversed(mode.tracer.graph.nodes if mode is not None else ()):
            if PHASE in node.meta or node.op == "placeholder":
                return
            yield node


class Label:
    """What an input is for; a leaf of trees."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def labelled(node: PyTree, kind: str) -> PyTree:
    """Return a tree with labels in the place of its tensors."""
    return tree.map(lambda leaf: Label(kind) if isinstance(leaf, Tensor) else leaf, node)


@dataclass
class Serial:
    """What a captured graph takes when its operations run one by one.

    Args:
        graph: it.
        timeline: its pieces and operations.
        pieces: storage of the graph -> its piece.
        operations: node of the graph -> its operation, if it is one.
    """

    graph: fx.GraphModule
    timeline: Timeline = field(default_factory=Timeline)
    pieces: dict[int, Piece] = field(default_factory=dict)
    operations: dict[fx.Node, Operation] = field(default_factory=dict)


def serial(captured: fx.GraphModule, inputs: PyTree, marked: Mapping[int, str], rest: str, scratch: Scratch) -> Serial:
    """Return what a captured graph takes, from each node until the last that reads what it makes.

    Args:
        captured: by a function that ran under `Noting`.
        inputs: labels of its inputs, in order; those beyond are not there before the step.
        marked: identity of a storage -> what it is for.
        rest: what is left of the step when it is done.
        scratch: what kernels take for themselves.
    """
    found, nodes = Serial(captured), list(captured.graph.nodes)
    timeline, pieces, last = found.timeline, found.pieces, _last_uses(nodes)
    labels = iter(leaf.kind for leaf in tree.leaves(inputs) if isinstance(leaf, Label))
    ends: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        kind, phase = "", node.meta.get(PHASE, UPDATE)
        if node.op == "placeholder":
            kind = next(labels, "")
            phase = "" if kind else FORWARD
        for key, size in storages(node):
            if key not in pieces:
                # What looks at a constant takes nothing.
                taken = size if node.op == "placeholder" or is_operation(node) else 0
                made = Piece(taken, len(timeline.operations), phase, node.meta.get(MODULE, ""), kind)
                made.kind, made.source = kind or marked.get(key, ""), _source(node, pieces)
                pieces[key] = made
                timeline.pieces.append(made)
            if last[key] < len(nodes) - 1 and pieces[key].phase:
                ends.setdefault(last[key], []).append(key)
            elif pieces[key].phase == UPDATE and not pieces[key].kind:
                pieces[key].kind = rest
        if is_operation(node):
            found.operations[node] = operation_of(node, phase)
            timeline.brief(scratch(*_called(node)[:2]), phase, node.meta.get(MODULE, ""))
            timeline.operations.append(found.operations[node])
        for key in ends.pop(index, ()):
            pieces[key].died = len(timeline.operations)
    return found


def is_operation(node: fx.Node) -> bool:
    """Whether a node computes something, rather than look at what is there."""
    return node.op == "call_function" and hasattr(node.target, "overloadpacket") and not is_view(node.target)


def _last_uses(nodes: list[fx.Node]) -> dict[int, int]:
    """The last node that reads a storage, or a view of it."""
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last |= {key: index for key, _ in storages(used)}
    return last


def operation_of(node: fx.Node, phase: str) -> Operation:
    """Return the operation that a node of a graph is."""
    name, args, kwargs = _called(node)
    return Operation(group_of(name), phase, flops(node.target, name, args, kwargs, node.meta.get("val")))


def _called(node: fx.Node) -> tuple[str, Any, Any]:
    """What a node calls, and with which values."""
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda used: used.meta.get("val"))
    return target.overloadpacket.__name__, args, kwargs


def _source(node: fx.Node, pieces: Mapping[int, Piece]) -> Piece | None:
    """Of which piece a node makes a copy in another dtype, if it does."""
    if "_to_copy" not in str(node.target) or not node.all_input_nodes:
        return None
    return next((pieces.get(key) for key, _ in storages(node.all_input_nodes[0])), None)
