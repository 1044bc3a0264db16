"""The versions of torch that ftrain works with, and every private name of torch that it uses.

No other file names what torch does not document. A missing name raises a VersionError: at import, or at first use
if the import of its module takes seconds (Inductor).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import attrgetter
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ftrain.errors import VersionError

TESTED = (2, 11), (2, 15)
"""The oldest and the newest torch with which the tests have passed, as (major, minor)."""


def require_version(version: str) -> None:
    """Check a version of torch: warn if it is newer than the tested ones. Raises a VersionError if it is too old."""
    oldest, newest = (".".join(map(str, tested)) for tested in TESTED)
    installed = tuple(int(part) for part in version.split(".")[:2])
    if installed < TESTED[0]:
        raise VersionError(f"ftrain: torch is {version}; needs {oldest} or newer: pip install 'torch>={oldest}'")
    if installed > TESTED[1]:
        warnings.warn(
            f"ftrain: torch is {version}; ftrain is tested with {oldest} to {newest}; if something fails, try {newest}",
            stacklevel=4,
        )


@contextmanager
def private_names() -> Iterator[None]:
    """Context in which private names of torch are looked up. Raises a VersionError if one is missing."""
    try:
        yield
    except (ImportError, AttributeError, KeyError) as error:
        raise VersionError(
            f"ftrain: torch {torch.__version__} has changed something private that ftrain needs ({error}); use "
            "torch " + " to ".join(".".join(map(str, tested)) for tested in TESTED)
        ) from error


require_version(str(torch.__version__))

with private_names():
    from torch._C import DispatchKey, _are_functorch_transforms_active, _SetExcludeDispatchKeyGuard
    from torch._C._dynamo.guards import TensorGuards
    from torch._C._functorch import is_batchedtensor, is_functorch_wrapped_tensor
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
        is_traceable_wrapper_subclass,
    )
    from torch.utils.checkpoint import _recomputation_hook

    _ = Tensor._version, Tensor._base, torch.UntypedStorage._cdata
    _is_profiler_enabled = attrgetter("_is_profiler_enabled")
    _is_profiler_enabled(torch.autograd.profiler)
    _disable_profiler: Any = torch._C._autograd._disable_profiler
    _note_end_of_profiler: Any = torch.autograd.profiler._run_on_profiler_stop
    _hooks_of = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
    _hooks_of(Tensor)
    _forward_hooks_of = attrgetter("_forward_hooks", "_forward_pre_hooks")
    _forward_hooks_of(torch.nn.Module())
    _make_wrapper_subclass: Any = Tensor._make_wrapper_subclass
    _engine_run_backward: Any = torch.autograd.graph._engine_run_backward
    # The public function also imports Inductor, and turns off the choice of kernels by their speed.
    _set_deterministic = torch._C._set_deterministic_algorithms
    _fills_memory = torch._C._get_deterministic_fill_uninitialized_memory
    _set_fills_memory = torch._C._set_deterministic_fill_uninitialized_memory
    _top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _set_order: Any = torch._C._FunctionBase._set_sequence_nr  # type: ignore[attr-defined]
    _get_dispatch_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
    _disable_functions = torch._C.DisableTorchFunction
    _current_graph_task_id = torch._C._current_graph_task_id
    _current_autograd_node = torch._C._current_autograd_node
    any_autocast = torch._C._is_any_autocast_enabled
    """``() -> bool``, whether torch.autocast is on for a device of any type; takes 0.1 us."""
    without_autocast = torch._C._DisableAutocast
    """Context in which torch.autocast is off for devices of every type."""
    privateuse1_name = torch._C._get_privateuse1_backend_name
    """``() -> str``, the name of a device that a package outside torch has registered."""
    _constants = _recomputation_hook.__init__.__code__.co_consts
    # It is defined within another function, so only its code object can be read; KeyError if torch renames it.
    _pack_hook = {code.co_name: code.co_qualname for code in _constants if isinstance(code, CodeType)}["pack_hook"]


# Tensors

NEEDS_VALUES = DataDependentOutputException, DynamicOutputShapeException
"""The error of an operation on a `FakeTensor` whose result depends on the values of its inputs."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The number of in-place writes to the memory of a tensor; views of one memory share the count.

