"""`python -m ftrain doctor`: devices, versions, kernels, and the speed of matmuls and copies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ftrain import backends
from ftrain._version import __version__
from ftrain.backends import Backend
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.registry import DEFAULT_VARIABLE
from ftrain.profiling import rates
from ftrain.tree import dtype_name

COPY_BYTES = 1 << 26
NO_COLLECTIVES = "none: torch was built without torch.distributed"
PACKAGES = "torch", "optree", "safetensors", "numpy", "rich", "matplotlib"
"""Packages that ftrain requires, or uses if they are installed."""

WIDTH = 14


def report(names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the report; the measurements take a few seconds per device.

    `names` are the devices to report, whose packages are imported. Default: all devices that are available without
    importing a vendor's package. Raises a DeviceError for a device that is not available; the message lists the
    available ones, or says what to install.
    """
    chosen = [backends.get(name) for name in names]
    yield from _versions()
    default = backends.default().name
    yield ""
    for record in map(backends.of, backends.names()):
        yield f"{record.name:<6} {_status(record)}{'   <- default' if record.name == default else ''}"
    for record in chosen or [record for record in map(backends.of, backends.names()) if record.present]:
        yield ""
        yield record.name
        for label, measure in _FACTS.items():
            yield f"  {label:<{WIDTH}} {_try(measure, record)}"


def _versions() -> Iterator[str]:
    versions = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            version = torch.__version__ if package == "torch" else importlib.metadata.version(package)
            versions.append(f"{package} {version}")
    yield f"ftrain {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(versions)
    if os.environ.get(DEFAULT_VARIABLE):
        yield f"{DEFAULT_VARIABLE}={os.environ[DEFAULT_VARIABLE]}"


def _status(record: Backend) -> str:
    if record.present:
        return _try(lambda record: record.describe(), record)
    if not record.package:
        return f"{record.platform}: none on this machine"
    # Only the first part of the name: `find_spec` imports the parents of a package.
    if importlib.util.find_spec(record.package.split(".")[0]) is None:
        return f"{record.platform}: {record.package} is not installed"
    return f"{record.platform}: {record.package} is installed; python -m ftrain doctor {record.name}"


def _try(measure: Callable[[Backend], str], record: Backend) -> str:
    try:
        return measure(record)
    except Exception as error:  # Of any kind: the report shows what fails, and continues.
        return f"fails: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.100}"


def _yes_or_no(condition: object) -> str:
    return "yes" if condition else "no"


def _memory(record: Backend) -> str:
    memory = record.memory()
    return f"{format_bytes(memory.current)} in use, {format_bytes(memory.peak)} at the peak"


def _dtypes(record: Backend) -> str:
    """Return the dtypes of autocast, each with "native", or "emulated" if it is slower than float32."""
    native = record.native_dtypes
    texts = (
        f"{dtype_name(dtype)} ({'native' if dtype in native else 'emulated'})" for dtype in record.autocast_dtypes()
    )
    return ", ".join(texts) or "none"


def _attention(record: Backend) -> str:
    """Return the kernels of `scaled_dot_product_attention` that run forward and backward in an autocast dtype."""
    dtype = next(iter(record.autocast_dtypes()), torch.float32)
    kernels = []
    for name, kernel in SDPBackend.__members__.items():
        query = torch.zeros(1, 2, 64, 64, device=record.device, dtype=dtype, requires_grad=True)
        try:
            with warnings.catch_warnings(), sdpa_kernel(kernel):
                warnings.simplefilter("ignore")
                out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            torch.autograd.grad(out.sum(), query)
            kernels.append(name.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue
    return f"{', '.join(kernels) or 'none'} (in {dtype_name(dtype)})"


def _matmuls(record: Backend) -> str:
    texts = [f"{dtype_name(dtype)} {_matmul(record, dtype)}" for dtype in (torch.float32, *record.autocast_dtypes())]
    tf32 = record.tf32()
    if tf32 is not None:
        with tf32:
            texts.insert(1, f"TF32 {_matmul(record, torch.float32)}")
    return ", ".join(texts)


def _matmul(record: Backend, dtype: torch.dtype) -> str:
    return f"{rates.matmul_rate(record.device, dtype) / 1e9:,.0f} GFLOP/s"


def _copies(record: Backend) -> str:
    """Return the rate of a copy on the device, which counts reads and writes, and of a copy from the host."""
    on_host, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4, device=record.device)
    on_device = on_host.to(record.device)
    text = f"{2 * rates.copy_rate(on_device, target) / 1e9:,.1f} GB/s"
    if on_device.device == on_host.device:
        return text
    source = on_host.pin_memory() if record.pinned_memory else on_host
    return f"{text}, from the host {rates.copy_rate(source, target) / 1e9:,.1f} GB/s"


_FACTS: dict[str, Callable[[Backend], str]] = {
    "device": lambda record: record.describe(),
    "autocast": _dtypes,
    "TF32": lambda record: _yes_or_no(record.tf32() is not None),
    "float64": lambda record: _yes_or_no(record.float64),
    "float8": lambda record: _yes_or_no(record.float8()),
    "compiler": lambda record: record.compile_backend,
    "graphs": lambda record: _yes_or_no(record.recorder),
    "fused updates": lambda record: _yes_or_no(record.fused_optimizers),
    "pinned memory": lambda record: _yes_or_no(record.pinned_memory),
    "collectives": lambda record: record.distributed if torch.distributed.is_available() else NO_COLLECTIVES,
    "memory": _memory,
    "attention": _attention,
    "matmul": _matmuls,
    "copy": _copies,
}
