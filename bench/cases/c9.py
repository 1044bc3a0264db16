"""Techniques that spend less memory, each beside the same by hand with torch: its time, and the most that is held.

Everything is eager and donated, on a GPT of twelve blocks; AdamW, nothing is clipped. Rematerialisation and
accumulation run on a model most of whose memory are activations, the updates on one most of whose memory are
parameters. By hand that is `torch.utils.checkpoint` around each block, a loop over microbatches, an optimizer for each
parameter in a hook, and moments that are memory-mapped files. `remat(budget=0.3)` is beside the loop that keeps
everything, and the one that keeps nothing; in a full run `remat(budget=0.5)` also compiled, whole and
split, beside `torch.compile` with `activation_memory_budget`, which takes minutes. `sam` spends no less; it is here
beside a loop with two passes, and beside a step with one, of which it should take no more than two.

What is held counts the pages of files that are in memory; the system may take these back. On a GPU (``--case C9
--device cuda``) activations go to the host, beside `save_on_cpu`; a CPU is its own host.
"""

from __future__ import annotations

import ftrain as ft
from bench import techniques
from bench.race import memory_rows, race
from bench.rows import RATIO, WITHIN, Row, measured
from bench.settings import Settings
from bench.tasks import Entrant, Task

HAND = "bench.techniques:"
KEEPING_ALL = Entrant("loop that keeps all", "hand eager", f"{HAND}kept")
FULL = "C9 remat, GPT 12x128"


def _ours(*names: str) -> Entrant:
    return Entrant(f"ftrain, {', '.join(names)}", "ours", f"{HAND}ours", options=(("wrappers", names),))


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
    Entrant("loop, two passes", "hand eager", f"{HAND}two_passes"),
    _ours("sam()"),
)
ONE_PASS = Entrant("ftrain, one pass", "ours", f"{HAND}ours", compares_losses=False)
SPLIT = _ours("remat(budget=0.5)", "split")
SMOKE_QUESTIONS = FULL, "C9 update in the backward pass, GPT 12x256", "C9 optimizer state in files, GPT 12x256", SAM[0]
"""Where there is something to see that other cases do not show."""
SAVED = "activations, of those that are kept without"


def run(settings: Settings) -> list[Row]:
    """Race each technique with the same by hand, and measure the memory of both."""
    questions = [*((name, *pair) for name, pair in PAIRS.items()), SAM]
    if settings.device != "cpu":
        questions.append(ON_DEVICE)
    if settings.full:
        questions.append(COMPILED)
    if settings.smoke:
        questions = [question for question in questions if question[0] in SMOKE_QUESTIONS]
    rows = []
    for name, problem, hand, ours in questions:
        # What rematerialisation saves and costs is to be seen, too.
        others = {FULL: [BUDGETED, KEEPING_ALL], COMPILED[0]: [SPLIT], SAM[0]: [ONE_PASS]}.get(name, [])
        rows += _race(name, settings.task(problem), [hand, ours, *others], settings)
    return rows + _left(settings.task("deep"))


def _left(task: Task) -> list[Row]:
    """What rematerialisation leaves of the activations."""
    every = _activations(task, KEEPING_ALL)
    return [measured(FULL, ours.name, SAVED, "", [_activations(task, ours) / every]) for ours in (REMAT, BUDGETED)]


def _race(question: str, task: Task, entrants: list[Entrant], settings: Settings) -> list[Row]:
    rows = race(question, task, entrants, settings, fraction=0.6)
    if settings.device != "cpu":
        return rows
    # Each costs a process.
    rows += [] if settings.smoke else memory_rows(question, task, entrants, settings)
    return rows + _saved(question, rows)


def _saved(question: str, rows: list[Row]) -> list[Row]:
    """What is held within a step, of what is held by the loop that keeps everything."""
    held = {row.variant: row.median for row in rows if row.metric == WITHIN}
    every, names = held.get(KEEPING_ALL.name), [ours.name for ours in (REMAT, BUDGETED) if ours.name in held]
    metric = f"{WITHIN}, {RATIO}{KEEPING_ALL.name}"
    return [measured(question, name, metric, "", [held[name] / every]) for name in names] if every else []


def _activations(task: Task, entrant: Entrant) -> int:
    """Bytes of activations, as `ftrain.anatomy` predicts them."""
    step = techniques.step_of(entrant.task(task))
    state = step.init(device=task.device)
    size: int = ft.anatomy(step, state, task.batch(), measure=False).most.get("activations", 0)
    return size
