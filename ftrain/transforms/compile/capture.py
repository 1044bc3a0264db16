"""Capture a function of tensors as one graph, and compile it.

The function runs once on fake tensors, and every operation it dispatches is recorded, those of the
backward pass included. So anything traces that does not ask for the *value* of a tensor: Python control
flow, closures over modules, autograd, checkpointing, hooks. Random operations become arithmetic on a
key (`ftrain.random.torch_ops.Keyed`), so a graph holds no hidden state.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ftrain import _torch
from ftrain._torch import compile as torch_compile
from ftrain.errors import FtrainError, OptionError, TraceError
from ftrain.step.traffic import collectives_of

Flat: TypeAlias = Callable[..., Sequence[Tensor]]
"""A function from tensors, as positional arguments, to a sequence of tensors."""

INDUCTOR = "inductor"
TRUSTED = {"size_asserts": False, "alignment_asserts": False}
"""On a CPU: the shapes of the inputs are guarded before the graph is chosen, and asserting each again costs 0.3 us. On
a device they stay, since they also find kernels whose results have other strides than their fake ones."""

CUDA_GRAPHS = "triton.cudagraphs"
"""What some modes of Inductor switch on: graphs for functions that Dynamo calls. Ours are recorded by the backend."""

SPARING = {"max_fusion_size": 16}
"""What is held until the last part of a kernel has read it is held for long where kernels are large: where a step
recomputes to spare memory, with kernels of 64 parts the peak of a GPT of 12 blocks was 50.5 MB, and with these 41.4."""

IN_ORDER = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
"""Either pass of Inductor may put what computes behind a wait. Then nothing travels meanwhile, or all parameters are
gathered before the first block."""

VECTOR_BITS = {"AVX512": 512, "AVX2": 256}
"""The width of a CPU's vectors, by what torch calls the CPU."""

HERE = Path(torch.__file__).parent, Path(_torch.__file__).parents[1]


def capture(function: Flat, inputs: Sequence[Tensor], rehearse: Callable[[], object]) -> fx.GraphModule:
    """Record `function` on tensors like `inputs` as a graph of aten operations.

    Args:
        function: what to record.
        inputs: tensors of the shapes, dtypes and devices that it will get.
        rehearse: does the same without recording; called when that fails, to see whether the fault
            is the function's own.

    Raises:
        TraceError: when it cannot be recorded; the message names the line that asked for a value.
        Exception: whatever the function itself raises.
    """
    # Registers operations, which takes as long as importing many files.
    from ftrain.transforms.compile.graph_fixes import fix_graph

    # Without symbolic shapes, so that reading a value is refused where it happens.
    fake_mode = next((tensor.fake_mode for tensor in inputs if _torch.is_fake(tensor)), None)
    mode = fake_mode or _torch.FakeTensorMode(allow_non_fake_inputs=True)
    # Detached, for one tensor that is given twice must be two inputs: next time it may be two tensors.
    fakes = [each.detach() if _torch.is_fake(each) else mode.from_tensor(each.detach()) for each in inputs]
    try:
        with mode, torch.autograd.set_multithreading_enabled(False):
            return fix_graph(_require_real(torch_compile.make_graph(function, fakes)))
    except TraceError as error:
        raise TraceError(f"{error} (at {_where(error)})") from error
    except FtrainError:
        raise
    except Exception as error:
        if not isinstance(error, _torch.NEEDS_VALUES):
            rehearse()
        raise TraceError(f"{_reason(error)} (at {_where(error)})") from error


def _require_real(captured: fx.GraphModule) -> fx.GraphModule:
    constants = [getattr(captured, str(node.target)) for node in captured.graph.nodes if node.op == "get_attr"]
    if any(_torch.is_fake(constant) for constant in constants):
        raise TraceError(
            "a tensor that was made while another graph was captured is used again; do not keep tensors of a forward "
            "pass in caches or closures, or make them before the first step"
        )
    return captured


def _reason(error: Exception) -> str:
    if isinstance(error, _torch.NEEDS_VALUES):
        return f"the value of a tensor is needed by {getattr(error, 'func', error)}"
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _where(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not any(part in Path(frame.filename).parents for part in HERE)]
    if not user_frames:
        return "torch"
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}: {user_frames[-1].line}"


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], backend: str, options: Mapping[str, Any]) -> Flat:
    """Compile a captured graph for tensors like `inputs`.

    Args:
        graph: from `capture`.
        inputs: tensors of the shapes, dtypes and devices it was captured with.
        backend: a backend of `torch.compile` by name.
        options: settings of Inductor, by name.
    """
    from ftrain.step import optimization_barrier
    from ftrain.transforms.compile.graph_fixes import materialize_reshapes

    if backend != INDUCTOR:
        return torch_compile.compile_with_backend(materialize_reshapes(graph), inputs, backend)
    patches = {
        **(TRUSTED if inputs[0].is_cpu else {}),
        **(SPARING if optimization_barrier.is_in(graph) else {}),
        **(IN_ORDER if _computes_meanwhile(graph) else {}),
        **options,
    }
    return torch_compile.compile_with_inductor(graph, inputs, patches)


def options_of_cpu() -> dict[str, Any]:
    """Return what Inductor's cache must know of this CPU, as options of Inductor.

    The cache keeps code for a CPU without its kind. Where two kinds share a directory, AVX2 would run code written for
    the vectors of AVX-512, and compute half of the elements; the other way round it would write behind the last one.
    """
    bits = VECTOR_BITS.get(torch.backends.cpu.get_cpu_capability())
    return {} if bits is None else {"cpp.simdlen": bits}


def _computes_meanwhile(graph: fx.GraphModule) -> bool:
    """Whether anything in a captured graph is computed between the start of a collective and the wait for it."""
    return any(node.next not in node.users for node in collectives_of(graph))


def require_backend(function: str, backend: str, mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the settings of a compiler, and return the options that a mode stands for.

    Raises:
        OptionError: for an unknown backend or mode, or options that only Inductor has.
    """
    if backend == INDUCTOR and not (mode or options):
        return {}
    known = sorted({*torch.compiler.list_backends(()), INDUCTOR})
    if backend not in known:
        raise OptionError(f"{function}: backend is {backend!r}; choices are {', '.join(known)}")
    if backend != INDUCTOR and (mode or options):
        raise OptionError(f"{function}: mode and options are Inductor's, and the backend is {backend!r}")
    modes = torch_compile.inductor_modes()
    if mode is not None and mode not in modes:
        raise OptionError(f"{function}: mode is {mode!r}; choices are {', '.join(modes)}")
    unknown = [name for name in options or {} if name.replace("-", "_") not in torch_compile.inductor_options()]
    if unknown:
        raise OptionError(
            f"{function}: there is no option {unknown[0]!r}, neither of its own nor of Inductor's, which "
            "torch._inductor.list_options() has"
        )
    of_mode = {name: value for name, value in modes[mode].items() if name != CUDA_GRAPHS} if mode else {}
    return {**of_mode, **(options or {})}
