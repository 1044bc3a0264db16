"""The private names of torch that capture and compile graphs; the others are in `ftrain._torch` itself.

Importing this file imports neither Dynamo, Inductor nor sympy: the functions do, which takes seconds.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ftrain._torch import FakeTensorMode, nodes_of, private_names

with private_names():
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx


def make_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Run a function on tensors, and return every ATen operation that it dispatched, as a graph.

    What `torch.compile` has compiled runs uncompiled meanwhile, and becomes a part of the graph.
    """
    with _uncompiled(), _one_thread():
        return make_fx(function, tracing_mode="real")(*inputs)


_LOCK = threading.RLock()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context that only one thread is in: the others wait, also those that `torch.compile` compiles for.

    To trace a function, torch replaces methods of `nn.Module`, for all threads. If two threads did so at once, the
    methods of one of them could stay for ever.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with _LOCK, getattr(dynamo, "compile_lock", nullcontext()):
        yield


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which a function of `torch.compile` runs uncompiled where `make_fx` would refuse it."""
    # Nothing is compiled if Dynamo was never imported. Another thread may be importing it.
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    if config is None:
        return nullcontext()
    with private_names():
        patched: AbstractContextManager[object] = config.patch(error_on_nested_fx_trace=False)
    return patched


@contextmanager
def running_parts() -> Iterator[None]:
    """Context in which functions of `torch.compile` are called.

    A graph is used only for modules with the hooks it was made for. Otherwise a layer with a hook would run the graph
    of another layer of its class that has none, without the hook. While another thread captures a graph, a function
    runs uncompiled, where torch would raise an error. Equal operations of a graph are not merged: torch (2.13) would
    merge draws too, so that ``torch.normal(mean, std)`` has the same numbers twice.
    """
    with private_names():
        from torch._dynamo import config as dynamo
        from torch._functorch import config as functorch

    names = (dynamo, "skip_nnmodule_hook_guards"), (dynamo, "error_on_nested_fx_trace"), (functorch, "cse")
    # Every step does this; `config.patch` makes a class in each call, and takes four times as long.
    old_values = [getattr(config, name) for config, name in names]
    for config, name in names:
        setattr(config, name, False)
    try:
        yield
    finally:
        for (config, name), value in zip(names, old_values, strict=True):
            setattr(config, name, value)


def is_compiling() -> bool:
    """Whether this thread is within `torch.compile` or Inductor, tracing or compiling."""
    return TracingContext.try_get() is not None


def compile_with_inductor(
    graph: fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of ATen operations with Inductor."""
    with private_names():
        from torch._inductor.compile_fx import compile_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
    # With symbolic shapes, which it needs to cache code for the next process.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in inputs]
    with _one_thread(), torch.no_grad(), tracing(TracingContext(mode)):
        return compile_fx(graph, fakes, config_patches=dict(options))  # type: ignore[return-value]


def compile_with_backend(graph: fx.GraphModule, inputs: Sequence[Tensor], backend: str) -> Callable[..., Any]:
    """Compile a graph with a backend of `torch.compile`, by its name."""
    with private_names():
        from torch._dynamo.backends.registry import lookup_backend
    with _one_thread(), torch.no_grad():
        compiled: Callable[..., Any] = lookup_backend(backend)(graph, list(inputs))
    return compiled


def has_compiled_gradient(total: Tensor) -> bool:
    """Whether a tensor was computed from the gradient of a function that `torch.compile` has compiled.

    Torch cannot differentiate such a gradient. It raises an error only where a leaf that is asked for is behind it;
    elsewhere that part of the gradient is missing without a word. Older versions of torch do not show it: see
    `differentiates_gradient`.
    """
    return any(node.name() == "CompiledFunctionBackwardBackward" for node in nodes_of(total))


SHOWS_COMPILED_GRADIENTS = tuple(map(int, str(torch.__version__).split(".")[:2])) >= (2, 13)
"""Whether `has_compiled_gradient` can be relied on: seen to be so with 2.13, and not with 2.11; 2.12 was not tried."""


class _GradientCalls(TorchFunctionMode):
    """Records whether a gradient was taken that can be differentiated again."""

    has_create_graph = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_create_graph |= bool((kwargs or {}).get("create_graph"))
        return func(*args, **(kwargs or {}))


def differentiates_gradient(run: Callable[[], object]) -> bool:
    """Whether a function takes a gradient with ``create_graph=True``; calls it, uncompiled."""
    calls = _GradientCalls()
    with calls:
        run()
    return calls.has_create_graph


def graph_pass(name: str, change: Callable[[fx.Graph], None]) -> Any:
    """Return a pass of Inductor that changes a graph in place; its cache distinguishes passes by `name`."""
    with private_names():
        from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return name

    return Pass()


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Return the modes of Inductor, such as ``"max-autotune"``, and the options that each one sets."""
    with private_names():
        from torch._inductor import list_mode_options
    return list_mode_options()


def inductor_options() -> list[str]:
    """Return the names of the options of Inductor."""
    with private_names():
        from torch._inductor import list_options
    return list_options()


def explain_graph_breaks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same arguments that reports the graphs into which `torch.compile` splits it, and why."""
    with private_names():
        from torch._dynamo import explain
    return explain(function)  # type: ignore[no-any-return]


def inductor_random(shape: list[int], seed: Tensor, distribution: str, start: Tensor | None = None) -> Tensor:
    """Draw float32 numbers in one operation, which Inductor fuses with the operations that use them.

    Only for capture and compilation: run eagerly, the operation draws from torch's global generator. The distribution
    is ``"rand"`` or ``"randn"``. The seed and `start`, the first index in its stream, are 0-d int64 tensors.
    """
    if start is not None:
        return _inductor_random_from()(shape, seed, distribution, start)
    with private_names():
        from torch._inductor.inductor_prims import random
    numbers: Tensor = random(shape, seed, distribution)
    return numbers


@functools.cache
def _inductor_random_from() -> Callable[..., Tensor]:
    """Register an operation with an argument that Inductor's own lacks, and its lowering."""
    with private_names():
        from torch._inductor import ir
        from torch._inductor.inductor_prims import make_prim
        from torch._inductor.lowering import register_lowering
        from torch._inductor.virtualized import ops

    operation: Callable[..., Tensor] = make_prim(
        "ftrain_random(SymInt[] size, Tensor seed, str mode, Tensor offset) -> Tensor",
        lambda size, seed, mode, offset: getattr(torch, mode)(size, device=seed.device, dtype=torch.float32),
        doc="the numbers of Inductor's random operation, from index `offset` of its stream on",
    )

    def lowered(size: Any, seed: Any, mode: str, offset: Any) -> Any:
        device, size = seed.get_device_or_error(), [*size]
        strides = ir.FlexibleLayout.contiguous_strides(size)
        place = ir.FixedLayout(device, torch.float32, size, strides).make_indexer()
        load_seed, load_offset = seed.make_loader(), offset.make_loader()

        def element(index: Any) -> Any:
            begins = ops.to_dtype(load_offset([]), torch.int32)
            return getattr(ops, mode)(load_seed([]), ops.add(ops.index_expr(place(index), torch.int32), begins))

        drawn = ir.Pointwise.create(device=device, dtype=torch.float32, inner_fn=element, ranges=size)
        drawn.realize()
        return drawn

    register_lowering(operation, type_promotion_kind=None)(lowered)
    return operation
