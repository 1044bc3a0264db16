"""Activation checkpointing: run a function again in the backward pass instead of saving its activations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

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

NO_HOOKS = "support saved tensor hooks"
"""Part of torch's error for hooks within a transform that takes a gradient."""

CHANGED = (
    "was changed in place before the block was recomputed; use the operation that is not in place (x = x.add(1) "
    "and not x.add_(1))"
)

_Metadata: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


def recomputed(
    first: Run, again: Run, args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device = tree.HOST
) -> Any:
    """Return ``first(*args, **kwargs)``; autograd saves only the tensors among the arguments, which may be trees.

    When a gradient first needs another tensor that autograd would have saved, `again` runs on the same arguments, under
    the default device and the autocast (of `device` and the host) of the first run, until it has saved all of them. It
    must compute the same to the bit. Changes that the first run makes to containers among the arguments are undone.
    This does what `torch.utils.checkpoint` does with ``use_reentrant=False``, with a fifth less overhead on the host,
    and detects more cases in which gradients would be wrong.

    Raises a LossError when the function takes a gradient by `torch.func`; and in the backward pass, when a tensor among
    the arguments, or one that would have been saved, was changed in place, or when the second run saves fewer tensors,
    or one of another shape, dtype or device.
    """
    if not torch.is_grad_enabled():
        return first(*args, **kwargs)
    run = _Recomputed(again, (args, kwargs), device)
    try:
        with saved_tensors_hooks(run.pack, run.unpack):
            return first(*args, **kwargs)
    except RuntimeError as error:
        if NO_HOOKS not in str(error):
            raise
        raise LossError(
            "remat: a block takes a gradient by torch.func (grad, vjp, jacrev, hessian), and cannot be recomputed; use "
            "torch.autograd.grad(..., create_graph=True) in it, or leave it out of blocks="
        ) from error


class _Placeholder:
    """Stands for a saved tensor in the graph of autograd until it is recomputed."""

    __slots__ = ("__weakref__", "metadata", "tensor", "version")

    def __init__(self, metadata: _Metadata) -> None:
        self.metadata, self.version = metadata, 0
        self.tensor: Tensor | None = None


class _Stopped(BaseException):
    """Ends the second run. A BaseException, so that a function that catches errors does not catch it."""


