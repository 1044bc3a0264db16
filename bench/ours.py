"""The steps of ftrain: eager, donated, compiled, captured as device graphs, and with other wrappers."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._dynamo import list_backends, register_backend

import ftrain as ft
from bench.problems import criterion
from bench.tasks import MissingError, Run, Task

CALLS = "bench_calls_alone"
"""The name of the backend that `calls_only` registers."""
RANK = 8
"""The rank of adapters."""
MICROBATCHES, BUDGET, RHO = 4, 0.5, 0.05
"""Options of techniques, which the same techniques by hand have as well (`bench.techniques`)."""
WRAPPERS: Mapping[str, Callable[[], Any]] = {
    'with_amp("auto")': ft.with_amp,
    'with_amp("bf16")': lambda: ft.with_amp("bf16"),
    "remat()": ft.remat,
    'remat("dots")': lambda: ft.remat("dots"),
    "accumulate(2)": lambda: ft.accumulate(2),
    "remat(budget=0.3)": lambda: ft.remat(budget=0.3),
    "remat(budget=0.5)": lambda: ft.remat(budget=BUDGET),
    "accumulate(4)": lambda: ft.accumulate(MICROBATCHES),
    "clip(1.0)": lambda: ft.clip(1.0),
    "ema(0.99)": lambda: ft.ema(0.99),
    "skip_nonfinite()": ft.skip_nonfinite,
    "sam()": lambda: ft.sam(RHO),
    "update_in_backward()": ft.update_in_backward,
    'offload("opt_state", directory)': lambda: ft.offload("opt_state", directory=folder().name),
    'offload("activations")': lambda: ft.offload("activations"),
    "donated()": ft.donated,
}


def eager(task: Task) -> Run:
    """Prepare the eager step, donated unless the option `donate` is false."""
    return make_run(step_of(task.with_options(compile=False)), task)


def compiled(task: Task) -> Run:
    """Prepare the compiled step, donated unless the option `donate` is false.

    The option `graphs` turns the capture of device graphs on or off; `lowering` is that of `ft.compiled`.
    """
    return make_run(step_of(task), task)


def step_of(task: Task) -> ft.Step:
    """Return the step with clipping in the precision of the task, donated or compiled according to its options.

    With the option `level`, it is sharded at this level over all ranks.
    """
    donate = task.option("donate", True)
    if task.option("compile", True):
        return _composed(task, compile_wrapper(task, donate=donate, graphs=task.option("graphs")))
    return _composed(task, *([ft.donated()] if donate else []))


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder on the disk of the working directory, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="bench-", dir=".")


def wrapped(task: Task) -> Run:
    """Prepare the step of `wrapped_step`."""
    return make_run(wrapped_step(task), task)


def wrapped_step(task: Task) -> ft.Step:
    """Return the step with the wrappers of the option `wrappers`, and no others; ``split`` compiles two graphs."""
    names = task.option("wrappers", ())
    compiled = {"compiled()": task, "split": task.with_options(lowering="split")}
    wrappers = [
        compile_wrapper(compiled[name], donate="donated()" in names) if name in compiled else WRAPPERS[name]()
        for name in names
    ]
    return ft.compose(ft.train_step(loss(task), ft.optim.adamw(task.rate)), *wrappers)  # type: ignore[no-any-return]


def rematerialised(task: Task) -> Run:
    """Prepare the donated eager step with `ft.remat` of the blocks of the option `blocks`; default: of all blocks."""
    blocks = task.option("blocks")
    remat = ft.remat(task.option("policy", "full"), blocks=list(blocks) if blocks else None)
    return make_run(_composed(task, remat, ft.donated()), task)


def adapted(task: Task) -> Run:
    """Prepare the step of `adapted_step`."""
    return make_run(adapted_step(task), task)


def adapted_step(task: Task) -> ft.Step:
    """Return the donated step that trains only low-rank adapters of the linear maps in the blocks.

    With `best` it is compiled.
    """
    donating = compile_wrapper(task, donate=True) if task.best else ft.donated()
    return _composed(task, ft.lora(RANK, targets=["blocks.*"]), donating)


def trainable_percent(task: Task) -> float:
    """Return the percentage of the parameters, adapters included, that `adapted_step` trains."""
    state = adapted_step(task).init(device=task.device)
    trained = sum(leaf.numel() for leaf in ft.tree.leaves(state.params))
    frozen = sum(leaf.numel() for leaf in ft.tree.leaves(state.frozen))
    return 100 * trained / (trained + frozen)


def compile_wrapper(task: Task, *, donate: bool = False, graphs: bool | None = None) -> Any:
    """Return the wrapper `ft.compiled`; `graphs` turns the capture of device graphs on or off.

    Raises:
        MissingError: if `graphs` is true on a CPU.
    """
    if graphs and task.device == "cpu":
        raise MissingError("a CPU captures no device graphs")
    lowering = task.option("lowering", "auto")
    if task.backend != "inductor":
        return ft.compiled(lowering=lowering, donate=donate, backend=task.backend, replay=graphs)
    options = {"combo_kernels": True} if task.option("combo") else {}
    return ft.compiled(lowering=lowering, donate=donate, replay=graphs, **options)


def calls_only(task: Task) -> Run:
    """Prepare the compiled step without its computation, so that only the cost of its calls is timed."""
    if CALLS not in list_backends(None):
        register_backend(_compute_once, name=CALLS)
    return compiled(dataclasses.replace(task, backend=CALLS))


def _compute_once(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Compile a graph into a function that computes in its first call and then returns the same outputs."""
    outputs: list[Any] = []

    def run(*inputs: Any) -> Any:
        if not outputs:
            outputs.append(graph(*inputs))
        return outputs[0]

    return run


def loss(task: Task) -> Any:
    """Return the loss function of a task; with the option `fused_head` it uses `ft.losses.linear_cross_entropy`."""
    module = task.model()
    if not task.option("fused_head"):
        return ft.from_module(module, criterion)
    head = ft.losses.linear_cross_entropy
    return ft.from_module(module, lambda model, batch: head(model.hidden(batch["x"]), model.head.weight, batch["y"]))


def _composed(task: Task, *outer: Any) -> ft.Step:
    """Return the step in the precision of the task, with the wrappers of its options, clipping, then `outer`."""
    precision = [ft.with_amp(task.precision)] if task.precision in {"bf16", "tf32"} else []
    inner = [WRAPPERS[name]() for name in task.option("wrappers", ())]
    level = task.option("level")
    sharded = [] if level is None else [ft.sharded(ft.parallel.mesh(), level)]
    step = ft.train_step(loss(task), ft.optim.adamw(task.rate))
    return ft.compose(step, *precision, *inner, ft.clip(task.max_norm), *sharded, *outer)


def make_run(step: ft.Step, task: Task) -> Run:
    """Return a function that calls a step with the state of its last call, and returns the loss."""
    state, batch = step.init(device=task.device, donate=True), task.batch()

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        loss: Tensor = metrics["loss"]
        return loss

    return run
