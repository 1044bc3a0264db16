"""Devices by name: `get("cuda")`, `of(tensor.device)`, `default()`, and `register` to add one.

Records are here for CPUs, the GPUs of NVIDIA, AMD, Intel, Apple and Moore Threads, Intel Gaudi, Huawei Ascend,
Cambricon MLU, TPUs, and, by `private_use`, for any other device that a package adds to torch. A vendor's package is
imported only when its device is asked for by name.
"""

import torch as _torch

from ftrain.backends import cpu, cuda, hpu, mlu, mps, musa, npu, rocm, xla, xpu
from ftrain.backends.privateuse1 import private_use as private_use
from ftrain.backends.registry import Backend as Backend
from ftrain.backends.registry import Copier as Copier
from ftrain.backends.registry import Memory as Memory
from ftrain.backends.registry import Recorder as Recorder
from ftrain.backends.registry import default as default
from ftrain.backends.registry import get as get
from ftrain.backends.registry import names as names
from ftrain.backends.registry import of as of
from ftrain.backends.registry import register as register
from ftrain.backends.registry import require_current as require_current
from ftrain.backends.registry import resolve as resolve
from ftrain.backends.registry import widest as widest

# The name "cuda" serves NVIDIA and AMD: a build of torch supports one of them.
for _module in (cpu, rocm if _torch.version.hip else cuda, xpu, mps, hpu, npu, mlu, musa, xla):
    register(_module.BACKEND)

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
