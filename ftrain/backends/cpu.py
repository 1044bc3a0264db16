"""The CPU: always available, with autocast to bfloat16 and float16, and fused optimizer kernels.

On x86, matmuls in bfloat16 are native if the CPU has AVX512_BF16, and in float16 if it has AVX512_FP16; CPUs with AMX
have both. Without these instructions kernels convert to float32 and back, which is slower (17 times for a GPT on two
cores with AVX2). On ARM they are native if oneDNN computes in the dtype (not measured). They are never native without
oneDNN, or if ``ONEDNN_MAX_CPU_ISA`` disables the instructions. Source:
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html.
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from ftrain._torch import deterministic
from ftrain.backends import host_memory
from ftrain.backends.device_module import HALF_DTYPES
from ftrain.backends.generators import save_generators, seeded
from ftrain.backends.registry import Backend

INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""Names in `torch.cpu.get_capabilities` of the x86 instructions that multiply in a dtype."""

_BELOW_BF16 = "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"
ISA_LIMITS_WITHOUT = {torch.bfloat16: _BELOW_BF16, torch.float16: (*_BELOW_BF16, "AVX512_CORE_BF16")}
"""The values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN does not use those instructions."""


def _is_native(dtype: torch.dtype) -> bool:
    if not _onednn_computes_in(dtype):
        return False
    capabilities = torch.cpu.get_capabilities()
    if not str(capabilities["architecture"]).startswith("x86"):
        return True
    # On other CPUs with AVX-512, oneDNN computes in bfloat16 too, but by converting.
    isa_limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    return bool(capabilities.get(INSTRUCTIONS[dtype])) and isa_limit.upper() not in ISA_LIMITS_WITHOUT[dtype]


def _onednn_computes_in(dtype: torch.dtype) -> bool:
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return False
    kernels = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(kernels._is_mkldnn_bf16_supported())
    return bool(kernels._is_mkldnn_fp16_supported())


BACKEND = Backend(
    name="cpu",
    available=lambda: True,
    describe=lambda: f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
    autocast_dtypes=lambda: HALF_DTYPES,
    emulated_dtypes=lambda: tuple(dtype for dtype in HALF_DTYPES if not _is_native(dtype)),
    seeded=seeded,
    generators=save_generators,
    deterministic=deterministic,
    synchronize=lambda: None,
    memory=host_memory.memory,
    free=host_memory.free,
    distributed="gloo",
    reduce_scatter=False,
    fused_optimizers=True,
    fused_found_inf=True,
    immediate=True,
)
