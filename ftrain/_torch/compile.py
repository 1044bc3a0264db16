"""The private names of torch that capture and compile graphs; the others are in `ftrain._torch` itself.

Importing this file imports neither Dynamo, Inductor nor sympy: the functions do, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftrain._torch import FakeTensorMode, private_names

with private_names():
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx


def fake_mode_with_symbols() -> FakeTensorMode:
    """Return a mode that can hold symbolic shapes, which Inductor needs to cache code for the next process."""
    # Imported here: it imports sympy, which takes as long as half of torch.
    with private_names():
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
    return FakeTensorMode(shape_env=ShapeEnv())


def make_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Run a function on tensors, and return every ATen operation that it dispatched, as a graph."""
    return make_fx(function, tracing_mode="real")(*inputs)


def is_compiling() -> bool:
    """Whether this thread is within `torch.compile` or Inductor, tracing or compiling."""
    return TracingContext.try_get() is not None


def compile_with_inductor(
    graph: fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of ATen operations with Inductor.

    Args:
        graph: the graph.
        inputs: tensors of the shapes, dtypes and devices of its inputs.
        options: settings of Inductor, by name.
    """
    with private_names():
        from torch._inductor.compile_fx import compile_fx
    mode = fake_mode_with_symbols()
    fakes = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in inputs]
    with torch.no_grad(), tracing(TracingContext(mode)):
        return compile_fx(graph, fakes, config_patches=dict(options))  # type: ignore[return-value]


def compile_with_backend(graph: fx.GraphModule, inputs: Sequence[Tensor], backend: str) -> Callable[..., Any]:
    """Compile a graph with a backend of `torch.compile`, by its name."""
    with private_names():
        from torch._dynamo.backends.registry import lookup_backend
    with torch.no_grad():
        compiled: Callable[..., Any] = lookup_backend(backend)(graph, list(inputs))
    return compiled


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


def explain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same arguments that reports the graphs into which `torch.compile` splits it, and why."""
    with private_names():
        from torch._dynamo import explain as explained
    return explained(function)  # type: ignore[no-any-return]
