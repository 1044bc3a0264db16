"""Where tensors are, and what their dtypes are called."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HOST = torch.device("cpu")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without that of torch.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def device_off_host(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU; the CPU when there is none.

    Counters and keys stay on the CPU wherever the parameters are.
    """
    return next((tensor.device for tensor in tensors if tensor.device != HOST), HOST)
