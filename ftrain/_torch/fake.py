"""Additions to torch's fake tensors for captures: products of experts, checks of values, and safe interrupts."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ftrain._torch import FakeTensorMode, active_modes, private_names

with private_names():
    from torch._ops import HigherOrderOperator
    from torch.utils._python_dispatch import _push_mode

    _dispatch_fake = FakeTensorMode.dispatch
    _grouped_product = torch.ops.aten._grouped_mm.default
    _are_all_true = torch.ops.aten._is_all_true.default
    _keys = torch._C._TorchDispatchModeKey
    _INFRASTRUCTURE = _keys.FAKE, _keys.PROXY, _keys.FUNCTIONAL
    _unset_mode: Any = torch._C._unset_dispatch_mode
    _pop: Any = torch._C._pop_torch_dispatch_stack
    _lifts_on_cpu, _set_lifts_on_cpu = torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors

MOST_WAITING = 2
"""The number of equal signals that wait in `uninterrupted`. The next one acts at once, so that a hang can be ended."""


class CaptureFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors for products of experts in every dtype, which torch has for bfloat16 alone, and checks that pass.

    The result of the check of `torch._check_tensor_all` can be read, and is True. Its other value would raise an error.
    """

    # Torch finds the rule of `torch.cond`, say, by the class of the mode, which must be its own, or asks `dispatch`.
    supports_higher_order_operators = True

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operation."""
        if isinstance(func, HigherOrderOperator):
            rule: Any = func.python_key_table.get(FakeTensorMode)
            return NotImplemented if rule is None else rule(self, *args, **(kwargs or {}))
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
    groups: tuple[int, ...] = ()
    if b.ndim == 3:
        groups = a.shape[:-2]
    elif ends is not None and a.ndim == 2:
        groups = ends.shape
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


class uninterrupted:  # noqa: N801
    """Context in which signals with a Python handler, such as Ctrl-C, are handled at its end; a third one at once.

    Torch enters a mode again for each operation on fake tensors. An error that a signal raises within that may leave
    the mode on, so that all tensors that the program makes afterwards are fake, or end the process: it comes through
    C++ that expects none (2.13). After a third signal, the modes are restored if the process lives on. Does nothing
    outside the main thread, where no signal is handled.
    """

    # Not a generator: contextlib writes to the errors that pass through one, which frozen dataclasses refuse.
    def __enter__(self) -> None:
        self._modes, self._lifts = active_modes(), _lifts_on_cpu()
        self._received: list[int] = []
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {int(number): signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
        self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in self._handlers:
            signal.signal(number, self._receive)

    def __exit__(self, *error: object) -> None:
        if active_modes() != self._modes:
            for key in _INFRASTRUCTURE:
                _unset_mode(key)
            while active_modes():
                _pop()
            for mode in self._modes:
                _push_mode(mode)
        _set_lifts_on_cpu(self._lifts)
        self._restore_handlers()
        for number in dict.fromkeys(self._received):
            self._handlers[number](number, sys._getframe())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        if self._received.count(number) > MOST_WAITING:
            self._handlers[number](number, frame)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
