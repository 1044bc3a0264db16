"""The update alone: every optimizer beside torch's, eager and compiled, and the state it holds.

Gradients are at hand and stay the same while an update is timed. Models hold about a million numbers in all, so that a
pass over them takes about a millisecond, in 10 leaves (five layers of a weight and a bias), 148 (as GPT-2 has them) or
1,000 (500 layers). Everything decays. Muon takes the matrices alone.

Eager is `Optimizer.update` with the old state donated, beside `torch.optim`, fused where it can be and else with
`foreach`, and as it is by default. Compiled is that update as one graph, as a split step has it, beside
`torch.compile(optimizer.step)`: on ten leaves, and in a full run on more. Our rate is an input of the graph, and that
of torch a constant. What torch does not have is timed beside the library that does, and beside AdamW, for scale.
"""

from __future__ import annotations

from bench import field, updates
from bench.race import race
from bench.rows import RATIO, TIME, Row, measured
from bench.settings import Settings
from bench.stats import pairwise
from bench.tasks import Entrant
from bench.timing import interleaved, racer
from bench.updates import KINDS

STATE = "C8 state, GPT of 25M parameters"
COUNTS = (10, 148, 1_000)
CHECKED = 8
"""Updates that are compared: RAdam changes its formula at the sixth."""
MANY = ("adamw", "sgd, momentum")
"""Who is timed on few and on very many leaves, too, and compiled on few; everyone in a full run, of half an hour."""


def run(settings: Settings) -> list[Row]:
    """Race each optimizer with its like, then those that have none with AdamW, and count the bytes of their states."""
    rows = []
    for name in KINDS:
        for count in COUNTS if settings.full or name in MANY else (148,):
            question = title(name, count)
            rows += _race(question, name, count, settings, _eager(name, settings))
            # Graphs of 148 leaves take half a minute to compile, and of a thousand some minutes.
            if settings.full or (name in MANY and count == 10):
                rows += _race(f"{question}, compiled", name, count, settings, _compiled(name))
    return rows + _scale(settings) + _states(settings)


def title(name: str, count: int) -> str:
    """The name of the question about an optimizer on so many leaves."""
    return f"C8 {name}, {count:,} leaves"


def _race(question: str, name: str, count: int, settings: Settings, entrants: list[Entrant]) -> list[Row]:
    if len(entrants) < 2:
        return []
    few = "10 of whole blocks" if KINDS[name].blocks else "10"
    task = settings.task(f"update {few if count == 10 else count}").with_options(optimizer=name)
    return race(question, task, entrants, settings, part=0.3, checked=CHECKED, tolerance=KINDS[name].tolerance)


def _eager(name: str, settings: Settings) -> list[Entrant]:
    kind = KINDS[name]
    if kind.torchs:
        # Where it is fused, or knows one way only, its default is slower or the same.
        defaults = [] if kind.fused or kind.matrices else [field.TORCH_DEFAULT]
        return [field.TORCH, *defaults, field.OURS_UPDATE]
    if kind.peer and settings.peers and (settings.full or not kind.slow):
        return [field.OPTIMIZERS[kind.peer.split(":")[0].split(".")[0]], field.OURS_UPDATE]
    return []


def _compiled(name: str) -> list[Entrant]:
    """Torch's compiled beside ours, or ours eager where torch has no such optimizer."""
    other = field.TORCH_COMPILED if KINDS[name].torchs else field.OURS_UPDATE
    return [other, field.OURS_UPDATE_COMPILED]


def _scale(settings: Settings) -> list[Row]:
    """Time those that torch does not have beside its AdamW; their maths is another, so none is compared."""
    question, task = title("others", 148), settings.task("update 148")
    print(question, flush=True)
    racers = {field.ADAMW.name: racer(field.ADAMW, task)}
    for name in (name for name, kind in KINDS.items() if not kind.torchs):
        racers[f"ftrain update, {name}"] = racer(field.OURS_UPDATE, task.with_options(optimizer=name))
    times = interleaved(racers, rounds=settings.share(0.3), seconds=settings.seconds)
    rows = [measured(question, name, TIME, "us", values) for name, values in times.items()]
    base, *others = times
    ratios = {name: pairwise(times[name], times[base]) for name in others}
    return rows + [measured(question, name, f"{RATIO}{base}", "", values, sure=True) for name, values in ratios.items()]


def _states(settings: Settings) -> list[Row]:
    task = settings.task("update 25M")
    sizes = {name: updates.state_bytes(task.with_options(optimizer=name)) for name in KINDS}
    return [measured(STATE, name, "state a parameter", "bytes", [size]) for name, size in sizes.items()]
