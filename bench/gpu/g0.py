"""The speed of matrix products, which is the ceiling in the model FLOPs utilisation of later cases."""

from __future__ import annotations

import time

import torch

from bench.rows import Row, measured
from bench.settings import Settings
from ftrain.backends.device_module import float32_matmul_precision

QUESTION = "G0 matmul ceiling"
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
CALLS = 10


def run(settings: Settings) -> list[Row]:
    """Measure matrix products, and keep the medians in the settings for later cases."""
    size = 64 if settings.tiny else 8192
    rows = []
    for precision in DTYPES:
        values = _rates(settings, precision, size)
        rows.append(measured(QUESTION, f"{precision}, {size:,} cubed", "matmul", "TFLOP/s", values))
        settings.ceilings[precision] = rows[-1].median
    return rows


def ensure(settings: Settings) -> None:
    """Measure the ceilings, unless an earlier case has done so."""
    if not settings.ceilings:
        run(settings)


def _rates(settings: Settings, precision: str, size: int) -> list[float]:
    # Random numbers: products of zeros draw less power, so that a GPU runs them faster than those of a training.
    a, b = (torch.randn(size, size, device=settings.device, dtype=DTYPES[precision]) for _ in range(2))
    wait = torch.cuda.synchronize if settings.torch_device.type == "cuda" else lambda: None
    rates = []
    with float32_matmul_precision("high" if precision == "tf32" else "highest"):
        for _ in range(settings.scaled_rounds(0.3) + 1):
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                a @ b
            wait()
            rates.append(2 * size**3 * CALLS / (time.perf_counter() - start) / 1e12)
    return rates[1:]
