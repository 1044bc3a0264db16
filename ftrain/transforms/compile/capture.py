"""Capture a function of tensors as one graph, and compile it.

The function runs once on fake tensors, and every operation that it dispatches is recorded, those of the backward pass
too. So everything can be captured that does not read the *value* of a tensor: Python control flow, closures over
modules, autograd, checkpointing, hooks. Random operations become arithmetic on a key (`ftrain.random.torch_ops.Keyed`),
so that a graph has no hidden state.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx

from ftrain import _torch
from ftrain._torch import compile as torch_compile
from ftrain._torch.fake import CaptureFakeTensorMode, uninterrupted
from ftrain.errors import LIBRARIES, FtrainError, OptionError, TraceError, require_choice
from ftrain.random import torch_ops
from ftrain.step.traffic import collectives_of
from ftrain.transforms.compile.fallback import attempted

Flat: TypeAlias = Callable[..., Sequence[Tensor]]
"""A function from tensors, as positional arguments, to a sequence of tensors."""

INDUCTOR = "inductor"
NO_ASSERTS = {"size_asserts": False, "alignment_asserts": False}
"""On a CPU: the shapes of the inputs are checked before the graph is chosen; an assert costs 0.3 us per input. On a
device the asserts stay: they also detect kernels whose results have other strides than their fake tensors."""

CUDA_GRAPHS = "triton.cudagraphs"
"""An option that some modes of Inductor set: CUDA graphs for functions that Dynamo calls. Ours are recorded by the
backend."""

SMALL_KERNELS = {"max_fusion_size": 16}
"""For a step that recomputes to save memory: a large kernel keeps its inputs until its end. With at most 64 operations
in a kernel the peak of a GPT of 12 blocks was 50.5 MB, with 16 it is 41.4 MB."""

IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Both passes of Inductor may move computation behind the wait for a collective. Then the two do not overlap, or all
parameters are gathered before the first block."""

VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
"""The width of a CPU's vectors, by torch's name of its capability."""


def capture(
    function: Flat, inputs: Sequence[Tensor], rehearse: Callable[[], object], generators: Sequence[Any] = ()
) -> fx.GraphModule:
    """Record `function` on tensors like `inputs` as a graph of aten operations.

    If that fails, `rehearse` runs the function without recording. Raises the error of the function if it fails there
    too, and else a TraceError that names the line which reads a value; also a TraceError if it draws from one of the
    `generators` of Python and NumPy, or from their global ones.
    """
    # Imported here: it registers operations, which takes as long as importing many files.
    from ftrain.transforms.compile.graph_fixes import fix_graph

    # Without symbolic shapes, so that reading a value raises an error at that line.
    fake_mode = next((tensor.fake_mode for tensor in inputs if _torch.is_fake(tensor)), None)
    with attempted():  # It imports Dynamo, which needs a directory for its cache.
        mode = fake_mode or CaptureFakeTensorMode(allow_non_fake_inputs=True)
    host_draws = _host_draws(generators)
    try:
        with uninterrupted(), torch.autograd.set_multithreading_enabled(False):
            # Detached: a tensor that is passed twice must be two inputs, since the next call may pass two tensors.
            fakes = [each.detach() if _torch.is_fake(each) else mode.from_tensor(each.detach()) for each in inputs]
            with mode:
                graph = fix_graph(_require_real(torch_compile.make_graph(function, fakes)))
        _require_traceable_collectives(graph)
        _require_no_draws_in_branches(graph)
        if _host_draws(generators) != host_draws:
            raise TraceError(
                "the loss draws from the generator of Python or NumPy, and a graph would repeat these numbers in each "
                "step; draw with torch or ft.random, or where the data is made"
            )
        return graph
    except TraceError as error:
        raise TraceError(f"{error} (at {_where(error)})") from error
    except FtrainError:
        raise
    except Exception as error:
        if not isinstance(error, _torch.NEEDS_VALUES):
            rehearse()
        raise TraceError(f"{_reason(error)} (at {_where(error)})") from error


def identity_of(graph: fx.GraphModule) -> tuple[str, list[Hashable]]:
    """Return the code of a captured graph and its tensors; graphs that are equal in both compute the same."""
    # Submodules are the bodies of operations such as conditions. The graph keeps the tensors, and so their identities.
    codes = [str(part.code) for part in graph.modules() if isinstance(part, fx.GraphModule)]
    digest = hashlib.sha256("".join(codes).encode()).hexdigest()
    tensors = {node: getattr(graph, str(node.target), None) for node in graph.graph.nodes if node.op == "get_attr"}
    return digest, [_identity(each, node) for node, each in tensors.items() if isinstance(each, Tensor)]


def _identity(tensor: Tensor, node: fx.Node) -> Hashable:
    """Return what distinguishes a tensor of a graph from others: its `id`, or its values if the function makes it.

    A tensor that the function makes is another object in each capture. To read its values, this waits for the device.
    """
    is_made = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not is_made or tensor.layout != torch.strided:
        return id(tensor)
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, hashlib.sha256(values).digest()


