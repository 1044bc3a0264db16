"""Techniques that save memory, each compared with the same technique by hand with torch, in time and peak memory.

All steps are eager and donated, with AdamW and without clipping, on a GPT of twelve blocks. Most of the memory of the
model ``deep`` is activations; it is used for rematerialisation and accumulation. Most of the memory of the model
``wide`` is parameters; it is used for the updates. By hand: `torch.utils.checkpoint` of each block, a loop over
microbatches, an optimizer for each parameter in a hook, and moments in memory-mapped files.

`remat(budget=0.3)` is compared with the loop that keeps all activations and with the one that checkpoints each block.
In a full run, `remat(budget=0.5)` is also compiled, whole and split, and compared with `torch.compile` with an
`activation_memory_budget`, which takes minutes. `sam` saves no memory. It is compared with a loop with two passes, and
with a step without `sam`, which should take half of the time.

Peak memory includes pages of files that are in memory; the system can drop these. With ``--case C9 --device cuda``,
activations are offloaded to the host and compared with `save_on_cpu`; on a CPU there is nowhere to offload them to.
"""

from __future__ import annotations

import ftrain as ft
from bench.ours import wrapped_step
from bench.race import memory_rows, race
from bench.rows import RATIO, WITHIN, Row, measured
from bench.settings import Settings
from bench.tasks import Entrant, Task

HAND, OURS = "bench.techniques:", "bench.ours:wrapped"
KEEPING_ALL = Entrant("loop that keeps all", "hand eager", f"{HAND}keep_all")
FULL = "C9 remat, GPT 12x128"


def _ours(*names: str) -> Entrant:
    return Entrant(f"ftrain, {', '.join(names)}", "ours", OURS, options=(("wrappers", (*names, "donated()")),))


REMAT, BUDGETED = _ours("remat()"), _ours("remat(budget=0.3)")
PAIRS = {
    FULL: ("deep", Entrant("loop, checkpoint(block)", "hand eager", f"{HAND}checkpointed"), REMAT),
    "C9 remat of all but products, GPT 12x128": (
        "deep",
        Entrant(
            "loop, checkpoint(block), products kept", "hand eager", f"{HAND}checkpointed", options=(("products", True),)
        ),
        _ours('remat("dots")'),
    ),
    "C9 accumulate, GPT 12x128": (
        "deep",
        Entrant("loop over 4 microbatches", "hand eager", f"{HAND}accumulated"),
        _ours("accumulate(4)"),
    ),
    "C9 update in the backward pass, GPT 12x256": (
        "wide",
        Entrant("an optimizer in a hook of each parameter", "hand eager", f"{HAND}in_backward"),
        _ours("update_in_backward()"),
    ),
    "C9 optimizer state in files, GPT 12x256": (
        "wide",
        Entrant("loop, moments from_file", "hand eager", f"{HAND}mapped"),
        _ours('offload("opt_state", directory)'),
    ),
}
ON_DEVICE = (
    "C9 offload of activations, GPT 12x128",
    "deep",
    Entrant("loop, save_on_cpu", "hand eager", f"{HAND}saved_on_cpu"),
    _ours('offload("activations")'),
)
COMPILED = (
    "C9 remat by a budget, compiled, GPT 12x128",
    "deep",
    Entrant("loop, torch.compile, activation_memory_budget=0.5", "hand compile", f"{HAND}budgeted"),
    _ours("remat(budget=0.5)", "compiled()"),
)
SAM = (
    "C9 sam, GPT 12x128",
    "deep",
    Entrant("loop, two passes", "hand eager", f"{HAND}sam"),
    _ours("sam()"),
)
ONE_PASS = Entrant("ftrain, one pass", "ours", OURS, options=(("wrappers", ("donated()",)),), compares_losses=False)
SPLIT = _ours("remat(budget=0.5)", "split")
SMOKE_QUESTIONS = FULL, "C9 update in the backward pass, GPT 12x256", "C9 optimizer state in files, GPT 12x256", SAM[0]
"""The questions of a smoke test: those whose code no other case runs."""
SAVED = "activations, of those that are kept without"


def run(settings: Settings) -> list[Row]:
    """Time each technique and the same by hand, and measure the memory of both."""
    questions = [*((name, *pair) for name, pair in PAIRS.items()), SAM]
    if settings.device != "cpu":
        questions.append(ON_DEVICE)
    if settings.full:
        questions.append(COMPILED)
    if settings.smoke:
        questions = [question for question in questions if question[0] in SMOKE_QUESTIONS]
    rows = []
    for name, problem, hand, ours in questions:
        # Entrants that show what a technique saves or costs compared with a step without it.
        others = {FULL: [BUDGETED, KEEPING_ALL], COMPILED[0]: [SPLIT], SAM[0]: [ONE_PASS]}.get(name, [])
        rows += _race(name, settings.task(problem), [hand, ours, *others], settings)
    return rows + _kept_activations(settings.task("deep"))


def _kept_activations(task: Task) -> list[Row]:
    """Return the rows of the activations that rematerialisation keeps, as a fraction of all."""
    all_activations = _activations(task, KEEPING_ALL)
    return [
        measured(FULL, ours.name, SAVED, "", [_activations(task, ours) / all_activations]) for ours in (REMAT, BUDGETED)
    ]


def _race(question: str, task: Task, entrants: list[Entrant], settings: Settings) -> list[Row]:
    rows = race(question, task, entrants, settings, fraction=0.6)
    if settings.device != "cpu":
        return rows
    # A smoke test leaves memory out: it would start a process for each entrant.
    rows += [] if settings.smoke else memory_rows(question, task, entrants, settings)
    return rows + _memory_ratios(question, rows)


def _memory_ratios(question: str, rows: list[Row]) -> list[Row]:
    """Return the rows of the memory within a step, divided by that of the loop that keeps all activations."""
    memory = {row.variant: row.median for row in rows if row.metric == WITHIN}
    memory_of_all = memory.get(KEEPING_ALL.name)
    if not memory_of_all:
        return []
    metric = f"{WITHIN}, {RATIO}{KEEPING_ALL.name}"
    names = [ours.name for ours in (REMAT, BUDGETED) if ours.name in memory]
    return [measured(question, name, metric, "", [memory[name] / memory_of_all]) for name in names]


def _activations(task: Task, entrant: Entrant) -> int:
    """Return the bytes of activations, as `ftrain.anatomy` predicts them."""
    step = wrapped_step(entrant.task(task))
    state = step.init(device=task.device)
    size: int = ft.anatomy(step, state, task.batch(), measure=False).most.get("activations", 0)
    return size
