"""The precision of float32 matrix products, for one step and not for the process."""

from __future__ import annotations

from typing import Literal

from ftrain.backends.device_module import float32_matmul_precision
from ftrain.errors import OptionError
from ftrain.step.matmul_precision import set_matmul_precision
from ftrain.step.wrapper import OnLoss, Wrapper, wrapper
from ftrain.types import Loss

CHOICES = ("highest", "high", "medium")


@wrapper
def matmul_precision(precision: Literal["highest", "high", "medium"]) -> Wrapper:
    """Compute float32 matrix products of the whole step in this precision.

    As `torch.set_float32_matmul_precision`: ``"highest"`` is float32, ``"high"`` may use TF32 (10 bits of mantissa) or
    three products in bfloat16, ``"medium"`` one in bfloat16. Where a device has none of these, all three are float32.
    The setting of the process is changed while the step runs or is compiled, and then restored: steps of different
    precision keep theirs, unless they run in several threads at once. With `with_amp("bf16")` the only float32 products
    are those outside of autocast, such as the optimizer's.

    Args:
        precision: ``"highest"``, ``"high"`` or ``"medium"``.

    Raises:
        OptionError: for another precision.
        ComposeError: beside ``with_amp("tf32")``, which sets the same.
    """
    if precision not in CHOICES:
        raise OptionError(f"matmul_precision: precision is {precision!r}; choices are {', '.join(CHOICES)}")
    text = f"matmul_precision({precision})"

    def wrap(loss: Loss) -> Loss:
        return set_matmul_precision(loss, text, lambda: float32_matmul_precision(precision))

    return Wrapper("matmul_precision", text, loss=OnLoss(wrap))
