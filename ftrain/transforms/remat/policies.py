"""What a rematerialised block keeps for its backward pass, operation by operation."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import OptionError
from ftrain.random.torch_ops import is_draw
from ftrain.step.recording import is_aside
from ftrain.types import PyTree

Keeps: TypeAlias = Callable[..., bool]
"""``(op, *args, **kwargs) -> bool``: whether to keep what this call of an operation returns, in place of calling it
again. ``op`` is a `torch._ops.OpOverload`, such as ``torch.ops.aten.mm.default``."""

Policy: TypeAlias = Literal["full", "dots", "attention", "none"] | Keeps

_aten = torch.ops.aten
ATTENTION = _torch.aten_operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""Attention in one operation: the dearest of all for long sequences, and its result is as small as its input."""

DOTS = ATTENTION | _torch.aten_operations(
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"
)
"""Products, convolutions and attention: dear to compute, and small beside what lies between them."""

FULL: Final = "full"
NONE: Final = "none"
KEPT = {"dots": DOTS, "attention": ATTENTION}
POLICIES = (FULL, *KEPT, NONE)


def require_policy(function: str, policy: Any) -> None:
    """Check for a policy: one of `POLICIES`, or a function that decides for each operation.

    Raises:
        OptionError: for another name, or for a function that cannot be called as `Keeps`.
    """
    if isinstance(policy, str) and policy in POLICIES:
        return
    choices = f"choices are {', '.join(POLICIES)}, and a function (op, *args, **kwargs) -> bool"
    if not callable(policy) or isinstance(policy, type):
        raise OptionError(f"{function}: policy is {policy!r}; {choices}")
    try:
        inspect.signature(policy).bind("op", "tensor", "tensor", "more", dim=0)
    except TypeError:
        raise OptionError(
            f"{function}: policy is {name_of(policy)}{inspect.signature(policy)}; it must take any operation and its "
            "arguments: (op, *args, **kwargs) -> bool. A function (name, module) -> policy is given as blocks="
        ) from None
    except ValueError:  # builtins
        return


def name_of(policy: Policy) -> str:
    """Return how a policy prints."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def keeps_of(policy: Policy) -> Keeps | None:
    """Return a policy as a function; None for ``"full"``, which keeps nothing."""
    if callable(policy):
        return policy
    kept = KEPT.get(policy)
    return None if kept is None else lambda op, *args, **kwargs: op in kept


class _Result(NamedTuple):
    """What an operation returned, cut off the graph, and all that sees its memory, each as it was then."""

    value: PyTree
    seen: list[tuple[Tensor, int]]

    @property
    def is_intact(self) -> bool:
        """Whether it has not been written to since."""
        return all(_torch.version_of(leaf) == version for leaf, version in self.seen)


class Kept:
    """What the operations of one run have returned, as far as they are to be kept, for one other run of the same.

    Views, casts, what writes in place and what is not differentiated are always made again, and random numbers are
    always drawn again: each costs little, and to leave one out would change what comes after it. What was written over
    since is computed again.
    """

    def __init__(self, keeps: Keeps) -> None:
        self._keeps = keeps
        # By operation, since casts are cached in one run and not in the other.
        self._results: dict[Any, list[_Result | None]] = defaultdict(list)
        self._is_reused = False

    def keeping(self) -> _torch.TorchDispatchMode:
        """Return the context of the first run."""
        return _Keeping(self._keeps, self._results, lambda: self._is_reused)

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Make the context of another run, which may begin within the first, when that takes a gradient."""
        before, self._is_reused = self._is_reused, True
        try:
            with _Reusing(self._results):
                yield
        finally:
            self._is_reused = before


class _Keeping(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what is to be kept."""

    def __init__(self, keeps: Keeps, results: dict[Any, list[_Result | None]], is_paused: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._results, self._is_paused = keeps, results, is_paused
        # By memory, which the results hold: what else sees it counts for itself who writes, as after `_unsafe_view`.
        self._seen: dict[int, list[tuple[Tensor, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if not (is_aside() or self._is_paused() or _is_made_again(func, args, kwargs)):
            wanted: Any = self._keeps(func, *args, **kwargs)
            if not isinstance(wanted, bool):
                name = name_of(self._keeps)
                raise OptionError(
                    f"remat: the policy {name} returned {tree.describe(wanted)} for {func}; needs True or False"
                )
            self._note(returned)
            self._results[func].append(self._result(returned, (args, kwargs)) if wanted else None)
        return returned

    def _note(self, returned: Any) -> None:
        """Watch what an operation returned, when it is memory that is kept, in another tensor and no view of it."""
        if self._seen:
            for leaf in _tensors(returned):
                if (seen := self._seen.get(_memory(leaf))) is not None:
                    seen.append((_cut(leaf), _torch.version_of(leaf)))

    def _result(self, returned: Any, given: PyTree) -> _Result | None:
        """What to keep of what an operation returned; nothing of memory that it was given, which costs nothing."""
        if not set(map(_memory, _tensors(returned))).isdisjoint(map(_memory, _tensors(given))):
            return None
        # Cut off: autograd attaches the graph to what is returned, which must not be kept alive.
        value = _all_cut(returned)
        seen = [(leaf, _torch.version_of(leaf)) for leaf in _tensors(value)]
        self._seen.update((_memory(leaf), seen) for leaf, _ in seen)
        return _Result(value, seen)


class _Reusing(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return what was kept, in the order of the first run, instead of computing it."""

    def __init__(self, results: dict[Any, list[_Result | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = {func: iter(found) for func, found in results.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, unless its result is there."""
        kwargs = kwargs or {}
        if func in self._results and not _is_made_again(func, args, kwargs):
            result = next(self._results[func], None)
            if result is not None and result.is_intact:
                return _all_cut(result.value)
        return func(*args, **kwargs)


def _is_made_again(func: Any, args: Any, kwargs: Any) -> bool:
    if _is_always_made_again(func) or torch.is_inference_mode_enabled() or is_draw(func, args, kwargs):
        return True
    # What depends on nothing that is differentiated may be there when the other run comes: models remember tables.
    for leaf in args:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return False
    return not any(leaf.requires_grad for leaf in _tensors((args, kwargs)))


@functools.cache
def _is_always_made_again(func: Any) -> bool:
    if not isinstance(func, _torch.OpOverload):
        return True
    return func.is_view or _torch.schema_of(func).is_mutable or func is _aten._to_copy.default


def _tensors(value: PyTree) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def _memory(leaf: Tensor) -> int:
    return _torch.storage_id(leaf) if leaf.layout == torch.strided else id(leaf)


def _all_cut(value: PyTree) -> PyTree:
    if isinstance(value, Tensor):
        return _cut(value)
    return tree.map(lambda leaf: _cut(leaf) if isinstance(leaf, Tensor) else leaf, value)


_cut = _torch.detach_counting_writes