Raises a RuntimeError for an inference tensor, which has no count.
"""


def storage_id(tensor: Tensor) -> int:
    """Return a number that two tensors share when they are views of one memory; also for tensors without values.

    A sparse or nested tensor is several tensors, and has a number of its own. A number may be used again for
    other memory after this one is freed: hold the tensor as long as you compare the number.
    """
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def is_fake(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a `FakeTensor`: one without values, on which torch traces and infers shapes."""
    return isinstance(value, FakeTensor)


is_wrapper_subclass: Callable[[Tensor], bool] = is_traceable_wrapper_subclass
"""Whether a tensor is of a subclass that wraps others, as quantised weights are."""


def tensor_without_values(cls: type[Any], shape: Sequence[int], like: Tensor, *, requires_grad: bool) -> Any:
    """Return an instance of `cls`, a subclass of Tensor, without memory; dtype and device are those of `like`."""
    return _make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=requires_grad)


is_batched: Callable[[Tensor], bool] = is_batchedtensor
"""Whether a tensor has an axis that `torch.func.vmap` hides."""

is_transformed: Callable[[Tensor], bool] = is_functorch_wrapped_tensor
"""Whether a tensor is one of a `torch.func` transform (`vmap`, `grad`, `jvp`, `functionalize`)."""


in_transform: Callable[[], bool] = _are_functorch_transforms_active
"""Whether a `torch.func` transform is running."""


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return ``(*others) -> bool``: whether `others` have the shapes, strides, dtypes and devices of `tensors`.

    Torch compares in C++, in about 40 ns per tensor. The function takes as many tensors as it was made from. It also
    returns False in another context, such as `torch.inference_mode`: the caller must then compare the tensors itself.
    """
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


flatten_dense: Callable[[list[Tensor]], Tensor] = _flatten_dense_tensors
"""Return the elements of contiguous tensors of one dtype as one vector."""

unflatten_dense: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors
"""Return views of a vector in the shapes of other tensors: the inverse of `flatten_dense`."""


def foreach_rounds(tensor: Tensor) -> bool:
    """Whether ``torch._foreach_mul`` rounds a number to the dtype of the tensor: in 16 bits on a CPU (2.13)."""
    return tensor.dtype.itemsize < 4 and tensor.is_cpu


def detach_counting_writes(tensor: Tensor) -> Tensor:
    """Detach a tensor within a `TorchDispatchMode`, so that writes to the result still raise its `version_of`."""
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# Modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters, without those of its children."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module keeps its own buffers, without those of its children."""
    return module._buffers


def has_hooks(parameter: Tensor) -> bool:
    """Whether a leaf has functions of `register_hook` or `register_post_accumulate_grad_hook`."""
    return any(_hooks_of(parameter))


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module or one of its children has functions that run before or after its forward."""
    return any(any(_forward_hooks_of(part)) for part in module.modules())


def original(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` has wrapped in this one; any other module itself."""
    # Nothing is compiled if Dynamo, whose import takes seconds, was never imported. Another thread may be importing it.
    optimized = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return module._orig_mod if optimized and isinstance(module, optimized) else module


# Dispatch modes


without_modes: Callable[[], Any] = _disable_current_modes
"""Return a context in which no `TorchDispatchMode` is active, so that no operation is captured."""

without_functions: Callable[[], Any] = _disable_functions
"""Return a context in which no `TorchFunctionMode` is active, and no tensor has a `__torch_function__`."""

active_modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""Return the dispatch modes that are active, the innermost one last; in autograd's threads too."""


def is_capturing() -> bool:
    """Whether `make_fx` captures what runs as a graph."""
    return _get_dispatch_mode(_PROXY) is not None


class deterministic:  # noqa: N801
    """Context in which operations use their deterministic kernel, if they have one.

    As `torch.use_deterministic_algorithms(True, warn_only=True)`, but uninitialized memory is not filled. If that is
    already on, nothing changes. It is a setting of the process, so it holds in all threads, until the last one leaves.
    """

    _lock = threading.Lock()
    _entered = 0
    _fills: bool | None = None  # What to restore; None if it was already on.

    def __enter__(self) -> None:
        cls = deterministic
        with cls._lock:
            cls._entered += 1
            if cls._entered == 1:
                is_on = torch.are_deterministic_algorithms_enabled()
                cls._fills = None if is_on else _fills_memory()
                if not is_on:
                    _set_deterministic(True, warn_only=True)
                    _set_fills_memory(False)

    def __exit__(self, *error: object) -> None:
        cls = deterministic
        with cls._lock:
            cls._entered -= 1
            if cls._entered == 0 and cls._fills is not None:
                _set_fills_memory(cls._fills)
                _set_deterministic(False)


