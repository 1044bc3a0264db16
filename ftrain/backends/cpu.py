"""The CPU: always available, with autocast to bfloat16 and float16, and fused optimizer kernels.

On x86, matmuls in bfloat16 are native if the CPU has AVX512_BF16, and in float16 if it has AVX512_FP16; CPUs with AMX
have both. Without these instructions kernels convert to float32 and back: on two cores with AVX2, a GPT trained 17
times slower in bfloat16 than in float32. On ARM they are native if oneDNN computes in the dtype (Graviton 3 and later;
not measured). They are never native without oneDNN, or if ``ONEDNN_MAX_CPU_ISA`` disables the instructions.
Source: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from ftrain._torch import deterministic
from ftrain.backends.device_module import NARROW
from ftrain.backends.generators import save_generators, seeded
from ftrain.backends.registry import Backend, Memory

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

INSTRUCTIONS = {torch.bfloat16: "avx512_bf16", torch.float16: "avx512_fp16"}
"""Names in `torch.cpu.get_capabilities` of the x86 instructions that multiply in a dtype."""

_BELOW_BF16 = "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"
ISA_LIMITS_WITHOUT = {torch.bfloat16: _BELOW_BF16, torch.float16: (*_BELOW_BF16, "AVX512_CORE_BF16")}
"""The values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN does not use those instructions."""

MEMINFO, STATM, STATUS = Path("/proc/meminfo"), Path("/proc/self/statm"), Path("/proc/self/status")
CGROUP_LIMIT, CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")

LARGEST_IN_HEAP = (32 << 20) - (64 << 10)
"""Bytes of the largest tensor that glibc may allocate in its heap, with a margin for its own data."""


def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next step. It takes no memory itself.

    Otherwise glibc returns the memory of a step to the system when the step ends, and the system clears each page again
    for the next one: 1 to 4% of the time of a small step, and more if ranks communicate. glibc keeps twice the largest
    tensor that was freed, up to 32 MiB of it; one is freed here whose pages were never used. Other C libraries, and a
    process with ``MALLOC_TRIM_THRESHOLD_``, do not change. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    torch.empty(LARGEST_IN_HEAP, dtype=torch.uint8, device="cpu")


def _memory() -> Memory:
    # VmHWM, see proc_pid_status(5). The peak of getrusage(2) survives exec: on Linux it is at least that of the process
    # that started this one.
    in_status = re.search(r"^VmHWM:\s*(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    unit = 1 if sys.platform == "darwin" else 1024
    peak = int(in_status[1]) * 1024 if in_status else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    current = int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else peak
    # The kernel counts them separately, and they are read at different moments.
    return Memory(current=current, peak=max(current, peak))


def _free() -> int | None:
    """Return the memory that is available without swapping, within the limit of a container (cgroup v2)."""
    if not MEMINFO.exists():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    free = next((int(kib) * 1024 for name, kib, *_ in lines if name == "MemAvailable:"), None)
    if free is not None and CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        free = max(0, min(free, int(limit) - int(CGROUP_USED.read_text())))
    return free


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
    autocast_dtypes=lambda: NARROW,
    emulated_dtypes=lambda: tuple(dtype for dtype in NARROW if not _is_native(dtype)),
    seeded=seeded,
    generators=save_generators,
    deterministic=deterministic,
    synchronize=lambda: None,
    memory=lambda: Memory(current=0, peak=0) if resource is None else _memory(),
    free=_free,
    distributed="gloo",
    reduce_scatter=False,
    fused_optimizers=True,
    immediate=True,
)
