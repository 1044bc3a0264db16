"""The table of all wrappers: the laws test each entry alone, in pairs and in stacks.

`tests/laws/oracle.py` computes by hand what an entry must compute, under the same name.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ftrain as ft
from ftrain.step.wrapper import ARROWS

EMA, SWA, MAX_NORM, MAX_VALUE, RHO = 0.8, 1, 0.05, 0.002, 0.05
EMA_SCHEDULE = ft.schedules.linear(0.5, 1.0, 4)
SPIKES = {"factor": 0.9, "window": 2, "warmup": 1}


@dataclass(frozen=True)
class Entry:
    """One variant of a wrapper.

    Args:
        name: of the variant.
        factory: the public function.
        args: its arguments by position.
        options: its arguments by name.
        narrow: whether it computes in 16 bits; its model is then in float32.
        guards: whether it refuses updates whose loss or gradient is not finite.
        not_inside: names of the variants that may not be outside it.
        laws: the file with its laws, for a wrapper of `WITHOUT_ORACLE`.
        part: the part of a step that it works on, for a wrapper that only some machines can make.
    """

    name: str
    factory: Callable[..., ft.Wrapper]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    narrow: bool = False
    guards: bool = False
    not_inside: tuple[str, ...] = ()
    laws: str = ""
    part: str = ""

    def make(self):
        return self.factory(*self.args, **self.options)


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("bf16", ft.with_amp, ("bf16",), narrow=True),
        Entry("fp16", ft.with_amp, ("fp16",), narrow=True, guards=True),
        Entry("precision", ft.matmul_precision, ("high",)),
        Entry("remat", ft.remat),
        Entry("remat_dots", ft.remat, ("dots",)),
        Entry("accumulate", ft.accumulate, (2,)),
        Entry("clip", ft.clip, (MAX_NORM,)),
        Entry("clip_value", ft.clip, options={"value": MAX_VALUE}),
        Entry("sam", ft.sam, (RHO,)),
        Entry("spikes", ft.skip_spikes, options=SPIKES, not_inside=("accumulate",)),
        Entry("spikes_clip", ft.skip_spikes, options={**SPIKES, "action": "clip"}, not_inside=("accumulate",)),
        Entry("ema", ft.ema, (EMA,)),
        Entry("ema_schedule", ft.ema, (EMA_SCHEDULE,), part="update"),
        Entry("swa", ft.swa, (SWA,)),
        Entry("empty_cache", ft.empty_cache, (2,)),
        Entry("skip", ft.skip_nonfinite, (3,), guards=True),
    )
}

WITHOUT_ORACLE = (
    Entry("lora", ft.lora, (2,), {"targets": ["*"]}, laws="tests/transforms/lora/test_laws.py"),
    Entry("offload_activations", ft.offload, ("activations",), laws="tests/laws/test_offload_activations.py"),
    Entry("offload_opt_state", ft.offload, ("opt_state",), laws="tests/laws/test_offload_opt_state.py"),
    Entry("update_in_backward", ft.update_in_backward, laws="tests/laws/test_update_in_backward.py"),
    Entry("compiled", ft.compiled, laws="tests/laws/test_compiled.py"),
    Entry("donated", ft.donated, laws="tests/laws/test_pipelines.py"),
    Entry("sharded", ft.sharded, laws="tests/parallel/test_sharded.py", part="loss"),
    Entry("sync_batch_norm", ft.sync_batch_norm, laws="tests/parallel/test_sync_batch_norm.py"),
)
"""Wrappers whose laws compare whole pipelines with and without them; each is tested in a file of its own."""

EVERY = (*ENTRIES.values(), *WITHOUT_ORACLE)

NAMES = list(ENTRIES)
ALONE = [(), *((name,) for name in NAMES)]


def fits(*names):
    """Whether these wrappers may be composed in this order, innermost first."""
    pairs = itertools.combinations([ENTRIES[name] for name in names], 2)
    return all(inner.factory is not outer.factory and outer.name not in inner.not_inside for inner, outer in pairs)


PAIRS = [pair for pair in itertools.permutations(NAMES, 2) if fits(*pair)]


def arrows(name):
    """Return the arrows of a step on which a wrapper acts; one that may refuse updates acts on the update too."""
    wrapper = ENTRIES[name].make()
    changed = {arrow for arrow in ARROWS if getattr(wrapper, arrow) is not None}
    return changed | {"update"} if wrapper.may_refuse_updates else changed


SAME_ARROW = [(first, second) for first, second in PAIRS if arrows(first) & arrows(second)]
"""Pairs whose order may matter; wrappers of different arrows commute by construction."""

STACKS = [
    ("remat", "bf16", "accumulate", "clip", "ema", "swa", "skip"),
    ("remat_dots", "fp16", "accumulate", "clip", "skip", "ema"),
    ("swa", "skip", "ema", "clip_value", "accumulate", "fp16", "remat"),
    ("ema", "clip", "accumulate", "bf16", "remat_dots", "skip"),
    ("remat", "accumulate", "sam", "spikes", "clip", "ema", "skip"),
    ("fp16", "clip", "sam", "accumulate", "spikes_clip", "swa"),
]


def is_narrow(names):
    """Whether one of these wrappers computes in 16 bits."""
    return any(ENTRIES[name].narrow for name in names)


def is_guarded(names):
    """Whether one of these wrappers refuses updates whose loss or gradient is not finite."""
    return any(ENTRIES[name].guards for name in names)


def make(names):
    """Return the wrappers with these names."""
    return [ENTRIES[name].make() for name in names]
