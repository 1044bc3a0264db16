"""Tensors that are made of others, such as quantised weights: the tensors in them, and one made of other ones.

Their classes are those with ``__tensor_flatten__`` and ``__tensor_unflatten__``. Two are none here: a DTensor, which
holds a part of a tensor, and a nested tensor, whose shape says how its parts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ftrain._torch import is_wrapper_subclass
from ftrain._torch.dtensor import is_dtensor


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of which a tensor is made, such as values and scales, by name; {} for a plain one."""
    if not is_wrapper_subclass(tensor) or is_dtensor(tensor) or tensor.is_nested:
        return {}
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def context_of(tensor: Tensor) -> tuple[str, str]:
    """Return the class of a tensor that is made of others, and what it knows beside them, such as a block size."""
    wrapper: Any = tensor
    _, context = wrapper.__tensor_flatten__()
    return type(tensor).__qualname__, repr(context)


def with_parts(tensor: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor like one of `parts_of` that is made of other parts."""
    wrapper: Any = tensor
    _, context = wrapper.__tensor_flatten__()
    return type(wrapper).__tensor_unflatten__(dict(parts), context, tensor.shape, tensor.stride())  # type: ignore[no-any-return]


def map_plain(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return ``function(tensor)``, or for a tensor that is made of others, one that is made of `function` of each."""
    return of_plain_tensors(tensor, map(function, plain_tensors(tensor)))


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which a tensor is made; a plain one is its only one."""
    parts = parts_of(tensor)
    return [plain for part in parts.values() for plain in plain_tensors(part)] if parts else [tensor]


def of_plain_tensors(tensor: Tensor, plain: Iterator[Tensor]) -> Tensor:
    """Return a tensor like this one, made of the next ones of `plain`, in the order of `plain_tensors`."""
    parts = parts_of(tensor)
    if not parts:
        return next(plain)
    return with_parts(tensor, {name: of_plain_tensors(part, plain) for name, part in parts.items()})
