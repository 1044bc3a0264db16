"""What `tune` tried, and how it prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ftrain.backends.format_bytes import format_bytes
from ftrain.profiling.hints import Hint
from ftrain.profiling.timing import Interval
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.remat.wrapper import remat


@dataclass(frozen=True)
class Remat:
    """A choice of rematerialisation.

    Args:
        text: how it prints.
        wrapper: that makes it so; None for one that needs no wrapper.
    """

    text: str
    wrapper: Wrapper | None = None


UNCHANGED, ANY = Remat("as given"), Remat("any")
"""What the step of the user has, and what stands for all choices where none applies."""

NO_REMAT, FULL, DOTS = Remat("none"), Remat("full", remat()), Remat("dots", remat("dots"))
BUDGETS = tuple(Remat(f"budget={share:g}", remat(budget=share)) for share in (0.75, 0.5, 0.25))


@dataclass(frozen=True)
class Trial:
    """A number of microbatches with a policy of rematerialisation, and the results.

    Args:
        pieces: number of microbatches.
        remat: what is rematerialised.
        step: the step composed so.
        predicted: peak memory in bytes; None where it could not be predicted.
        flops: floating-point operations of a step.
        seconds: of a step; None where it was not timed.
        measured: peak memory in bytes; of the fastest alone.
        verdict: why it was chosen, or was not.
    """

    pieces: int
    remat: Remat
    step: Step = dataclasses.field(repr=False)
    predicted: int | None = None
    flops: int = 0
    seconds: Interval | None = None
    measured: int | None = None
    verdict: str = ""

    @property
    def policy(self) -> str:
        """What is rematerialised, as it prints."""
        return self.remat.text


@dataclass(frozen=True)
class Trials:
    """What `tune` tried; `print` shows it.

    Args:
        step: the one that was chosen.
        rows: all that were tried.
        memory: the limit in bytes.
        examples: in a batch.
        hints: what makes the chosen step slow; none where nothing was timed.
    """

    step: Step
    rows: Sequence[Trial]
    memory: int
    examples: int
    hints: Sequence[Hint] = ()

    def __repr__(self) -> str:
        least = min((row.flops for row in self.rows if row.flops), default=1)
        lines = [f"{self.examples:,} examples within {format_bytes(self.memory)}", ""]
        lines.append(f"{'pieces':>6}  {'remat':<12} {'predicted':>12} {'FLOP':>6} {'ms a step':>10} {'examples/s':>11}")
        for row in self.rows:
            took = row.seconds.median if row.seconds else None
            cells = [
                f"{row.pieces:>6}  {row.policy:<12}",
                f"{'' if row.predicted is None else format_bytes(row.predicted):>12}",
                f"{f'x{row.flops / least:.2f}' if row.flops else '':>6}",
                f"{'' if took is None else f'{took * 1e3:,.1f}':>10}",
                f"{'' if took is None else f'{self.examples / took:,.1f}':>11}",
            ]
            lines.append(f"{' '.join(cells)}  {row.verdict}".rstrip())
        if self.hints:
            lines += ["", *(f"  {hint}" for hint in self.hints)]
        return "\n".join(lines)
