"""The precision of float32 matrix multiplications during one step; torch has one setting for the whole process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

from ftrain.backends.device_module import float32_matmul_precision
from ftrain.errors import ComposeError, require_choice
from ftrain.step.wrapper import OnLoss, Wrapper, extend_scope, wrapper
from ftrain.types import Loss

CHOICES = ("highest", "high", "medium")


@wrapper
def matmul_precision(precision: Literal["highest", "high", "medium"]) -> Wrapper:
    """Set the precision of float32 matrix multiplications for the whole step.

    As `torch.set_float32_matmul_precision`: ``"highest"`` is float32, ``"high"`` may use TF32 (10 bits of mantissa) or
    three bfloat16 matmuls, ``"medium"`` one bfloat16 matmul. Where a device has none of these, all three are float32.
    The setting of the process is changed while the step runs or is compiled, so steps of different precision must not
    run in several threads at once.

    Raises:
        OptionError: for another precision.
        ComposeError: together with ``with_amp("tf32")``, which changes the same setting.
    """
    require_choice("matmul_precision", "precision", precision, CHOICES)
    text = f"matmul_precision({precision})"

    def wrap(loss: Loss) -> Loss:
        return set_matmul_precision(loss, text, partial(float32_matmul_precision, precision))

    return Wrapper("matmul_precision", text, loss=OnLoss(wrap, order=2))


def set_matmul_precision(loss: Loss, text: str, context: Callable[[], AbstractContextManager[None]]) -> Loss:
    """Return a loss whose step runs within ``context()``, which sets the precision; `text` is how the wrapper prints.

    Raises a ComposeError when another wrapper of the loss sets the precision already.
    """
    if loss.matmul_precision:
        raise ComposeError(
            f"{text}: {loss.matmul_precision} sets the precision of float32 matmuls already; leave out one of the "
            f"two:\n{loss.text}"
        )
    scope = extend_scope(loss, lambda training: context())
    return dataclasses.replace(loss, scope=scope, wrapper_texts=(*loss.wrapper_texts, text), matmul_precision=text)
