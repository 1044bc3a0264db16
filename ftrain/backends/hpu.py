"""Intel Gaudi, by `habana_frameworks.torch`, which adds `torch.hpu`.

From its support matrix (https://docs.habana.ai/en/latest/PyTorch/Reference/PyTorch_Support_Matrix.html): no float64;
``hpu_backend`` compiles, Inductor does not; its graphs are for lazy mode only. On the first Gaudi the record has only
bfloat16. Fused kernels: https://github.com/pytorch/pytorch/pull/148666. There is no empty_cache, although memory is
pooled (https://github.com/HabanaAI/gaudi-pytorch-bridge).

In lazy mode (``PT_HPU_LAZY_MODE=1``, no longer the default) operations are collected until `mark_step`
(https://docs.habana.ai/en/latest/PyTorch/Reference/mark_step.html), here at the end of every step.

Source: https://docs.habana.ai/en/latest/PyTorch/Reference/Python_Packages.html. Not run on hardware.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager

import torch

from ftrain.backends.device_module import HALF_DTYPES, DeviceModule
from ftrain.backends.generators import Generator, seeded_then_launched

FIRST_GENERATION = "GAUDI"


class _Gaudi(DeviceModule):
    @property
    def generator(self) -> Generator:
        functions = self.module.random
        return Generator(functions.get_rng_state, functions.set_rng_state, functions.manual_seed)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        return seeded_then_launched(_mark_step, seed, self.generator)

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,) if self.module.get_device_name() == FIRST_GENERATION else HALF_DTYPES


def _mark_step() -> None:
    if os.environ.get("PT_HPU_LAZY_MODE") == "1":
        importlib.import_module("habana_frameworks.torch.core").mark_step()


DEVICE = _Gaudi("hpu")

BACKEND = DEVICE.record(
    platform="Intel Gaudi",
    package="habana_frameworks.torch",
    install="Intel's image or installer, https://docs.habana.ai/en/latest/Installation_Guide/index.html",
    distributed="hccl",
    empty_cache=None,
    caches_memory=True,
    compile_backend="hpu_backend",
    fused_optimizers=True,
    float64=False,
)
