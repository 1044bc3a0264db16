"""TPUs, and the other devices that PyTorch/XLA supports, by `torch_xla`.

Operations are queued, and `torch_xla.sync` compiles and launches them, here at the end of every step. Autocast is to
bfloat16 (https://docs.pytorch.org/xla/master/perf/amp.html). The state of the generator is its seed, an integer. There
is no cache to empty (XLA keeps freed memory, https://docs.jax.dev/en/latest/gpu_memory_allocation.html), no graph to
record (each step is compiled as one) and no TF32.

Source: https://docs.pytorch.org/xla/release/r2.8/learn/api-guide.html. Not run on hardware.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ftrain.backends.generators import Generator, save_generators, seeded_then_launched
from ftrain.backends.registry import Backend, Memory


def _xla(module: str = "torch_xla") -> Any:
    return importlib.import_module(module)


def _model() -> Any:
    return _xla("torch_xla.core.xla_model")


def _generator() -> Generator:
    model = _model()
    return Generator(model.get_rng_state, model.set_rng_state, model.set_rng_state)


def _memory() -> Memory:
    info = _model().get_memory_info()
    # Not all versions report the peak.
    return Memory(current=info["bytes_used"], peak=info.get("peak_bytes_used", info["bytes_used"]))


BACKEND = Backend(
    name="xla",
    platform="TPU",
    package="torch_xla",
    install="pip install torch_xla[tpu], https://docs.pytorch.org/xla",
    available=lambda: _xla().device_count() > 0,
    describe=lambda: f"{_xla('torch_xla.runtime').device_type()} by XLA",
    autocast_dtypes=lambda: (torch.bfloat16,),
    seeded=lambda seed: seeded_then_launched(_xla().sync, seed, _generator()),
    generators=lambda: save_generators(_generator()),
    synchronize=lambda: _xla().sync(wait=True),
    memory=_memory,
    distributed="xla",
    caches_memory=True,
    compile_backend="openxla",
)
