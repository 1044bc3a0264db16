"""The update alone: every optimizer of ftrain compared with torch's, eager and compiled, and the size of its state.

The gradients are given, and are constant while updates are timed. Each model has about a million parameters, so that an
update takes about a millisecond: in 10 leaves (five layers of a weight and a bias), in 148 (a GPT-2) or in 1,000 (500
layers). All parameters decay. Muon updates only the matrices.

Eager: `Optimizer.update` with the old state donated, compared with `torch.optim`: fused if possible, else `foreach`,
and with torch's default. Compiled: that update as one graph, as in a split step, compared with
`torch.compile(optimizer.step)`, on ten leaves and in a full run on more. The learning rate is an input of ftrain's
graph and a constant of torch's. An optimizer that torch does not have is compared with another library, and with AdamW.
"""

from __future__ import annotations

from bench import registry, updates
from bench.race import race
from bench.rows import RATIO, TIME, Row, measured
from bench.settings import Settings
from bench.stats import paired_ratios
from bench.tasks import Entrant
from bench.timing import interleaved, make_racer
from bench.updates import OPTIMIZERS

STATE = "C8 state, GPT of 25M parameters"
COUNTS = (10, 148, 1_000)
COMPARED = 8
"""How many updates are compared: more than five, since RAdam changes its formula at the sixth."""
ALL_COUNTS = ("adamw", "sgd, momentum")
"""Optimizers that are timed on all numbers of leaves, and compiled. In a full run, of half an hour, all of them are."""


def run(settings: Settings) -> list[Row]:
    """Time each optimizer, then those that torch does not have compared with AdamW; then measure the states."""
    rows = []
    for name in OPTIMIZERS:
        for count in COUNTS if settings.full or name in ALL_COUNTS else (148,):
            question = title(name, count)
            rows += _race(question, name, count, settings, _eager(name, settings))
            # A graph of 148 leaves compiles for half a minute, one of a thousand for minutes.
            if settings.full or (name in ALL_COUNTS and count == 10):
                rows += _race(f"{question}, compiled", name, count, settings, _compiled(name))
    return rows + _compared_with_adamw(settings) + _states(settings)


def title(name: str, count: int) -> str:
    """Return the name of the question about an optimizer on this number of leaves."""
    return f"C8 {name}, {count:,} leaves"


def _race(question: str, name: str, count: int, settings: Settings, entrants: list[Entrant]) -> list[Row]:
    if len(entrants) < 2:
        return []
    problem = f"update {count}"
    if count == 10 and OPTIMIZERS[name].blockwise:
        problem = "update 10 of whole blocks"
    task = settings.task(problem).with_options(optimizer=name)
    return race(
        question, task, entrants, settings, fraction=0.3, compared=COMPARED, tolerance=OPTIMIZERS[name].tolerance
    )


def _eager(name: str, settings: Settings) -> list[Entrant]:
    """Return the eager entrants of an optimizer; none if no other library has it."""
    spec = OPTIMIZERS[name]
    if spec.torch_name:
        # Torch's default is slower than its fused kernel, and the same as the only implementation of Muon.
        defaults = [] if spec.fused or spec.matrices_only else [registry.TORCH_DEFAULT]
        return [registry.TORCH, *defaults, registry.OURS_UPDATE]
    if spec.peer and settings.peers and (settings.full or not spec.peer_is_slow):
        library = spec.peer.split(":")[0].split(".")[0]
        return [registry.OPTIMIZERS[library], registry.OURS_UPDATE]
    return []


def _compiled(name: str) -> list[Entrant]:
    """Return ftrain's compiled update, and torch's compiled one or, if torch does not have it, ftrain's eager one."""
    other = registry.TORCH_COMPILED if OPTIMIZERS[name].torch_name else registry.OURS_UPDATE
    return [other, registry.OURS_UPDATE_COMPILED]


def _compared_with_adamw(settings: Settings) -> list[Row]:
    """Time the optimizers that torch does not have, and its AdamW; they compute different updates by design."""
    question, task = title("others", 148), settings.task("update 148")
    print(question, flush=True)
    racers = {registry.ADAMW.name: make_racer(registry.ADAMW, task)}
    for name, spec in OPTIMIZERS.items():
        if not spec.torch_name:
            racers[f"ftrain update, {name}"] = make_racer(registry.OURS_UPDATE, task.with_options(optimizer=name))
    times = interleaved(racers, rounds=settings.scaled_rounds(0.3), seconds=settings.seconds)
    rows = [measured(question, name, TIME, "us", values) for name, values in times.items()]
    base, *others = times
    ratios = {name: paired_ratios(times[name], times[base]) for name in others}
    return rows + [
        measured(question, name, f"{RATIO}{base}", "", values, interval=True) for name, values in ratios.items()
    ]


def _states(settings: Settings) -> list[Row]:
    task = settings.task("update 25M")
    sizes = {name: updates.state_bytes(task.with_options(optimizer=name)) for name in OPTIMIZERS}
    return [measured(STATE, name, "state a parameter", "bytes", [size]) for name, size in sizes.items()]
