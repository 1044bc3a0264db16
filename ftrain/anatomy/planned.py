"""The timeline of a step as Inductor runs it: its plan, line by line, on tensors without memory."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ftrain import tree
from ftrain.anatomy.captured import Serial
from ftrain.anatomy.kinds import NEXT, TEMPORARIES
from ftrain.anatomy.timeline import UPDATE, Ledger, Operation, Piece, Timeline
from ftrain.graph import Plan
from ftrain.lowered import storages
from ftrain.operations import ELEMENTWISE

MAKER = "async_compile"
"""In the code of Inductor, who compiles kernels."""

TAKES = "empty_strided", "reinterpret_tensor", "assert_", "alloc_from_pool"
"""How the names of functions begin that compute nothing."""


class _Planned:
    """Runs a plan, in which kernels do nothing, and writes down what it takes.

    Args:
        found: of the graph, what it takes when its operations run one by one.
        plan: of the graph.
    """

    def __init__(self, found: Serial, plan: Plan) -> None:
        self._found, self._plan = found, plan
        self._nodes, self._module = list(found.graph.graph.nodes), ast.parse(plan.source)
        self._ledger, self._inputs = Ledger(), [n.meta["val"] for n in self._nodes if n.op == "placeholder"]
        self._waiting = [number for number, node in enumerate(self._nodes) if node in found.operations]
        self._names = self._prelude()

    def run(self) -> Timeline:
        """Run it."""
        for given in self._inputs:
            known = self._found.pieces[given.untyped_storage()._cdata]
            self._ledger.take(given, known.kind, known.phase)
        # Inductor takes the constants of the graph as inputs before the others.
        self._names["args"] = [*self._found.graph.parameters(), *self._found.graph.buffers(), *self._inputs]
        for line in self._lines():
            self._line(line)
        # What writes into inputs is not in the code by the name of what it computes.
        self._compute(range(len(self._nodes)))
        return self._ledger.timeline

    def _prelude(self) -> dict[str, Any]:
        """The names that the code knows, of which kernels do nothing."""
        names: dict[str, Any] = dict(self._plan.constants)
        for statement in self._module.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                break
            if not _mentions(statement, MAKER):
                _run(statement, names)
            elif isinstance(statement, ast.Assign):
                names |= {target.id: _nothing for target in statement.targets if isinstance(target, ast.Name)}
        taking = {name: _take for name in names if name.startswith("empty_strided")}
        return {**names, **taking, "reinterpret_tensor": _view, "assert_size_stride": _nothing}

    def _lines(self) -> Iterator[list[ast.stmt]]:
        """Statements of the code that runs, a line of it together."""
        call = next(n for n in ast.walk(self._module) if isinstance(n, ast.FunctionDef) and n.name == "call")
        for _, line in itertools.groupby(call.body, key=lambda statement: statement.lineno):
            yield list(line)

    def _line(self, line: list[ast.stmt]) -> None:
        statement, *rest = line
        if isinstance(statement, ast.Return):
            self._keep(statement)
            return
        _run(statement, self._names)
        if isinstance(statement, ast.Assign) and isinstance(name := statement.targets[0], ast.Name):
            # With the name of before taken away in the same line, memory is used again.
            self._take(name.id, renew=bool(rest))
        if _computes(statement):
            self._compute({number for name in _names(statement) for number in self._plan.origins.get(name, ())})
        for each in rest:
            _run(each, self._names)

    def _take(self, name: str, *, renew: bool) -> None:
        """Write down what is in a buffer now."""
        known = self._known(name)
        for tensor in tree.leaves(self._names[name]):
            if isinstance(tensor, Tensor):
                (self._ledger.renew if renew else self._ledger.take)(tensor, known.kind, known.phase, known.module)

    def _known(self, name: str) -> Piece:
        """For what a buffer is: what the last node that is computed into it makes."""
        for number in self._plan.origins.get(name, ())[-1:]:
            for key, _ in storages(self._nodes[number]):
                # What is written into an input is made elsewhere before.
                if self._found.pieces[key].phase:
                    return self._found.pieces[key]
        return Piece(0, 0, UPDATE, "", TEMPORARIES)

    def _compute(self, numbers: Container[int]) -> None:
        """Write down the operations of a kernel."""
        done = [number for number in self._waiting if number in numbers]
        self._waiting = [number for number in self._waiting if number not in numbers]
        found = [self._found.operations[self._nodes[number]] for number in done]
        self._ledger.timeline.operations += found or [Operation(ELEMENTWISE, UPDATE, 0)]

    def _keep(self, statement: ast.stmt) -> None:
        """Say what is there when the step is done."""
        self._ledger.mark([self._names[name] for name in _names(statement) if name in self._plan.origins], NEXT)


def planned(found: Serial, plan: Plan) -> Timeline:
    """Return what a graph takes when it runs as planned; its pieces are for what they are for in `found`.

    Args:
        found: of the graph, what it takes when its operations run one by one.
        plan: of the graph.
    """
    values = (leaf for node in found.graph.graph.nodes for leaf in tree.leaves(node.meta.get("val")))
    with next(leaf.fake_mode for leaf in values if isinstance(leaf, FakeTensor)), torch.no_grad():
        return _Planned(found, plan).run()


def _run(statement: ast.stmt, names: dict[str, Any]) -> None:
    exec(compile(ast.Module([statement], []), "<plan>", "exec"), names)


def _computes(statement: ast.stmt) -> bool:
    called = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    if not isinstance(called, ast.Call) or "args" in _names(called):
        return False
    return not (isinstance(called.func, ast.Name) and called.func.id.startswith(TAKES))


def _names(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def _mentions(node: ast.AST, name: str) -> bool:
    return name in _names(node)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _take(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
