"""How Inductor would run a graph: asked for its code, and stopped before a kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ftrain.transforms.compile.capture import compile_inductor, with_shapes

NUMBER = "ftrain_number"
READABLE = {"fx_graph_cache": False, "cpp_wrapper": False}
"""Settings with which Inductor writes code, and in Python."""


@dataclass(frozen=True)
class Plan:
    """What Inductor makes of a graph.

    Args:
        source: Python code whose function ``call`` takes memory, calls kernels and gives memory back.
        origins: name of a buffer in it -> numbers of the nodes of the graph that it is computed by.
        constants: name in it -> tensor that is part of the graph.
        output_strides: of what it returns, as Inductor writes down sizes that may be symbols; None for no tensor.
    """

    source: str
    origins: Mapping[str, Sequence[int]]
    constants: Mapping[str, Tensor]
    output_strides: Sequence[tuple[str, ...] | None]


Planning: TypeAlias = Callable[[], Plan | None]
"""Asks for the plan of a graph; of nothing to run there is none."""

Boxed: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""A function of a list of tensors, which it empties, so that none is held for longer than it is needed."""

Execute: TypeAlias = Callable[[fx.GraphModule, str, Planning], Boxed]
"""``(graph, phase, planning) -> function``: what runs in place of a compiled graph, in a phase of the step."""

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""The phases of a step."""


def plan_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> Plan | None:
    """Let Inductor plan how it runs a captured graph, without compiling a kernel; of nothing to run there is no plan.

    Args:
        graph: from `ftrain.transforms.compile.capture.capture`.
        inputs: tensors of the shapes, dtypes and devices it was captured with; they need no memory.
        options: settings of Inductor, by name.
    """
    mode = with_shapes()
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
    return _planned(graph, lambda: compile_inductor(graph, fakes, mode, {**options, **READABLE}))


def planning_backend(execute: Execute, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that does all that Inductor does, but compiles no kernel.

    Args:
        execute: what runs in place of the graphs of the forward and of the backward pass.
        options: settings of Inductor, by name.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import set_tracing_context_output_strides

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
        phase = BACKWARD if given.get("is_backward") else FORWARD

        def planning() -> Plan | None:
            plan = _planned(graph, lambda: compile_fx_inner(graph, inputs, **given))
            if plan is not None:
                # By these, the backward pass learns how what the forward pass keeps for it lies in memory.
                set_tracing_context_output_strides(inputs, plan)  # type: ignore[arg-type]
            return plan

        run = execute(graph, phase, planning)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner, config_patches={**options, **READABLE})

    return backend


def _planned(graph: fx.GraphModule, run: Callable[[], object]) -> Plan | None:
    """Run Inductor until it has written its code."""
    from torch._functorch import config
    from torch._inductor.graph import GraphLowering

    # Of all that is written into a node, Inductor takes this over into what it makes of the node.
    for number, node in enumerate(graph.graph.nodes):
        node.meta["custom"] = {NUMBER: number}
    planner = _Planner()
    before, GraphLowering.save_output_code = GraphLowering.save_output_code, planner
    try:
        with config.patch(enable_autograd_cache=False):
            run()
    except _Stopped:
        pass
    finally:
        GraphLowering.save_output_code = before
    return planner.plan


class _Stopped(BaseException):
    """Stops Inductor, which wraps no exception of this kind."""


class _Planner:
    """Takes the code that Inductor has written, and stops it before its kernels are compiled."""

    plan: Plan | None = None

    def __call__(self, source: str) -> None:
        from torch._inductor.virtualized import V

        buffers: Mapping[str, Any] = V.graph.name_to_buffer
        origins = {name: _numbers(buffer.get_origins()) for name, buffer in buffers.items()}
        strides = [_stride(each) for each in V.graph.graph_outputs or ()]
        self.plan = Plan(source, origins, dict(V.graph.constants), strides)
        raise _Stopped


def _stride(output: Any) -> tuple[str, ...] | None:
    from torch._inductor.ir import IRNode
    from torch.fx.experimental.symbolic_shapes import SymExprPrinter

    if not (isinstance(output, IRNode) and output.has_tensor_output()):
        return None
    return tuple(SymExprPrinter().doprint(each) for each in output.get_stride())


def _numbers(nodes: Iterable[fx.Node]) -> list[int]:
    return sorted({node.meta["custom"][NUMBER] for node in nodes if NUMBER in node.meta.get("custom", ())})
