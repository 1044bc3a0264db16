"""ftrain's entrants: the same step eager, donated, compiled, captured, and with any wrappers between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._dynamo import list_backends, register_backend

import ftrain as ft
from bench.problems import criterion
from bench.tasks import MAX_NORM, MissingError, Run, Task

CALLS = "bench_calls_alone"
RANK = 8
"""Of adapters."""
WRAPPERS: Mapping[str, Callable[[], Any]] = {
    'with_amp("auto")': ft.with_amp,
    'with_amp("bf16")': lambda: ft.with_amp("bf16"),
    "remat()": ft.remat,
    'remat("dots")': lambda: ft.remat("dots"),
    "accumulate(2)": lambda: ft.accumulate(2),
    "accumulate(4)": lambda: ft.accumulate(4),
    "clip(1.0)": lambda: ft.clip(MAX_NORM),
    "ema(0.99)": lambda: ft.ema(0.99),
    "skip_nonfinite()": ft.skip_nonfinite,
    "donated()": ft.donated,
}


def eager(task: Task) -> Run:
    """`ft.donated()`, or with the option `donate=False` without it."""
    return make_run(step_of(task.with_options(compile=False)), task)


def compiled(task: Task) -> Run:
    """`ft.compiled(donate=True)`; the option `graphs` asks for the capture of device graphs or forbids it."""
    return make_run(step_of(task), task)


def step_of(task: Task) -> ft.Step:
    """The step with clipping, in the precision of the task, donated or compiled as its options say.

    With the option `level` it runs on all ranks there are.
    """
    donate = task.option("donate", True)
    if task.option("compile", True):
        return _composed(task, compile_wrapper(task, donate=donate, graphs=task.option("graphs")))
    return _composed(task, *([ft.donated()] if donate else []))


def wrapped(task: Task) -> Run:
    """The plain eager step with the wrappers of the option `wrappers`, and no others."""
    names = task.option("wrappers", ())
    chosen = [compile_wrapper(task) if name == "compiled()" else WRAPPERS[name]() for name in names]
    return make_run(ft.compose(ft.train_step(loss(task), ft.optim.adamw(task.rate)), *chosen), task)


def rematerialised(task: Task) -> Run:
    """The donated eager step with the named blocks, or all of them, computed twice."""
    blocks = task.option("blocks")
    remat = ft.remat(task.option("policy", "full"), blocks=list(blocks) if blocks else None)
    return make_run(_composed(task, remat, ft.donated()), task)


def adapted(task: Task) -> Run:
    """The step of `adapted_step`; compiled at its best."""
    return make_run(adapted_step(task), task)


def adapted_step(task: Task) -> ft.Step:
    """The donated step that trains low-rank adapters of every linear map in the blocks, and nothing else."""
    donating = compile_wrapper(task, donate=True) if task.best else ft.donated()
    return _composed(task, ft.lora(RANK, targets=["blocks.*"]), donating)


def trainable_percent(task: Task) -> float:
    """The share of the parameters that trains with these adapters, themselves among all, in percent."""
    state = adapted_step(task).init(device=task.device)
    trained, frozen = (sum(leaf.numel() for leaf in ft.tree.leaves(part)) for part in (state.params, state.frozen))
    return 100 * trained / (trained + frozen)


def compile_wrapper(task: Task, *, donate: bool = False, graphs: bool | None = None) -> Any:
    """`ft.compiled`, with the capture of device graphs where it is asked for.

    Raises:
        MissingError: when it is asked for on a CPU.
    """
    if graphs and task.device == "cpu":
        raise MissingError("a CPU captures no device graphs")
    if task.backend != "inductor":
        return ft.compiled(donate=donate, backend=task.backend, replay=graphs)
    options = {"combo_kernels": True} if task.option("combo") else {}
    return ft.compiled(donate=donate, replay=graphs, **options)


def calls_only(task: Task) -> Run:
    """The compiled step without the work: a graph that gives what it gave the first time, so that calls remain."""
    if CALLS not in list_backends(None):
        register_backend(_once, name=CALLS)
    return compiled(dataclasses.replace(task, backend=CALLS))


def _once(graph: Any, inputs: Any) -> Callable[..., Any]:
    outputs: list[Any] = []

    def run(*inputs: Any) -> Any:
        if not outputs:
            outputs.append(graph(*inputs))
        return outputs[0]

    return run


def loss(task: Task) -> Any:
    """The loss of a task, with the loss head that the option `fused_head` names."""
    module = task.model()
    if not task.option("fused_head"):
        return ft.from_module(module, criterion)
    head = ft.losses.linear_cross_entropy
    return ft.from_module(module, lambda model, batch: head(model.hidden(batch["x"]), model.head.weight, batch["y"]))


def _composed(task: Task, *wrappers: Any) -> ft.Step:
    precise = {"bf16": [ft.with_amp("bf16")], "tf32": [ft.with_amp("tf32")]}.get(task.precision, [])
    inner = [WRAPPERS[name]() for name in task.option("wrappers", ())]
    level = task.option("level")
    sharded = [] if level is None else [ft.sharded(ft.parallel.mesh(), level)]
    step = ft.train_step(loss(task), ft.optim.adamw(task.rate))
    return ft.compose(step, *precise, *inner, ft.clip(MAX_NORM), *sharded, *wrappers)


def make_run(step: ft.Step, task: Task) -> Run:
    """Calls of a step that hand its state on."""
    state, batch = step.init(device=task.device, donate=True), task.batch()

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        loss: Tensor = metrics["loss"]
        return loss

    return run
