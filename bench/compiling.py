"""What compilation costs: seconds with an empty cache and with a full one, graphs, and recompiles."""

from __future__ import annotations

import importlib
import tempfile
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

from bench.child_process import ChildProcess
from bench.rows import Row, said
from bench.tasks import Entrant, Task

AGAIN = 5


class Cost(NamedTuple):
    """Seconds of the first step over those of a later one, and graphs made by it and by later ones."""

    seconds: float
    graphs: int
    recompiles: int


def cost(entrant: Entrant, task: Task, cache: str, patience: float) -> Cost:
    """Take the first step in a new process, with the compiler's cache in the given folder."""
    child = ChildProcess(_measure, entrant, task, environment={"TORCHINDUCTOR_CACHE_DIR": cache})
    try:
        return Cost(*child.receive(patience))
    finally:
        child.close()


def compile_rows(question: str, entrant: Entrant, task: Task) -> list[Row]:
    """Rows of the compilation of an entrant, cold and warm."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as cache:
        try:
            cold = cost(entrant, task, cache, entrant.patience)
            warm = cost(entrant, task, cache, entrant.patience)
        except Exception as error:
            return [said(question, entrant.name, "not run", f"compile time: {error}")]
    values = {
        ("compile, cold cache", "s"): cold.seconds,
        ("compile, warm cache", "s"): warm.seconds,
        ("graphs", "count"): cold.graphs,
        ("recompiles", "count"): cold.recompiles,
    }
    return [Row(question, entrant.name, name, unit, v, v, v) for (name, unit), v in values.items()]


def _measure(pipe: Connection, entrant: Entrant, task: Task) -> None:
    # Imported before the clock starts, as any later compilation would find it.
    importlib.import_module("torch._inductor.compile_fx")
    run = entrant.load()(entrant.task(task))
    start = time.perf_counter()
    float(run())
    first, graphs = time.perf_counter() - start, _graphs()
    start = time.perf_counter()
    for _ in range(AGAIN):
        float(run())
    pipe.send(("cost", (first - (time.perf_counter() - start) / AGAIN, graphs, _graphs() - graphs)))


def _graphs() -> int:
    """Graphs that Inductor has been given, whoever captured them."""
    from torch._dynamo.utils import counters

    return sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("miss", "hit", "bypass"))
