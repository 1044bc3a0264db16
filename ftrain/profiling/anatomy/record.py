"""The result of `anatomy`: numbers, a table and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from ftrain.profiling.anatomy.drawing import draw
from ftrain.profiling.anatomy.kinds import ACTIVATIONS, COPIES, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ftrain.profiling.anatomy.mesh_layout import MeshLayout
from ftrain.profiling.anatomy.timeline import Allocation, Timeline
from ftrain.step.flops import GROUPS
from ftrain.step.traffic import Traffic, traffic_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = PARAMETERS, COPIES, OPTIMIZER, GRADIENTS
"""The kinds that are counted in bytes a parameter."""

MOST_SHOWN = 12
OVERHEAD = "what the framework and its kernels take for themselves"
EAGER = "as if the step ran eagerly; compiled, it usually takes less"


@dataclass(frozen=True)
class Anatomy:
    """Where the memory and the work of a step go; `print` shows it.

    Args:
        timeline: every allocation and operation, as predicted; of a compiled step, those of the eager one.
        params: number of trained parameters, whole ones.
        compiled: whether the step is compiled, so that `peak`, that of the eager step, is usually too high.
        measured: bytes at the peak, measured; None where nothing was measured.
        seconds: time by group, measured; None where nothing was measured.
        layout: how the step is divided over ranks, of which this is the first; None for one that is not.
    """

    timeline: Timeline = field(repr=False)
    params: int
    compiled: bool = False
    measured: int | None = None
    seconds: Mapping[str, float] | None = None
    layout: MeshLayout | None = None

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak, predicted; of a compiled step, those of the eager one."""
        return max(self.timeline.curve(), default=0)

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak, by what they are for."""
        sizes = Counter[str]()
        for allocation in self._alive_at_peak:
            sizes[allocation.kind] += allocation.size
        return {kind: sizes[kind] for kind in KINDS if sizes[kind]}

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes at the peak that are kept for the backward pass, by the module that computed them."""
        sizes = Counter[str]()
        for allocation in self._alive_at_peak:
            if allocation.kind == ACTIVATIONS:
                sizes[_block(allocation.module)] += allocation.size
        return dict(sizes)

    @property
    def _alive_at_peak(self) -> list[Allocation]:
        curve, timeline = self.timeline.curve(), self.timeline
        peak = curve.index(self.peak) if curve else 0
        return [each for each in timeline.allocations if each.start <= peak < timeline.end(each)]

    @cached_property
    def most(self) -> dict[str, int]:
        """The most bytes of each kind, whenever that is."""
        return {kind: max(self.timeline.curve(kind), default=0) for kind in KINDS}

    @cached_property
    def flops(self) -> dict[str, int]:
        """Floating-point operations by group."""
        counts = Counter[str]()
        for operation in self.timeline.operations:
            counts[operation.group] += operation.flops
        return dict(counts)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """What each rank sends in a step, by kind of collective and axis of the mesh; most first."""
        return [] if self.layout is None else traffic_of(self.timeline.collectives, self.layout.sizes)

    @property
    def at_rest(self) -> Counter[str]:
        """Bytes that are allocated before the step, by what they are for."""
        by_kind = Counter[str]()
        for allocation in self.timeline.allocations:
            if not allocation.phase:
                by_kind[allocation.kind] += allocation.size
        return by_kind

    @property
    def measured_ratio(self) -> float | None:
        """The measured peak divided by the predicted one; None where nothing was measured."""
        return None if self.measured is None else self.measured / max(self.peak, 1)

    @property
    def overhead(self) -> int | None:
        """Measured bytes beyond the predicted ones: what kernels allocate for their own use.

        None where nothing was measured, and of a compiled step, whose tensors are not those that were predicted.
        """
        return None if self.measured is None or self.compiled else self.measured - self.peak

    @property
    def bytes_a_parameter(self) -> dict[str, float]:
        """Bytes for each trained parameter: weights, their copies, optimizer state and gradients."""
        return {kind: self.most[kind] / max(self.params, 1) for kind in WEIGHTS if self.most.get(kind)}

    def as_dict(self) -> dict[str, Any]:
        """Return all but the timeline as dicts, text and numbers, which JSON can hold: bytes, operations, seconds."""
        totals = "peak", "compiled", "measured", "measured_ratio", "overhead", "params"
        tables = "at_peak", "at_rest", "activations", "most", "bytes_a_parameter", "flops"
        return {
            **{name: getattr(self, name) for name in totals},
            **{name: dict(getattr(self, name)) for name in tables},
            "seconds": None if self.seconds is None else dict(self.seconds),
            "layout": None if self.layout is None else self.layout._asdict(),
            "traffic": [row._asdict() for row in self.traffic],
        }

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Draw the memory over the operations of the step; needs matplotlib.

        Args:
            path: a PNG or SVG file to write. Default: none.

        Raises:
            OptionError: for a path with another suffix.
            FtrainError: when matplotlib is not installed.
        """
        curves = {kind: self.timeline.curve(kind) for kind in KINDS if self.most.get(kind)}
        return draw(curves, [each.phase for each in self.timeline.operations], path)

    def __repr__(self) -> str:
        return "\n".join([*self._memory(), *self._sent(), "", *self._work()])

    def _memory(self) -> list[str]:
        unit, name = _unit(self.peak, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        peak = f"{self.peak / unit:,.1f} {name} at the peak{self._where()}, predicted"
        if self.compiled:
            peak += f" {EAGER}"
        if self.measured is not None and self.measured_ratio is not None:
            ratio = f"{self.measured_ratio:.1%} of it" if self.compiled else f"{self.measured_ratio - 1:+.1%}"
            peak += f"; {self.measured / unit:,.1f} measured ({ratio})"
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
        modules = list(self.activations.items())
        others = sum(size for _, size in modules[MOST_SHOWN:])
        return [*modules[:MOST_SHOWN], ("(others)", others)] if others else modules[:MOST_SHOWN]

    def _where(self) -> str:
        if self.layout is None:
            return ""
        replicate, shard, level = self.layout
        return f" of one of {self.layout.ranks:,} ranks (replicate={replicate}, shard={shard}, level={level})"

    def _sent(self) -> list[str]:
        if not self.traffic:
            return []
        total = sum(row.sent for row in self.traffic)
        unit, name = _unit(total, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        lines = ["", f"{total / unit:,.1f} {name} sent by each rank in a step, if collectives are rings"]
        for row in self.traffic:
            what = f"{row.kind}, {row.axis}"
            lines.append(
                f"  {what:<26} {row.sent / unit:>12,.1f} {name}  {row.sent / max(total, 1):6.1%}  {row.calls:,} calls"
            )
        return lines

    def _work(self) -> list[str]:
        total = sum(self.flops.values())
        unit, name = _unit(total, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))
        lines = [f"{total / unit:,.2f} {name} a step"]
        total_seconds = sum((self.seconds or {}).values())
        for group in GROUPS:
            count = self.flops.get(group, 0)
            line = f"  {group:<26} {count / unit:>12,.3f} {name}  {count / max(total, 1):6.1%}"
            if self.seconds is not None:
                seconds = self.seconds.get(group, 0.0)
                line += f"  {seconds * 1e3:>10,.2f} ms  {seconds / max(total_seconds, 1e-12):6.1%}"
            lines.append(line)
        return lines


def _unit(value: int, base: int, names: Sequence[str]) -> tuple[int, str]:
    """Return the largest unit that is at most the value, and its name."""
    power = max((n for n in range(len(names)) if value >= base**n), default=0)
    return base**power, names[power]


def _block(name: str) -> str:
    """Return the name under which a table shows a module: its first numbered part, or its first part.

    >>> _block("blocks.0.feed.up"), _block("head"), _block("model.layers.11.mlp")
    ('blocks.0', 'head', 'model.layers.11')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