# Autograd


def run_backward(
    total: Tensor, cotangent: Tensor, leaves: Sequence[Tensor], *, add: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each leaf, None for one that `total` does not use.

    It calls the autograd engine directly, as `torch.autograd.grad` does after its checks. With them, a step takes 9%
    longer for a loss of one operation, and 11% for two layers of 16 units (medians of 400 paired ratios, torch 2.13).
    With `add`, gradients are added to those that the leaves have in `.grad`, and the result is empty. Without it, the
    result includes what a `torch.autograd.Function` adds to `.grad` by a backward pass of its own within this one, as
    those of reversible layers and of checkpoints of other libraries do.
    """
    if not add:
        for leaf in leaves:
            leaf.grad = None  # A loss that calls `backward` itself has set it.
    # Autograd's threads for accelerators do not see the context variables of this thread.
    with nullcontext() if total.is_cpu else torch.autograd.set_multithreading_enabled(False):
        grads: tuple[Tensor | None, ...] = _engine_run_backward(
            (total,), (cotangent,), False, False, tuple(leaves), True, accumulate_grad=add
        )
    if add:
        return ()
    for leaf in leaves:
        if leaf.grad is not None:
            return _with_inner(grads, leaves)
    return grads


def _with_inner(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Add the `.grad` of leaves to their gradients, and clear it."""
    sums: list[Tensor | None] = []
    for leaf, grad in zip(leaves, grads, strict=True):
        inner, leaf.grad = leaf.grad, None
        sums.append(grad if inner is None else inner if grad is None else grad + inner)
    return tuple(sums)


def run_when_ready(tensor: Tensor) -> None:
    """Let the backward pass run the `torch.autograd.Function` that made a tensor as soon as its gradients are complete.

    Of the nodes that are ready, autograd runs the newest first, and leaves before all others.
    """
    _set_order(tensor.grad_fn, 2**64 - 1)


def saved_tensors_pack_hook() -> Any:
    """Return the pack hook of the innermost active `saved_tensors_hooks`, or None."""
    hooks = _top_saved_tensors_hooks(True)
    return None if hooks is None else hooks[0]


def recomputes(hook: Any) -> bool:
    """Whether a pack hook is that of `torch.utils.checkpoint` during its recomputation."""
    return getattr(hook, "__qualname__", "") == _pack_hook


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which another one is a view, for autograd; the tensor itself if it is not a view."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def cast_from(tensor: Tensor) -> tuple[Any, int] | None:
    """Return the node of autograd, and the number of its output, of which a tensor is a cast; None if it is not."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source: tuple[Any, int] = node.next_functions[0]
    return source


def nodes_of(tensor: Tensor) -> Iterator[Any]:
    """Yield each node of the graph from which autograd computes the gradients of a tensor."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes.extend(following for following, _ in node.next_functions)


def in_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return _current_graph_task_id() >= 0


def backward_node() -> int:
    """Return the number of the node of the graph whose backward pass this thread computes; -1 if there is none."""
    node = _current_autograd_node()
    return -1 if node is None else node._sequence_nr()


# Profiling


def is_profiling() -> bool:
    """Whether a profiler of torch runs in any thread; a second one would end it."""
    return bool(_is_profiler_enabled(torch.autograd.profiler))


def end_profiling() -> None:
    """End torch's profiler if it runs, as it does after an interrupt during its start or end."""
    if is_profiling():
        with suppress(RuntimeError):
            _disable_profiler()
        _note_end_of_profiler()


# Tensors without values


def on_meta(tensor: Tensor) -> Tensor:
    """Return a plain tensor on the device ``meta`` with the shape, strides and dtype of a tensor or a whole DTensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def forget_value(tensor: Tensor) -> None:
    """Remove the value of a fake tensor: one made from a number has a value, and operations compute with it."""
    if getattr(tensor, "constant", None) is not None:
        tensor.constant = None  # type: ignore[attr-defined]


def fake_like(mode: FakeTensorMode, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a `FakeTensor` with the shape, strides and dtype of a tensor. Default device: that of the tensor.

    For a sparse tensor it is a dense one whose elements are all in one place.
    """
    strides = tensor.stride() if tensor.layout == torch.strided else (0,) * tensor.ndim
    with mode:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device or tensor.device)
