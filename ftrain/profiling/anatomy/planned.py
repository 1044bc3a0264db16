"""What a graph takes as Inductor runs it: its plan, line by line, on tensors without memory."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import tree
from ftrain.errors import TraceError
from ftrain.profiling.anatomy.kinds import TEMPORARIES
from ftrain.profiling.anatomy.timeline import Ledger, Operation, Piece, Scratch
from ftrain.step.flops import ELEMENTWISE
from ftrain.transforms.compile.plan import Plan

MAKER = "async_compile"
"""In the code of Inductor, who compiles kernels."""

TAKES = "empty_strided", "reinterpret_tensor", "assert_", "alloc_from_pool"
"""How the names of functions begin that compute nothing."""


@dataclass(frozen=True)
class About:
    """What is known of the nodes of a graph.

    Args:
        phase: of the step, in which the graph runs.
        operations: number of a node -> its operation, if it is one.
        piece: ``numbers of nodes -> piece``: for what memory is that these nodes are computed into; None where that is
            not known.
    """

    phase: str
    operations: Mapping[int, Operation]
    piece: Callable[[Sequence[int]], Piece | None]


class Script:
    """Runs a plan, in which kernels do nothing, and writes down what it takes.

    Args:
        plan: of a graph.
        about: what is known of the graph.
        scratch: what kernels take for themselves.
    """

    def __init__(self, plan: Plan, about: About, scratch: Scratch) -> None:
        self._plan, self._about, self._module = plan, about, ast.parse(plan.source)
        self._scratch = scratch
        self._known = self._prelude()

    def run(self, args: list[Any], ledger: Ledger) -> dict[str, Any]:
        """Run it on tensors without memory, and return what the graph returns: by its names, and all of it as "".

        Args:
            args: the inputs of the graph, which are taken from this list.
            ledger: where it is written down.
        """
        names, waiting = {**self._known, "args": args}, sorted(self._about.operations)
        for line in self._lines():
            statement, *rest = line
            if isinstance(statement, ast.Return):
                returned = {name: names[name] for name in _names(statement) if name in self._plan.origins}
                returned[""] = _value(statement, names)
                break
            with _Called() as called:
                _run(statement, names)
            if isinstance(statement, ast.Assign) and isinstance(name := statement.targets[0], ast.Name):
                # With the name of before taken away in the same line, memory is used again.
                self._take(ledger, name.id, names[name.id], renew=bool(rest))
            size = max((self._scratch(name, args) for name, args in called.found), default=0)
            ledger.timeline.brief(size, self._about.phase, kind=TEMPORARIES)
            if _computes(statement):
                found = {number for name in _names(statement) for number in self._plan.origins.get(name, ())}
                waiting = self._compute(ledger, waiting, found, self._about.phase)
            for each in rest:
                _run(each, names)
        # What writes into inputs is not in the code by the name of what it computes.
        self._compute(ledger, waiting, waiting, "")
        return returned

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
        if not taking:
            raise TraceError(
                f"anatomy: in torch {torch.__version__}, the code that Inductor writes takes memory by another name "
                "than empty_strided, and cannot be read; pass fuse=False"
            )
        return {**names, **taking, "reinterpret_tensor": _view, "assert_size_stride": _nothing}

    def _lines(self) -> Iterator[list[ast.stmt]]:
        """Statements of the code that runs, a line of it together."""
        call = next(n for n in ast.walk(self._module) if isinstance(n, ast.FunctionDef) and n.name == "call")
        for _, line in itertools.groupby(call.body, key=lambda statement: statement.lineno):
            yield list(line)

    def _take(self, ledger: Ledger, name: str, made: Any, *, renew: bool) -> None:
        """Write down what is in a buffer now: what the last node that is computed into it makes."""
        known = self._about.piece(self._plan.origins.get(name, ())) or Piece(0, 0, self._about.phase, "", TEMPORARIES)
        for tensor in tree.leaves(made):
            if isinstance(tensor, Tensor):
                (ledger.renew if renew else ledger.take)(tensor, known.kind, known.phase, known.module)

    def _compute(self, ledger: Ledger, waiting: list[int], numbers: Container[int], phase: str) -> list[int]:
        """Write down the operations of a kernel, which is something in a phase, and return what waits still."""
        found = [self._about.operations[number] for number in waiting if number in numbers]
        ledger.timeline.operations += found or [Operation(ELEMENTWISE, phase, 0)] * bool(phase)
        return [number for number in waiting if number not in numbers]


class _Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations are called, and with what."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


def _run(statement: ast.stmt, names: dict[str, Any]) -> None:
    exec(compile(ast.Module([statement], []), "<plan>", "exec"), names)


def _value(statement: ast.Return, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(statement.value or ast.Tuple([], ast.Load())), "<plan>", "eval"), names)


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
