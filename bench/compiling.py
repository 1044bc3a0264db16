"""The cost of compilation: seconds with an empty and with a full cache, number of graphs, number of recompiles."""

from __future__ import annotations

import importlib
import tempfile
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from bench.child_process import ChildProcess
from bench.rows import SKIPPED, Row, unmeasured
from bench.tasks import Entrant, Task

FIRST_STEPS = 2
"""Compiled blocks run uncompiled in the first step."""
LATER_STEPS = 5


class CompileCost(NamedTuple):
    """The cost of the first steps.

    `seconds` is their time beyond that of as many later steps, `graphs` the number of graphs that they compiled, and
    `recompiles` the number that later steps compiled.
    """

    seconds: float
    graphs: int
    recompiles: int


def compile_cost(entrant: Entrant, task: Task, cache: str, timeout: float) -> CompileCost:
    """Measure the first steps in a new process, with the compiler's cache in the folder `cache`."""
    child = ChildProcess(_measure, entrant, task, environment={"TORCHINDUCTOR_CACHE_DIR": cache})
    try:
        return CompileCost(*child.receive(timeout))
    finally:
        child.close()


def compile_rows(question: str, entrant: Entrant, task: Task) -> list[Row]:
    """Return the rows of an entrant's compilation, with an empty cache ("cold") and with a full one ("warm")."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        try:
            cold = compile_cost(entrant, task, cache, entrant.timeout)
            warm = compile_cost(entrant, task, cache, entrant.timeout)
        except Exception as error:
            return [unmeasured(question, entrant.name, SKIPPED, f"compile time: {error}")]
    values = {
        ("compile, cold cache", "s"): cold.seconds,
        ("compile, warm cache", "s"): warm.seconds,
        ("graphs", "count"): cold.graphs,
        ("recompiles", "count"): cold.recompiles,
    }
    return [Row(question, entrant.name, metric, unit, value, value, value) for (metric, unit), value in values.items()]


def _measure(pipe: Connection, entrant: Entrant, task: Task) -> None:
    """Run in the child: time the first steps and some later ones, and send the fields of a `CompileCost`."""
    # Imported before the clock starts: only the first compilation of a process pays for this import.
    importlib.import_module("torch._inductor.compile_fx")
    run = entrant.load()(entrant.task(task))
    start = time.perf_counter()
    for _ in range(FIRST_STEPS):
        float(run())
    first_steps = time.perf_counter() - start
    graphs = _compiled_graphs()
    start = time.perf_counter()
    for _ in range(LATER_STEPS):
        float(run())
    later_step = (time.perf_counter() - start) / LATER_STEPS
    pipe.send(("cost", (first_steps - FIRST_STEPS * later_step, graphs, _compiled_graphs() - graphs)))


def _compiled_graphs() -> int:
    """Return how many graphs Inductor has compiled in this process, or taken from its cache."""
    from torch._dynamo.utils import counters

    return sum(counters["inductor"][f"fxgraph_cache_{outcome}"] for outcome in ("miss", "hit", "bypass"))
