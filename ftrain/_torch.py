"""Which versions of torch ftrain works with, and private names of torch whose loss nothing else would show."""

from __future__ import annotations

import sys
import warnings
from operator import attrgetter
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ftrain.errors import VersionError

TESTED = (2, 11), (2, 13)
"""The oldest and the newest torch that the tests run with, as (major, minor)."""


def require_version(version: str) -> None:
    """Check a version of torch; warn when it is newer than what the tests run with.

    Raises:
        VersionError: when it is too old.
    """
    oldest, newest = (".".join(map(str, tested)) for tested in TESTED)
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < TESTED[0]:
        raise VersionError(f"ftrain: torch is {version}; needs {oldest} or newer: pip install 'torch>={oldest}'")
    if found > TESTED[1]:
        warnings.warn(
            f"ftrain: torch is {version}; ftrain is tested with {oldest} to {newest}; if something fails, try {newest}",
            stacklevel=4,
        )


require_version(str(torch.__version__))

try:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils.checkpoint import _recomputation_hook
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    _ = Tensor._version, torch.UntypedStorage._cdata
    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    """The innermost pair of `saved_tensors_hooks`, or None."""
    _stop_workers = _MultiProcessingDataLoaderIter._shutdown_workers
    _constants = _recomputation_hook.__init__.__code__.co_consts
    # By name, for it is a function within a function; KeyError where it is another.
    _pack_hook = {each.co_name: each.co_qualname for each in _constants if isinstance(each, CodeType)}["pack_hook"]
except (ImportError, AttributeError, KeyError) as error:
    raise VersionError(
        f"ftrain: torch {torch.__version__} has changed something private that ftrain relies on ({error}); use torch "
        + " to ".join(".".join(map(str, tested)) for tested in TESTED)
    ) from error


version_of = attrgetter("_version")
"""``tensor -> int``: how often the memory of a tensor was written in place; views of one memory share it.

Raises a RuntimeError for an inference tensor, which does not count.
"""


def storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share when they are views of one memory; also for tensors without values.

    It may be used again for other memory after this one is freed: hold the tensor as long as you compare the number.
    """
    identity: int = tensor.untyped_storage()._cdata
    return identity


def is_fake(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a tensor without values, with which torch traces and predicts shapes (`FakeTensor`)."""
    return isinstance(value, FakeTensor)


def recomputes(hook: Any) -> bool:
    """Whether a hook for saved tensors is that of `torch.utils.checkpoint` while it computes something again."""
    return getattr(hook, "__qualname__", "") == _pack_hook


def stop_workers(iterator: Any) -> None:
    """Stop the processes of an iterator of a `DataLoader`, if it has any."""
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        _stop_workers(iterator)


def original(module: nn.Module) -> nn.Module:
    """What `torch.compile` was given, of what it has returned; any other module itself."""
    # Nothing can be compiled where Dynamo was never imported, which takes seconds.
    dynamo = sys.modules.get("torch._dynamo")
    return module._orig_mod if dynamo and isinstance(module, dynamo.OptimizedModule) else module
