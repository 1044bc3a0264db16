"""The dotted name of the submodule that is running."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class Running:
    """Follows the submodules of a module as they run; the module is None for a loss without one."""

    def __init__(self, module: nn.Module | None) -> None:
        self._names = {id(part): name for name, part in module.named_modules()} if module is not None else {}
        self._stack: list[str] = []
        self.is_followed = False

    @property
    def name(self) -> str:
        """The name of the innermost submodule that is running, or ""."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context of one call of the module, in which its submodules are followed."""
        # Without those that another call was stopped in: `remat` ends a recomputation without leaving its modules.
        self._stack.clear()
        self.is_followed = True
        # Torch calls them in all threads, such as one that evaluates another module.
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
            self.is_followed = False
            entered.remove()
            left.remove()
