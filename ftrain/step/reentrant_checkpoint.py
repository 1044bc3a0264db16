"""Find tensors that are used within a re-entrant `torch.utils.checkpoint`, which hides them from autograd."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ftrain import tree

REMEDY = "use_reentrant=False (of transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), or ft.remat()"


class CheckpointInputs(TorchFunctionMode):
    """Records the ids of the tensors that are inputs of operations within a re-entrant checkpoint.

    It also records whether a tensor got other data (``x.data = y``), which a graph that is captured does not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()
        self.sets_data = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the input tensors and run the operation."""
        self.sets_data |= func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        # A re-entrant checkpoint runs without gradients first, and with them in the backward pass.
        code = CheckpointFunction.forward.__code__
        if not torch.is_grad_enabled() and any(frame.f_code is code for frame, _ in traceback.walk_stack(None)):
            self.ids.update(id(leaf) for leaf in tree.leaves((list(args), kwargs or {})) if tree.is_tensor(leaf))
        return func(*args, **(kwargs or {}))
