"""The available devices with their records, versions and kernels, and how fast matrix products and copies are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ftrain import backends
from ftrain._version import __version__
from ftrain.backends import Backend
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.registry import CHOICE

ENOUGH = 0.005
"""Seconds that a product should take, or be of the largest size, to say something about the device."""
SMALLEST, LARGEST = 512, 8192
COPIED = 1 << 26
"""Bytes of the copy."""

EXTRAS = "progress", "plot"
"""What ftrain itself can use; the others are for tests and examples."""

WIDTH = 14
REPEATS = 5


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
        yield f"{record.name:<6} {_found(record)}{'   <- default' if record.name == default else ''}"
    for record in chosen or [record for record in map(backends.of, backends.names()) if record.present]:
        yield ""
        yield record.name
        for label, find in _FACTS.items():
            yield f"  {label:<{WIDTH}} {_told(find, record)}"


def _versions() -> Iterator[str]:
    """The versions of what ftrain needs, and of what it can use."""
    needed: dict[str, str] = {}
    for requirement in _requirements():
        name, extra = re.split(r"[^\w-]", requirement)[0], re.search(r"extra == \W(\w+)", requirement)
        version = _version(name)
        if version and (extra is None or extra[1] in EXTRAS):
            needed.setdefault(name, f"{name} {version}")
    yield f"ftrain {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(needed.values()) or f"torch {torch.__version__}"
    if os.environ.get(CHOICE):
        yield f"{CHOICE}={os.environ[CHOICE]}"


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("ftrain") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _found(record: Backend) -> str:
    """Whether the device is here, as far as is known without importing anything."""
    if record.present:
        return _told(lambda found: found.describe(), record)
    if not record.package:
        return f"{record.platform}: none on this machine"
    # The parent of a package would be imported.
    if importlib.util.find_spec(record.package.split(".")[0]) is None:
        return f"{record.platform}: {record.package} is not installed"
    return f"{record.platform}: {record.package} is installed; python -m ftrain doctor {record.name}"


def _told(find: Callable[[Backend], str], record: Backend) -> str:
    try:
        return find(record)
    except Exception as error:
        # What does not work is what one asks a doctor about.
        return f"fails: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.100}"


def _yes(true: object) -> str:
    return "yes" if true else "no"


def _memory(record: Backend) -> str:
    memory = record.memory()
    return f"{format_bytes(memory.current)} in use, {format_bytes(memory.peak)} at most"


def _dtypes(record: Backend) -> str:
    """Each dtype of autocast, and whether it is native: what is emulated is slower than float32."""
    native = record.native_dtypes
    kinds = (f"{_name(each)} ({'native' if each in native else 'emulated'})" for each in record.autocast_dtypes())
    return ", ".join(kinds) or "none"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrowest(record: Backend) -> torch.dtype:
    return next(iter(record.autocast_dtypes()), torch.float32)


def _attention(record: Backend) -> str:
    """The kernels of `scaled_dot_product_attention` that run forward and backward, in the narrow dtype."""
    dtype, able = _narrowest(record), []
    for name, kernel in SDPBackend.__members__.items():
        query = torch.zeros(1, 2, 64, 64, device=record.device, dtype=dtype, requires_grad=True)
        try:
            with warnings.catch_warnings(), sdpa_kernel(kernel):
                warnings.simplefilter("ignore")
                out = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            torch.autograd.grad(out.sum(), query)
            able.append(name.removesuffix("_ATTENTION").lower())
        except RuntimeError:
            continue
    return f"{', '.join(able) or 'none'} (in {_name(dtype)})"


def _products(record: Backend) -> str:
    """Operations a second of a square product, in float32 and in each narrow dtype."""
    rates = [f"{_name(dtype)} {_product(record, dtype)}" for dtype in (torch.float32, *record.autocast_dtypes())]
    tf32 = record.tf32()
    if tf32 is not None:
        with tf32:
            rates.insert(1, f"TF32 {_product(record, torch.float32)}")
    return ", ".join(rates)


def _product(record: Backend, dtype: torch.dtype) -> str:
    edge, seconds = SMALLEST // 2, 0.0
    while seconds < ENOUGH and edge < LARGEST:
        edge *= 2
        left = torch.ones(edge, edge, device=record.device, dtype=dtype)
        seconds = _seconds(record, left, lambda each: each @ each)
    return f"{2 * edge**3 / seconds / 1e9:,.0f} GFLOP/s"


def _copies(record: Backend) -> str:
    """Bytes a second, read and written, on the device; and from the host to it."""
    host = torch.ones(COPIED // 4)
    here, there = host.to(record.device), torch.empty(COPIED // 4, device=record.device)
    rates = [f"{2 * COPIED / _seconds(record, here, there.copy_) / 1e9:,.1f} GB/s"]
    if here.device != host.device:
        given = host.pin_memory() if record.pinned_memory else host
        rates.append(f"from the host {COPIED / _seconds(record, given, there.copy_) / 1e9:,.1f} GB/s")
    return ", ".join(rates)


def _seconds(record: Backend, tensor: torch.Tensor, work: Callable[[torch.Tensor], object]) -> float:
    """The least time of a few; waits for the device."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work(tensor)
        record.synchronize()
        times.append(time.perf_counter() - began)
    # The first one may load a library.
    return min(times[1:])


_FACTS: dict[str, Callable[[Backend], str]] = {
    "device": lambda record: record.describe(),
    "autocast": _dtypes,
    "TF32": lambda record: _yes(record.tf32() is not None),
    "float64": lambda record: _yes(record.float64),
    "float8": lambda record: _yes(record.float8()),
    "compiler": lambda record: record.compile_backend,
    "graphs": lambda record: _yes(record.recorder),
    "fused updates": lambda record: _yes(record.fused_optimizers),
    "pinned memory": lambda record: _yes(record.pinned_memory),
    "collectives": lambda record: record.distributed,
    "memory": _memory,
    "attention": _attention,
    "product": _products,
    "copy": _copies,
}
