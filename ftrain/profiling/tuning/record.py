"""The candidates of `tune` and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ftrain.backends.format_bytes import format_bytes
from ftrain.profiling.anatomy.planned import MeshLayout
from ftrain.profiling.hints import Hint
from ftrain.profiling.timing import Interval
from ftrain.step.step import Step
from ftrain.transforms.remat.wrapper import remat

FLOPS, NODE, NETWORK = 400e12, 400e9, 50e9
"""Assumed rates of a device: FLOPs per second; bytes per second within its node, and to other nodes.

For an H100 (NVIDIA's data sheet): 40% of the dense bfloat16 rate, most of the NVLink rate, and a network of 400 Gbit/s.
Only the ratios matter, and an A100 has similar ones."""


UNCHANGED, ANY = "as given", "any"
"""Choices of rematerialisation in a row: that of the user's step, and all if none of them applies."""

NO_REMAT, FULL, DOTS = "none", "full", "dots"
BUDGETS = {f"budget={share:g}": remat(budget=share) for share in (0.75, 0.5, 0.25)}
WRAPPERS = {FULL: remat(), DOTS: remat("dots"), **BUDGETS}
"""Choice of rematerialisation -> its wrapper, for those that have one."""


@dataclass(frozen=True)
class Trial:
    """A candidate of `tune`: the step with a number of microbatches and a choice of rematerialisation."""

    microbatches: int
    policy: str
    """The choice of rematerialisation."""
    step: Step = dataclasses.field(repr=False)
    predicted: int | None = None
    """Bytes at the peak; None if they cannot be predicted."""
    fits: bool = False
    """Whether these bytes are within the limit."""
    flops: int = 0
    seconds: Interval | None = None
    """Time of the step; None if it was not timed."""
    measured: int | None = None
    """Bytes at the peak; None if they were not measured."""
    verdict: str = ""
    """Why it was chosen, or why not."""

    @property
    def setting(self) -> str:
        """What distinguishes it, for messages."""
        return f"microbatches={self.microbatches}, remat={self.policy}"


@dataclass(frozen=True)
class Trials:
    """The result of `trials`; `print` shows it as a table.

    It has the chosen step, all candidates, the limit of memory in bytes, the number of examples of the batch (None if
    its tensors do not agree on it), and hints for the chosen step, if it was timed.
    """

    step: Step
    rows: Sequence[Trial]
    memory: int
    examples: int | None
    hints: Sequence[Hint] = ()

    def __repr__(self) -> str:
        least = min((row.flops for row in self.rows if row.flops), default=1)
        count, unit = (1, "batches") if self.examples is None else (self.examples, "examples")
        size = "1 batch" if self.examples is None else f"{count:,} examples"
        lines = [
            f"{size} within {format_bytes(self.memory)}",
            "",
            f"{'microbatches':>12}  {'remat':<12} {'predicted':>12} {'FLOP':>6} {'ms/step':>10} {f'{unit}/s':>11}",
        ]
        for row in self.rows:
            seconds = row.seconds.median if row.seconds else None
            cells = [
                f"{row.microbatches:>12}  {row.policy:<12}",
                f"{'' if row.predicted is None else format_bytes(row.predicted):>12}",
                f"{f'x{row.flops / least:.2f}' if row.flops else '':>6}",
                f"{'' if seconds is None else f'{seconds * 1e3:,.1f}':>10}",
                f"{'' if seconds is None else f'{count / seconds:,.1f}':>11}",
            ]
            lines.append(f"{' '.join(cells)}  {row.verdict}".rstrip())
        if self.hints:
            lines += ["", *(f"  {hint}" for hint in self.hints)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class MeshTrial(Trial):
    """A candidate of `tune` for a mesh, which has a layout of ranks too."""

    layout: MeshLayout
    sent: int = 0
    """Bytes that each rank sends per step."""
    between: int = 0
    """The part of these bytes that goes to other nodes."""

    @property
    def setting(self) -> str:
        """What distinguishes it, for messages."""
        return f"{super().setting} and {self.layout}"

    @property
    def estimate(self) -> float:
        """Seconds of the step at the rates `FLOPS`, `NODE` and `NETWORK`, without overlap."""
        return self.flops / FLOPS + (self.sent - self.between) / NODE + self.between / NETWORK


@dataclass(frozen=True, kw_only=True)
class MeshTrials(Trials):
    """The result of `trials` for a mesh of (nodes, devices per node); `print` shows it as a table."""

    mesh: tuple[int, int]

    def __repr__(self) -> str:
        nodes, devices = self.mesh
        lines = [
            f"{nodes} x {devices} ranks, {self.examples:,} examples, each rank within {format_bytes(self.memory)}",
            f"Seconds are an estimate, at {FLOPS / 1e12:.0f} TFLOP/s, {NODE / 1e9:.0f} GB/s in a node and "
            f"{NETWORK / 1e9:.0f} GB/s between nodes, without overlap",
            "",
            f"{'replicate x shard':>17} {'level':>5} {'microbatches':>12}  {'remat':<5} {'predicted':>10} {'FLOP':>6} "
            f"{'sent':>10} {'to nodes':>10} {'seconds':>8}",
        ]
        least = min((row.flops for row in self.rows if row.flops), default=1)
        for row in cast("list[MeshTrial]", self.rows):
            cells = [
                f"{f'{row.layout.replicate} x {row.layout.shard}':>17} {row.layout.level:>5}",
                f"{row.microbatches:>12}  {row.policy:<5}",
                f"{'' if row.predicted is None else format_bytes(row.predicted):>10}",
            ]
            if row.flops:
                cells += [
                    f"{f'x{row.flops / least:.2f}':>6} {format_bytes(row.sent):>10} {format_bytes(row.between):>10}"
                ]
                cells += [f"{row.estimate:>8,.3g}"]
            lines.append(f"{' '.join(cells)}  {row.verdict}".rstrip())
        return "\n".join(lines)
