"""Policies of rematerialisation: which results of operations a block keeps."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain._torch import operations
from ftrain.errors import OptionError
from ftrain.random.torch_ops import is_draw
from ftrain.step.blocks import is_unrecorded
from ftrain.types import PyTree

Keeps: TypeAlias = Callable[..., bool]
"""``(op, *args, **kwargs) -> bool``: whether to keep the result of this call of an operation, instead of recomputing
it. ``op`` is a `torch._ops.OpOverload`, such as ``torch.ops.aten.mm.default``."""

Policy: TypeAlias = Literal["full", "dots", "attention", "none"] | Keeps

_aten = torch.ops.aten
ATTENTION = operations.aten_operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""Attention in one operation: the most expensive one for long sequences, with a result as small as its input."""

DOTS = ATTENTION | operations.aten_operations(
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"
)
"""Matmuls, convolutions and attention: expensive to compute, and with small results."""

FULL: Final = "full"
NONE: Final = "none"
KEPT = {"dots": DOTS, "attention": ATTENTION}
POLICIES = (FULL, *KEPT, NONE)


def require_policy(policy: Any) -> None:
    """Check that a policy is one of `POLICIES` or a function. Raises an OptionError if not."""
    is_name = isinstance(policy, str) and policy in POLICIES
    is_function = callable(policy) and not isinstance(policy, type)
    if not is_name and not is_function:
        raise OptionError(
            f"remat: policy is {policy!r}; choices are {', '.join(POLICIES)}, and a function (op, *args, **kwargs) -> "
            "bool. Blocks are given as blocks="
        )


def name_of(policy: Policy) -> str:
    """Return how a policy prints."""
    return policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)


def keeps_of(policy: Policy) -> Keeps | None:
    """Return a policy as a function; None for ``"full"``, which keeps nothing."""
    if callable(policy):
        return policy
    operations = KEPT.get(policy)
    if operations is None:
        return None
    return lambda op, *args, **kwargs: op in operations


class _Result(NamedTuple):
    """The detached result of an operation, and the tensors that share its memory, each with its version when saved."""

    value: PyTree
    aliases: list[tuple[Tensor, int]]

    @property
    def is_intact(self) -> bool:
        """Whether its memory has not been written since it was saved."""
        return all(_torch.version_of(leaf) == version for leaf, version in self.aliases)


class SavedResults(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context of the first run of a function, which saves the results that a policy keeps for a second run.

    Views, casts, in-place operations, random draws and operations that are not differentiated are always recomputed:
    without them later operations would compute something else. So is a result that was overwritten.
    """

    def __init__(self, keeps: Keeps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps = keeps
        self._is_reused = False
        # By operation, since casts are cached in one run and not in the other.
        self._results: dict[Any, list[_Result | None]] = defaultdict(list)
        # By storage, which the results keep alive. A tensor on it that is not a view, as after `_unsafe_view`, has its
        # own version counter.
        self._aliases: dict[int, list[tuple[Tensor, int]]] = {}

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Context of the second run, which may start within the first if that takes a gradient."""
        was_reused, self._is_reused = self._is_reused, True
        try:
            with _Reusing(self._results):
                yield
        finally:
            self._is_reused = was_reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if not (is_unrecorded() or self._is_reused or _is_recomputed(func, args, kwargs)):
            is_kept: Any = self._keeps(func, *args, **kwargs)
            if not isinstance(is_kept, bool):
                name = name_of(self._keeps)
                raise OptionError(
                    f"remat: the policy {name} returned {tree.describe(is_kept)} for {func}; needs True or False"
                )
            self._add_aliases(returned)
            self._results[func].append(self._result(returned, (args, kwargs)) if is_kept else None)
        return returned

    def _add_aliases(self, returned: Any) -> None:
        """Add the results of an operation that share memory with a saved result to the aliases of that result."""
        if not self._aliases:
            return
        for leaf in _tensors(returned):
            aliases = self._aliases.get(_storage(leaf))
            if aliases is not None:
                aliases.append((_torch.detach_counting_writes(leaf), _torch.version_of(leaf)))

    def _result(self, returned: Any, inputs: PyTree) -> _Result | None:
        """Return what to save; None if the operation returned memory of its inputs."""
        input_storages = {_storage(leaf) for leaf in _tensors(inputs)}
        if any(_storage(leaf) in input_storages for leaf in _tensors(returned)):
            return None
        # Detached: autograd attaches the graph to the returned tensors, and it must not be kept alive.
        value = _all_detached(returned)
        aliases = [(leaf, _torch.version_of(leaf)) for leaf in _tensors(value)]
        self._aliases.update((_storage(leaf), aliases) for leaf, _ in aliases)
        return _Result(value, aliases)


class _Reusing(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return saved results, in the order of the first run, instead of computing them."""

    def __init__(self, results: dict[Any, list[_Result | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = {func: iter(saved) for func, saved in results.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._results and not _is_recomputed(func, args, kwargs):
            result = next(self._results[func], None)
            if result is not None and result.is_intact:
                return _all_detached(result.value)
        return func(*args, **kwargs)


def _is_recomputed(func: Any, args: Any, kwargs: Any) -> bool:
    if _is_always_recomputed(func) or torch.is_inference_mode_enabled() or is_draw(func, args, kwargs):
        return True
    # Recomputed unless an input requires a gradient. A model may cache a table that it computes from constants: only
    # the first run has the operations for it, so the results of both runs would not match.
    for leaf in args:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return False
    return not any(leaf.requires_grad for leaf in _tensors((args, kwargs)))


@functools.cache
def _is_always_recomputed(func: Any) -> bool:
    if not isinstance(func, _torch.OpOverload):
        return True
    return func.is_view or operations.schema_of(func).is_mutable or func is _aten._to_copy.default


def _tensors(value: PyTree) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def _storage(leaf: Tensor) -> int:
    """Return the identity of the storage of a tensor; of a sparse one, which has several, its own."""
    return _torch.storage_id(leaf) if leaf.layout == torch.strided else id(leaf)


def _all_detached(value: PyTree) -> PyTree:
    if isinstance(value, Tensor):
        return _torch.detach_counting_writes(value)
    return tree.map(lambda leaf: _torch.detach_counting_writes(leaf) if isinstance(leaf, Tensor) else leaf, value)
