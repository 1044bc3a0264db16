"""A step of which parts are compiled: those run as Inductor plans them, on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ftrain import tree
from ftrain.profiling.anatomy.captured import is_operation, operation_of
from ftrain.profiling.anatomy.kinds import GRADIENTS
from ftrain.profiling.anatomy.planned import About, Script
from ftrain.profiling.anatomy.timeline import Ledger, Piece, Scratch, Tracker
from ftrain.transforms.compile.plan import FORWARD, UPDATE, Boxed, Planning
from ftrain.types import Gradients, Hyper, TrainState, UpdateFn


class Beside(Tracker):  # type: ignore[no-untyped-call]
    """Writes down what runs beside the compiled parts of a step."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` run what it has compiled."""
        return True


class Rehearsal:
    """Writes down, in whatever is its `ledger` then, what plans take that run, and what the gradients are.

    Args:
        module: whose parts are named.
        mode: that the tensors are of.
        scratch: what kernels take for themselves.
    """

    began = 0
    """The first operation of the update that was last watched."""

    def __init__(self, module: nn.Module | None, mode: FakeTensorMode, scratch: Scratch) -> None:
        self.ledger, self._mode, self._scratch = Ledger(), mode, scratch
        self._names = {id(part): name for name, part in module.named_modules()} if module is not None else {}

    def watching(self, update: UpdateFn) -> UpdateFn:
        """Return an update that says what its gradients are, and when it begins."""

        def watched(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            self.ledger.mark([leaf for leaf in tree.leaves(gradients.grads) if isinstance(leaf, Tensor)], GRADIENTS)
            self.began = len(self.ledger.timeline.operations)
            return update(state, gradients, hyper, donate=donate)

        return watched

    def execute(self, graph: fx.GraphModule, phase: str, planning: Planning) -> Boxed:
        """Return what runs the plan of a graph."""
        # Before Inductor writes into the graph.
        about = self._about(graph, phase)
        constants = [*graph.parameters(), *graph.buffers()] if phase == UPDATE else []
        plan = planning()
        if plan is None:
            return lambda args: graph(*args)
        script = Script(plan, about, self._scratch)

        def run(args: list[Any]) -> Sequence[Any]:
            args[:0] = constants
            with _disable_current_modes(), self._mode, torch.no_grad():
                return script.run(args, self.ledger)[""]  # type: ignore[no-any-return]

        return run

    def _about(self, graph: fx.GraphModule, phase: str) -> About:
        nodes = list(graph.graph.nodes)
        operations = {n: operation_of(node, phase) for n, node in enumerate(nodes) if is_operation(node)}
        modules = [self._module(node) if phase == FORWARD else "" for node in nodes]

        def piece(numbers: Sequence[int]) -> Piece | None:
            return Piece(0, 0, phase, modules[numbers[-1]]) if numbers else None

        return About(phase, operations, piece)

    def _module(self, node: fx.Node) -> str:
        """The innermost part of the module that a node of its loss belongs to, by the name that it has there."""
        stack: dict[Any, Any] = node.meta.get("nn_module_stack") or {}
        known = (self._names.get(int(key)) for key in reversed(stack) if str(key).isdigit())
        return next((name for name in known if name is not None), "")
