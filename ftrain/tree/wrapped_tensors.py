"""Wrapper tensors, such as quantised weights: take them apart into their inner tensors, and put them together again.

A wrapper tensor is an instance of a subclass of Tensor with ``__tensor_flatten__`` and ``__tensor_unflatten__``. Two
such classes count as plain tensors here: a DTensor, because it holds only a part of a tensor, and a nested tensor,
because its shape is needed to read its inner tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ftrain._torch import is_wrapper_subclass
from ftrain._torch.dtensor import is_dtensor


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the inner tensors of a wrapper tensor by name, such as values and scales; {} for a plain tensor."""
    if not is_wrapper_subclass(tensor) or is_dtensor(tensor) or tensor.is_nested:
        return {}
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def context_of(tensor: Tensor) -> tuple[str, str]:
    """Return the name of the class of a wrapper tensor, and the text of its other data, such as a block size."""
    wrapper: Any = tensor
    _, context = wrapper.__tensor_flatten__()
    return type(tensor).__qualname__, repr(context)


def with_parts(tensor: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a wrapper tensor like `tensor` with other inner tensors, by the names of `parts_of`."""
    wrapper: Any = tensor
    _, context = wrapper.__tensor_flatten__()
    return type(wrapper).__tensor_unflatten__(dict(parts), context, tensor.shape, tensor.stride())  # type: ignore[no-any-return]


def map_plain(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``function(tensor)`` for a plain tensor; for a wrapper tensor, apply it to the plain tensors inside."""
    return of_plain_tensors(tensor, map(function, plain_tensors(tensor)))


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a wrapper tensor, which may be nested; ``[tensor]`` for a plain tensor."""
    parts = parts_of(tensor)
    if not parts:
        return [tensor]
    return [plain for part in parts.values() for plain in plain_tensors(part)]


def of_plain_tensors(tensor: Tensor, plain: Iterator[Tensor]) -> Tensor:
    """Return a tensor like `tensor`, with its plain tensors taken from `plain`, in the order of `plain_tensors`."""
    parts = parts_of(tensor)
    if not parts:
        return next(plain)
    return with_parts(tensor, {name: of_plain_tensors(part, plain) for name, part in parts.items()})