class _Recomputed:
    """One run of a function, whose saved tensors are recomputed when its gradient needs them."""

    def __init__(self, again: Run, arguments: PyTree, device: torch.device) -> None:
        leaves, self._spec = tree.flatten(arguments)
        # A tensor that occurs twice stays one tensor: functions ask whether `query is key`.
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        self._again, self._ambient = again, _ambient({device.type, tree.HOST.type})
        self._leaves = [_Argument(id(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensor_ids = list(tensors)
        # A node needs an input that requires a gradient, and exists as long as its output.
        self._saved: Tensor = _Saved.apply(torch.empty(0, requires_grad=True), *tensors.values())  # type: ignore[no-untyped-call]
        self.is_recomputing = torch_ops.is_recomputing()
        # Weak: the graph frees a placeholder that it no longer needs.
        self._placeholders: list[weakref.ref[_Placeholder]] = []

    def pack(self, tensor: Tensor) -> _Placeholder:
        """Return a placeholder for a tensor to save."""
        placeholder = _Placeholder(_metadata(tensor))
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def unpack(self, placeholder: _Placeholder) -> Tensor:
        """Return the tensor of a placeholder; the first call recomputes all of them."""
        while placeholder.tensor is None:
            self._recompute()
        tensor, placeholder.tensor = placeholder.tensor, None
        if _torch.version_of(tensor) != placeholder.version:
            raise LossError(f"remat: a tensor that a block needs for its gradient {CHANGED}")
        return tensor

    def _recompute(self) -> None:
        """Run the function again until it has saved as many tensors as the first run, and fill the placeholders."""
        needed = len(self._placeholders)
        saved = 0
        difference = ""
        last_constant: _Metadata | None = None
        args, kwargs = self._arguments()

        def save(tensor: Tensor) -> Tensor:
            nonlocal saved, difference, last_constant
            if saved == needed:
                raise _Stopped
            # RReLU fills its noise, of the shape of its input, after autograd has saved both: do not stop before that.
            may_be_unfilled = last_constant == _metadata(tensor)
            last_constant = None if tensor.requires_grad else _metadata(tensor)
            if tensor.requires_grad:
                tensor = tensor.detach()
            placeholder = self._placeholders[saved]()
            saved += 1
            if placeholder is not None:
                if placeholder.metadata != _metadata(tensor):
                    difference = f"{_describe(_metadata(tensor))} in place of {_describe(placeholder.metadata)}"
                    raise _Stopped
                placeholder.tensor, placeholder.version = tensor, _torch.version_of(tensor)
            if saved == needed and not may_be_unfilled:
                raise _Stopped
            return tensor

        try:
            with saved_tensors_hooks(save, lambda tensor: tensor), torch.enable_grad(), _under(self._ambient):
                self._again(*args, **kwargs)
        except _Stopped:
            pass
        if difference or saved < needed:
            difference = difference or f"{saved} in place of {needed}"
            raise LossError(
                "remat: a block that was recomputed needed other tensors for its gradient than in its first run, "
                f"{difference}: it must compute the same each time. Look for a cache that it has filled in between "
                "(of keys and values: use_cache=False), a counter, and a context that was entered around the forward "
                "pass alone"
            )

    def _arguments(self) -> Any:
        """Return the arguments of the first run. Raises a LossError when one of their tensors has been written."""
        node: Any = self._saved.grad_fn
        try:
            tensors = dict(zip(self._tensor_ids, map(_detached, node.saved_tensors[1:]), strict=True))
        except RuntimeError as error:
            if WRITTEN not in str(error):
                raise
            raise LossError(f"remat: a tensor among the arguments of a block {CHANGED}") from error
        leaves = [tensors[leaf.tensor_id] if isinstance(leaf, _Argument) else leaf for leaf in self._leaves]
        return tree.unflatten(self._spec, leaves)


class _Argument(NamedTuple):
    """Stands for a tensor among the arguments, by the `id` that it had in the first run."""

    tensor_id: int


class _Saved(torch.autograd.Function):
    """Saves tensors for the backward pass as operations do; its output has no gradient."""

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return torch.zeros(0)


def _metadata(tensor: Tensor) -> _Metadata:
    return tensor.shape, tensor.dtype, tensor.device


def _describe(metadata: _Metadata) -> str:
    shape, dtype, device = metadata
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _detached(tensor: Tensor) -> Tensor:
    """Detach a tensor: hooks that the second run registers on it must not act on the tensor of the first run."""
    if tensor.is_leaf or _torch.is_capturing():
        return tensor
    return tensor.detach().requires_grad_()


class _Ambient(NamedTuple):
    """The default device, and the autocast settings: the type of each device, whether it is on, and its dtype."""

    device: torch.device
    caches: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]


def _ambient(device_types: Iterable[str]) -> _Ambient:
    """Return the current settings for devices of these types."""
    casts = tuple(
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in device_types
        if torch.amp.is_autocast_available(device_type)
    )
    return _Ambient(torch.get_default_device(), torch.is_autocast_cache_enabled(), casts)


@contextmanager
def _under(ambient: _Ambient) -> Iterator[None]:
    """Context with these settings, which enters only those that differ from the current ones."""
    current = _ambient(device_type for device_type, *_ in ambient.casts)
    with ExitStack() as stack:
        if ambient.device != current.device:
            stack.enter_context(ambient.device)
        for device_type, is_on, dtype in ambient.casts if ambient != current else ():
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=is_on, cache_enabled=ambient.caches))
        yield