def _host_draws(generators: Sequence[Any]) -> bytes:
    """Return the states of the global generators of Python and NumPy, and of these."""
    return pickle.dumps((random.getstate(), np.random.get_state(), [*map(_state_of, generators)]))


def _state_of(generator: Any) -> Any:
    """Return the state of a generator of Python or NumPy; None if it has none, as one of the operating system."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _require_traceable_collectives(graph: fx.GraphModule) -> None:
    """Raises a TraceError for a collective that writes to tensors: a graph would not keep their order."""
    called = [str(node.target) for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "c10d"]
    if called:
        raise TraceError(
            f"the loss calls a collective of torch.distributed ({called[0]}), which cannot be part of a graph; use "
            "DTensors, as under 'A loss that compares examples' of docs/parallel.md"
        )


def _require_no_draws_in_branches(graph: fx.GraphModule) -> None:
    """Raises a TraceError for a random operation in a branch of a condition, which would not draw from the key."""
    for part in graph.modules():
        if part is graph or not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.op == "call_function" and torch_ops.is_draw(node.target, node.args, node.kwargs):
                raise TraceError(
                    f"a branch of torch.cond draws random numbers ({node.target}), and a graph would draw them from a "
                    "global generator; draw before the condition, or from the key of the step (rng=, ft.random)"
                )


def _require_real(captured: fx.GraphModule) -> fx.GraphModule:
    constants = [getattr(captured, str(node.target)) for node in captured.graph.nodes if node.op == "get_attr"]
    if any(_torch.is_fake(constant) for constant in constants):
        raise TraceError(
            "a tensor that was created while another graph was captured is used again; do not keep tensors of a "
            "forward pass in caches or closures, or create them before the first step"
        )
    return captured


def _reason(error: Exception) -> str:
    if isinstance(error, _torch.NEEDS_VALUES):
        reason = f"the value of a tensor is needed by {getattr(error, 'func', error)}"
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            reason += "; torch.autograd.set_detect_anomaly reads every gradient, unless check_nan=False"
        return reason
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    # Generated functions, in "<string>", have no lines, or, from Python 3.13 on, those of `python -c`.
    others = (*LIBRARIES, "<string>")
    user_frames = [frame for frame in frames if frame.line and not frame.filename.startswith(others)]
    if not user_frames:
        return "torch"
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: {user_frames[-1].line}"


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], backend: str, options: Mapping[str, Any]) -> Flat:
    """Compile a graph of `capture` for tensors like `inputs`, with a backend of `torch.compile` by name."""
    from ftrain.transforms.compile.graph_fixes import with_fake_strides
    from ftrain.transforms.remat import optimization_barrier

    if backend != INDUCTOR:
        return torch_compile.compile_with_backend(with_fake_strides(graph), inputs, backend)
    patches = {
        **(NO_ASSERTS if inputs[0].is_cpu else {}),
        **(SMALL_KERNELS if optimization_barrier.is_in(graph) else {}),
        **(IN_ORDER if _overlaps_collectives(graph) else {}),
        **options,
    }
    return torch_compile.compile_with_inductor(graph, inputs, patches)


def options_of_cpu() -> dict[str, Any]:
    """Return options of Inductor that make its cache depend on the vector width of this CPU.

    Without them, if two kinds of CPU share a cache directory, one with AVX2 would run code for AVX-512, which computes
    half of the elements; the other way round the code would write beyond the last element.
    """
    bits = VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    return {} if bits is None else {"cpp.simdlen": bits}


def _overlaps_collectives(graph: fx.GraphModule) -> bool:
    """Whether a captured graph computes something between the start of a collective and the wait for it."""
    return any(node.next not in node.users for node in collectives_of(graph))


def require_backend(backend: str, mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mode together with `options`, after a check of all settings.

    Raises an OptionError if a setting is unknown, or if a backend other than Inductor gets a mode or options.
    """
    if backend == INDUCTOR and not (mode or options):
        return {}
    require_choice("compiled", "backend", backend, sorted({*torch.compiler.list_backends(()), INDUCTOR}))
    if backend != INDUCTOR and (mode or options):
        raise OptionError(f"compiled: mode and options are Inductor's, and the backend is {backend!r}")
    modes = torch_compile.inductor_modes()
    if mode is not None:
        require_choice("compiled", "mode", mode, [*modes])
    unknown = [name for name in options if name.replace("-", "_") not in torch_compile.inductor_options()]
    if unknown:
        raise OptionError(
            f"compiled: unknown option {unknown[0]!r}; options are those of compiled and those of "
            "torch._inductor.list_options()"
        )
    mode_options = modes[mode] if mode else {}
    return {**{name: value for name, value in mode_options.items() if name != CUDA_GRAPHS}, **options}
