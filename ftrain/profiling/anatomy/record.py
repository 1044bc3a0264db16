"""What `anatomy` found, as numbers, a table and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from ftrain.profiling.anatomy.drawing import draw
from ftrain.profiling.anatomy.kinds import ACTIVATIONS, COPIES, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ftrain.profiling.anatomy.timeline import Timeline
from ftrain.step.flops import GROUPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = PARAMETERS, COPIES, OPTIMIZER, GRADIENTS
"""What is counted in bytes a parameter."""

MOST_SHOWN = 12
OVERHEAD = "what the framework and its kernels take for themselves"


@dataclass(frozen=True)
class Anatomy:
    """Where the memory and the work of a step go; `print` shows it.

    Args:
        peak: bytes at most, predicted.
        at_peak: of these, by what they are for.
        activations: of these, those kept for the backward pass, by the module that made them.
        most: bytes at most of each kind, whenever that is.
        params: number of parameters that train.
        flops: floating-point operations by group.
        measured: bytes at most, measured; None where nothing was.
        seconds: time by group, measured; None where nothing was.
        timeline: all of it.
    """

    peak: int
    at_peak: Mapping[str, int]
    activations: Mapping[str, int]
    most: Mapping[str, int]
    params: int
    flops: Mapping[str, int]
    measured: int | None
    seconds: Mapping[str, float] | None
    timeline: Timeline = field(repr=False)

    @property
    def at_rest(self) -> Counter[str]:
        """Bytes that are there before the step begins, by what they are for."""
        found = Counter[str]()
        for piece in self.timeline.pieces:
            if not piece.phase:
                found[piece.kind] += piece.size
        return found

    @property
    def overhead(self) -> int | None:
        """Bytes that were measured beyond those that were predicted: what kernels take for themselves."""
        return None if self.measured is None else self.measured - self.peak

    @property
    def bytes_a_parameter(self) -> dict[str, float]:
        """Bytes for each trained parameter: weights, their copies, optimizer state and gradients."""
        return {kind: self.most[kind] / max(self.params, 1) for kind in WEIGHTS if self.most.get(kind)}

    def as_dict(self) -> dict[str, Any]:
        """Return all but the timeline as dicts, text and numbers, such as JSON can hold: bytes, operations, seconds."""
        whole = "peak", "measured", "overhead", "params"
        parts = "at_peak", "at_rest", "activations", "most", "bytes_a_parameter", "flops"
        told = {name: getattr(self, name) for name in whole} | {name: dict(getattr(self, name)) for name in parts}
        return {**told, "seconds": None if self.seconds is None else dict(self.seconds)}

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Draw the memory over the operations of the step, into a PNG or SVG if there is a path; needs matplotlib.

        Raises:
            OptionError: for a path that ends in something else.
            FtrainError: when matplotlib is not installed.
        """
        curves = {kind: self.timeline.curve(kind) for kind in KINDS if self.most.get(kind)}
        return draw(curves, [each.phase for each in self.timeline.operations], path)

    def __repr__(self) -> str:
        return "\n".join([*self._memory(), "", *self._work()])

    def _memory(self) -> list[str]:
        unit, name = _unit(self.peak, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        peak = f"{self.peak / unit:,.1f} {name} at the peak, predicted"
        if self.measured is not None:
            peak += f"; {self.measured / unit:,.1f} measured ({self.measured / max(self.peak, 1) - 1:+.1%})"
        lines = [peak]
        for kind, size in self.at_peak.items():
            lines.append(f"  {kind:<26} {size / unit:>12,.1f} {name}  {size / self.peak:6.1%}")
            if kind == ACTIVATIONS:
                lines += [f"    {part or '(loss)':<24} {held / unit:>12,.1f} {name}" for part, held in self._shown()]
        if self.overhead is not None:
            lines.append(f"  {'measured beyond that':<26} {self.overhead / unit:>12,.1f} {name}  {OVERHEAD}")
        each = self.bytes_a_parameter
        parts = " + ".join(f"{value:.3g} {kind}" for kind, value in each.items())
        return [*lines, f"{sum(each.values()):.3g} bytes a parameter: {parts}"]

    def _shown(self) -> list[tuple[str, int]]:
        found = list(self.activations.items())
        rest = sum(size for _, size in found[MOST_SHOWN:])
        return [*found[:MOST_SHOWN], *[("(others)", rest)] * bool(rest)]

    def _work(self) -> list[str]:
        total = sum(self.flops.values())
        unit, name = _unit(total, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
        lines, spent = [f"{total / unit:,.2f} {name} a step"], sum((self.seconds or {}).values())
        for group in GROUPS:
            count = self.flops.get(group, 0)
            line = f"  {group:<26} {count / unit:>12,.3f} {name}  {count / max(total, 1):6.1%}"
            if self.seconds is not None:
                time = self.seconds.get(group, 0.0)
                line += f"  {time * 1e3:>10,.2f} ms  {time / max(spent, 1e-12):6.1%}"
            lines.append(line)
        return lines


def _unit(value: int, base: int, names: Sequence[str]) -> tuple[int, str]:
    """The largest unit of which there is one."""
    power = max((n for n in range(len(names)) if value >= base**n), default=0)
    return base**power, names[power]


def summarise(timeline: Timeline, params: int) -> Anatomy:
    """Return what a timeline shows, before anything is measured."""
    curves = {kind: timeline.curve(kind) for kind in KINDS}
    whole = timeline.curve()
    peak = max(whole, default=0)
    moment = whole.index(peak) if whole else 0
    alive = [piece for piece in timeline.pieces if piece.born <= moment < timeline.end(piece)]
    at_peak, modules, flops = Counter[str](), Counter[str](), Counter[str]()
    for piece in alive:
        at_peak[piece.kind] += piece.size
        if piece.kind == ACTIVATIONS:
            modules[_block(piece.module)] += piece.size
    for operation in timeline.operations:
        flops[operation.group] += operation.flops
    most = {kind: max(curve, default=0) for kind, curve in curves.items()}
    shown = {kind: at_peak[kind] for kind in KINDS if at_peak[kind]}
    return Anatomy(peak, shown, dict(modules), most, params, dict(flops), None, None, timeline)


def _block(name: str) -> str:
    """The part of a module that a table shows: of ``blocks.0.feed.up`` ``blocks.0``.

    >>> _block("blocks.0.feed.up"), _block("head"), _block("model.layers.11.mlp")
    ('blocks.0', 'head', 'model.layers.11')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
