"""Runs on fake tensors: models with experts, checks of values, and interrupts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftrain._torch import FakeTensorMode, active_modes, private_names

with private_names():
    from torch.utils._python_dispatch import _push_mode

    _dispatch_fake = FakeTensorMode.dispatch
    _grouped_product = torch.ops.aten._grouped_mm.default
    _are_all_true = torch.ops.aten._is_all_true.default
    _keys = torch._C._TorchDispatchModeKey
    _INFRASTRUCTURE = _keys.FAKE, _keys.PROXY, _keys.FUNCTIONAL
    _unset_mode: Any = torch._C._unset_dispatch_mode
    _pop: Any = torch._C._pop_torch_dispatch_stack


class CaptureFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors for products of experts in every dtype, which torch has for bfloat16 alone, and checks that pass.

    The result of the check of `torch._check_tensor_all` can be read, and is True. Its other value would raise an error.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation."""
        if func is _grouped_product and args[0].dtype != torch.bfloat16:
            return grouped_product_like(*args)
        result: Any = _dispatch_fake(self, func, types, args, kwargs)
        if func is _are_all_true and result.constant is None:
            result.constant = torch.ones((), dtype=torch.bool)
        return result


def grouped_product_like(a: Tensor, b: Tensor, ends: Tensor | None = None, *rest: Any) -> Tensor:
    """Return an empty tensor like the product of each group of rows of `a` with the matrix of its expert in `b`.

    If one of both has no groups, `ends` are the ends of those of the other one (https://docs.pytorch.org/docs/stable/
    generated/torch.nn.functional.grouped_mm.html).
    """
    groups = a.shape[:-2] if b.ndim == 3 else ends.shape if ends is not None and a.ndim == 2 else ()
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


@contextmanager
def modes_restored() -> Iterator[None]:
    """Context that ends with the dispatch modes with which it began, whatever interrupts it.

    Torch enters a mode again for each operation on fake tensors. Ctrl-C within that leaves the mode on, and all tensors
    that the program makes afterwards are fake.
    """
    outer_modes = active_modes()
    try:
        yield
    finally:
        if active_modes() != outer_modes:
            for key in _INFRASTRUCTURE:
                _unset_mode(key)
            while active_modes():
                _pop()
            for mode in outer_modes:
                _push_mode(mode)
