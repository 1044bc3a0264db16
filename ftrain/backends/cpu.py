"""The CPU: always available, with autocast to bfloat16 and float16, and fused optimizer kernels.

Matmuls in a low-precision dtype are native on x86 if the CPU has AVX512_BF16 (AVX512_FP16 for float16), as CPUs with
AMX have. Without these instructions kernels convert to float32 and back: on two cores with AVX2 a GPT trained 17 times
slower in bfloat16 than in float32. On ARM they are native if oneDNN says that it computes in the dtype (Graviton 3
and later; not measured), and never if torch is built without oneDNN. Instructions that ``ONEDNN_MAX_CPU_ISA``
disables do not count.
Source: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from ftrain._torch import deterministic
from ftrain.backends.device_module import NARROW
from ftrain.backends.generators import save_generators, seeded
from ftrain.backends.registry import Backend
from ftrain.backends.resident import resident

MEMINFO = Path("/proc/meminfo")
INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""Names in `torch.cpu.get_capabilities` of the x86 instructions that multiply in a dtype."""

_BELOW_BF16 = "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"
ISA_LIMITS_WITHOUT = {torch.bfloat16: _BELOW_BF16, torch.float16: (*_BELOW_BF16, "AVX512_CORE_BF16")}
"""The values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN does not use those instructions."""

CGROUP_LIMIT, CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def _free() -> int | None:
    """Return the memory that is available without swapping, within the limit of a container (cgroup v2)."""
    if not MEMINFO.exists():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    free = next((int(kib) * 1024 for name, kib, *_ in lines if name == "MemAvailable:"), None)
    if free is not None and CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        free = max(0, min(free, int(limit) - int(CGROUP_USED.read_text())))
    return free


def _emulated_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(dtype for dtype in NARROW if not _is_native(dtype))


def _is_native(dtype: torch.dtype) -> bool:
    if not _onednn_computes_in(dtype):
        return False
    capabilities = torch.cpu.get_capabilities()
    if not str(capabilities["architecture"]).startswith("x86"):
        return True
    # With AVX-512 alone oneDNN computes in bfloat16 too, by converting.
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
    autocast_dtypes=lambda: NARROW,
    emulated_dtypes=_emulated_dtypes,
    seeded=seeded,
    generators=save_generators,
    deterministic=deterministic,
    synchronize=lambda: None,
    memory=resident,
    free=_free,
    distributed="gloo",
    reduce_scatter=False,
    fused_optimizers=True,
    immediate=True,
)
