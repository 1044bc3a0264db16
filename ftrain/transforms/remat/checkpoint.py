"""Activation checkpointing: run a function again in the backward pass in place of saving its activations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ftrain import _torch, tree
from ftrain.errors import LossError
from ftrain.random import torch_ops
from ftrain.types import PyTree

Run: TypeAlias = Callable[..., Any]

WRITTEN = "modified by an inplace operation"
"""Part of torch's error for a saved tensor that was written in place."""

CHANGED = (
    "was changed in place before the block was computed again; take the operation that is not in place (x = x.add(1) "
    "and not x.add_(1))"
)

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


def recomputed(
    first: Run, again: Run, args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device = tree.HOST
) -> Any:
    """Return ``first(*args, **kwargs)``; autograd saves only the tensors among the arguments.

    When a gradient first needs what it would have kept, `again` runs on the same, under the autocast and the default
    device of the first run, until all of that is there. `torch.utils.checkpoint` does so where it is not reentrant;
    this takes the host a fifth less of what that adds to a run, and tells more of what would make gradients wrong.

    Args:
        first: the function.
        again: what does the same to the bit, whatever happened in between.
        args: its arguments; trees of tensors and of other things. Autograd looks after the tensors: an error tells
            when they were written over, and hooks for what is saved get to see them. Containers are what they were,
            whatever the first run put into them.
        kwargs: those that are named.
        device: where it computes; autocast is noted for this one and the host.

    Raises:
        LossError: in the backward pass, when a tensor among the arguments was written over, or one that would have
            been kept, or when the second run would keep other tensors than the first: of another shape, dtype or
            device, or fewer.
    """
    if not torch.is_grad_enabled():
        return first(*args, **kwargs)
    run = _Recomputed(again, (args, kwargs), device)
    with saved_tensors_hooks(run.pack, run.unpack):
        return first(*args, **kwargs)


class _Place:
    """Stands in the graph for a saved tensor."""

    __slots__ = ("__weakref__", "kind", "tensor", "version")

    def __init__(self, kind: _Kind) -> None:
        self.kind, self.version = kind, 0
        self.tensor: Tensor | None = None


class _Stopped(BaseException):
    """Ends the second run. A BaseException, so that a function that catches errors does not catch it."""


class _Recomputed:
    """One run of a function, whose saved tensors are recomputed when its gradient needs them."""

    def __init__(self, again: Run, given: PyTree, device: torch.device) -> None:
        leaves, self._spec = tree.flatten(given)
        # A tensor that occurs twice stays one tensor: functions ask whether `query is key`.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        self._again, self._then = again, _now({device.type, tree.HOST.type})
        self._leaves = [_Argument(id(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._names = list(tensors)
        # Beside one that needs a gradient, for there is no node without; the node lives as long as what it made.
        self._saved: Tensor = _Saved.apply(torch.empty(0, requires_grad=True), *tensors.values())  # type: ignore[no-untyped-call]
        self.is_recomputing = torch_ops.is_recomputing()
        # The graph no longer needs a place that has been freed.
        self._places: list[weakref.ref[_Place]] = []

    def pack(self, tensor: Tensor) -> _Place:
        """Save a place in place of a tensor."""
        place = _Place(_kind(tensor))
        self._places.append(weakref.ref(place))
        return place

    def unpack(self, place: _Place) -> Tensor:
        """Return the tensor of a place; the first call recomputes all of them."""
        while place.tensor is None:
            self._fill()
        tensor, place.tensor = place.tensor, None
        if _torch.version_of(tensor) != place.version:
            raise LossError(f"remat: a tensor that a block needs for its gradient {CHANGED}")
        return tensor

    def _fill(self) -> None:
        count, made, other = len(self._places), 0, ""
        args, kwargs = self._given()

        def keep(tensor: Tensor) -> Tensor:
            nonlocal made, other
            kept = tensor.detach() if tensor.requires_grad else tensor
            place = self._places[made]()
            made += 1
            if place is not None:
                if place.kind != _kind(kept):
                    other = f"{_text(_kind(kept))} in place of {_text(place.kind)}"
                    raise _Stopped
                place.tensor, place.version = kept, _torch.version_of(kept)
            if made == count:
                raise _Stopped
            return kept

        try:
            with saved_tensors_hooks(keep, _same), torch.enable_grad(), _under(self._then):
                self._again(*args, **kwargs)
        except _Stopped:
            pass
        if other or made < count:
            _refuse(other or f"{made} in place of {count}")

    def _given(self) -> Any:
        node: Any = self._saved.grad_fn
        try:
            tensors = dict(zip(self._names, map(_own, node.saved_tensors[1:]), strict=True))
        except RuntimeError as error:
            if WRITTEN not in str(error):
                raise
            raise LossError(f"remat: a tensor that a block was given {CHANGED}") from error
        leaves = [tensors[leaf.name] if isinstance(leaf, _Argument) else leaf for leaf in self._leaves]
        return tree.unflatten(self._spec, leaves)


class _Argument(NamedTuple):
    """A tensor among the arguments."""

    name: int


class _Saved(torch.autograd.Function):
    """Has tensors saved as operations have theirs; of what comes out there is no gradient."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return torch.zeros(0)


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _text(kind: _Kind) -> str:
    shape, dtype, device = kind
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _own(tensor: Tensor) -> Tensor:
    """Cut a tensor off its graph: a hook that the function puts on it must not be one more of the first run."""
    if tensor.is_leaf or _torch.is_capturing():
        return tensor
    return tensor.detach().requires_grad_()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _refuse(found: str) -> NoReturn:
    raise LossError(
        f"remat: a block that was computed again needed other tensors for its gradient than at first, {found}: it must "
        "do the same each time. What it has filled or counted since makes a difference (a cache of keys and values: "
        "use_cache=False), and so does a context that was entered around the forward pass alone"
    )


class _Around(NamedTuple):
    """What decides from outside what operations do: the default device, and autocast."""

    device: torch.device
    caches: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]


def _now(kinds: Iterable[str]) -> _Around:
    kinds = filter(torch.amp.is_autocast_available, kinds)
    casts = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return _Around(torch.get_default_device(), torch.is_autocast_cache_enabled(), casts)


def _under(then: _Around) -> AbstractContextManager[None]:
    now = _now(kind for kind, *_ in then.casts)
    return nullcontext() if now == then else _changed(then, now)


@contextmanager
def _changed(then: _Around, now: _Around) -> Iterator[None]:
    with ExitStack() as stack:
        if then.device != now.device:
            stack.enter_context(then.device)
        for kind, is_on, dtype in then.casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=then.caches))
        yield
