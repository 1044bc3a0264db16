"""The available devices with their records, versions and kernels, and how fast matrix products and copies are."""

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
from ftrain.backends.registry import CHOICE
from ftrain.profiling import rates
from ftrain.tree import dtype_name

COPY_BYTES = 1 << 26
PACKAGES = "torch", "optree", "safetensors", "numpy", "rich", "matplotlib"
"""What ftrain needs, or uses where it is installed."""

WIDTH = 14


def report(names: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the report as they are measured, which takes a few seconds for each device.

    Args:
        names: of devices. Default: all that are available. Only for a device that is named here, the vendor's package
            is imported.

    Raises:
        DeviceError: for a device that is not available; says which are, or what to install.
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
        for label, describe in _FACTS.items():
            yield f"  {label:<{WIDTH}} {_try(describe, record)}"


def _versions() -> Iterator[str]:
    versions = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    yield f"ftrain {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(versions)
    if os.environ.get(CHOICE):
        yield f"{CHOICE}={os.environ[CHOICE]}"


def _status(record: Backend) -> str:
    """Whether the device is available, as far as is known without importing anything."""
    if record.present:
        return _try(lambda record: record.describe(), record)
    if not record.package:
        return f"{record.platform}: none on this machine"
    # The parent of a package would be imported.
    if importlib.util.find_spec(record.package.split(".")[0]) is None:
        return f"{record.platform}: {record.package} is not installed"
    return f"{record.platform}: {record.package} is installed; python -m ftrain doctor {record.name}"


def _try(describe: Callable[[Backend], str], record: Backend) -> str:
    try:
        return describe(record)
    except Exception as error:
        # The report shows what does not work, and goes on.
        return f"fails: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.100}"


def _yes_or_no(condition: object) -> str:
    return "yes" if condition else "no"


def _memory(record: Backend) -> str:
    memory = record.memory()
    return f"{format_bytes(memory.current)} in use, {format_bytes(memory.peak)} at most"


def _dtypes(record: Backend) -> str:
    """Each dtype of autocast, and whether it is native: what is emulated is slower than float32."""
    native = record.native_dtypes
    texts = (
        f"{dtype_name(dtype)} ({'native' if dtype in native else 'emulated'})" for dtype in record.autocast_dtypes()
    )
    return ", ".join(texts) or "none"


def _attention(record: Backend) -> str:
    """The kernels of `scaled_dot_product_attention` that run forward and backward, in the narrow dtype."""
    dtype, kernels = next(iter(record.autocast_dtypes()), torch.float32), []
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


def _products(record: Backend) -> str:
    """Operations a second of a square product, in float32 and in each narrow dtype."""
    texts = [f"{dtype_name(dtype)} {_product(record, dtype)}" for dtype in (torch.float32, *record.autocast_dtypes())]
    tf32 = record.tf32()
    if tf32 is not None:
        with tf32:
            texts.insert(1, f"TF32 {_product(record, torch.float32)}")
    return ", ".join(texts)


def _product(record: Backend, dtype: torch.dtype) -> str:
    return f"{rates.product_rate(record.device, dtype) / 1e9:,.0f} GFLOP/s"


def _copies(record: Backend) -> str:
    """Bytes a second, read and written, on the device; and from the host to it."""
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
    "collectives": lambda record: record.distributed,
    "memory": _memory,
    "attention": _attention,
    "product": _products,
    "copy": _copies,
}
