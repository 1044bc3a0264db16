"""Devices by name: `get("cuda")`, `of(tensor.device)`, `default()`, and `register` to add one.

There are records for CPUs, the GPUs of NVIDIA, AMD, Intel, Apple and Moore Threads, Intel Gaudi, Huawei Ascend,
Cambricon MLU and TPUs; `private_use` makes one for any other device that a package adds to torch. A vendor's package is
imported only when its device is requested by name.
"""

import torch as _torch

from ftrain.backends import cpu, cuda, host_memory, hpu, mlu, mps, musa, npu, rocm, xla, xpu
from ftrain.backends.device_module import private_use
from ftrain.backends.registry import (
    Backend,
    Copier,
    Memory,
    Recorder,
    default,
    get,
    names,
    of,
    register,
    require_current,
    resolve,
    widest,
)

# The name "cuda" serves NVIDIA and AMD: a build of torch supports one of them.
for _module in (cpu, rocm if _torch.version.hip else cuda, xpu, mps, hpu, npu, mlu, musa, xla):
    register(_module.BACKEND)
host_memory.keep_freed()

__all__ = [
    "Backend",
    "Copier",
    "Memory",
    "Recorder",
    "default",
    "get",
    "names",
    "of",
    "private_use",
    "register",
    "require_current",
    "resolve",
    "widest",
]
