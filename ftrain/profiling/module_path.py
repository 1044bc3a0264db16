"""The dotted name of the submodule that is running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModule:
    """Tracks which submodule of a module is running; the module is None for a loss without one."""

    def __init__(self, module: nn.Module | None) -> None:
        self._names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
        self._stack: list[str] = []
        self.is_tracking = False

    @property
    def name(self) -> str:
        """The name of the innermost submodule that is running, or ""."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Context of one call of the module, in which its submodules are tracked."""
        # `remat` stops a recomputation before its modules return, so their names may still be on the stack.
        self._stack.clear()
        self.is_tracking = True
        # Torch calls the hooks in every thread, also in one that runs another module.
        thread = threading.get_ident()

        def enter(part: nn.Module, args: object) -> None:
            if threading.get_ident() == thread:
                self._stack.append(self._names.get(id(part), ""))

        def leave(part: nn.Module, args: object, returned: object) -> None:
            if threading.get_ident() == thread:
                self._stack.pop()

        entered = register_module_forward_pre_hook(enter)
        left = register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            self.is_tracking = False
            entered.remove()
            left.remove()
