"""The result of `anatomy`: numbers, a table and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING, Any

from ftrain._plotting import as_file, blank, save
from ftrain.backends.format_bytes import unit_of
from ftrain.profiling.anatomy.kinds import ACTIVATIONS, COPIES, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from ftrain.profiling.anatomy.planned import MeshLayout
from ftrain.profiling.anatomy.timeline import Allocation, Timeline
from ftrain.step.flops import GROUPS
from ftrain.step.traffic import Traffic, traffic_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = PARAMETERS, COPIES, OPTIMIZER, GRADIENTS
"""The kinds that count in bytes per parameter."""

FLOP_UNITS = "FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"
MOST_SHOWN = 12
OVERHEAD = "what the framework and its kernels allocate for their own use"
OUTSIDE = "The times are of operations that run outside of compiled kernels; those of the kernels are not known."
EAGER = "as if the step ran eagerly; compiled, it usually takes less"


@dataclass(frozen=True)
class Anatomy:
    """The memory and the work of a step; `print` shows it as a table.

    Args:
        timeline: all allocations and operations, predicted for the eager step even if the step is compiled.
        params: number of trained parameters, over all ranks.
        compiled: whether the step is compiled. Its `peak` is then usually too high, since it is that of the eager step.
        measured: bytes at the peak, measured; None if nothing was measured.
        seconds: time by group of operations, measured, without that of compiled kernels; None if nothing was measured.
        layout: how the step is divided over ranks; the anatomy is that of the first rank. None on one device.
    """

    timeline: Timeline = field(repr=False)
    params: int
    compiled: bool = False
    measured: int | None = None
    seconds: Mapping[str, float] | None = None
    layout: MeshLayout | None = None

    @cached_property
    def peak(self) -> int:
        """Bytes at the peak, predicted for the eager step."""
        return max(self.timeline.curve(), default=0)

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak, by kind."""
        sizes = _sums((allocation.kind, allocation.size) for allocation in self._alive_at_peak)
        return {kind: sizes[kind] for kind in KINDS if sizes[kind]}

    @cached_property
    def activations(self) -> dict[str, int]:
        """Bytes at the peak that are saved for the backward pass, by the module that computed them."""
        saved = [allocation for allocation in self._alive_at_peak if allocation.kind == ACTIVATIONS]
        return dict(_sums((_block(allocation.module), allocation.size) for allocation in saved))

    @property
    def _alive_at_peak(self) -> list[Allocation]:
        curve, timeline = self.timeline.curve(), self.timeline
        peak = curve.index(self.peak) if curve else 0
        return [each for each in timeline.allocations if each.start <= peak < timeline.end(each)]

    @cached_property
    def most(self) -> dict[str, int]:
        """The largest number of bytes of each kind at any time."""
        return {kind: max(self.timeline.curve(kind), default=0) for kind in KINDS}

    @cached_property
    def flops(self) -> dict[str, int]:
        """Floating-point operations by group."""
        return dict(_sums((each.group, each.flops) for each in self.timeline.operations))

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Bytes that each rank sends in a step, by kind of collective and axis of the mesh; most first."""
        return [] if self.layout is None else traffic_of(self.timeline.collectives, self.layout.sizes)

    @property
    def at_rest(self) -> Counter[str]:
        """Bytes that are allocated before the step, by kind."""
        return _sums((each.kind, each.size) for each in self.timeline.allocations if not each.phase)

    @property
    def measured_ratio(self) -> float | None:
        """The measured peak divided by the predicted one; None if nothing was measured."""
        return None if self.measured is None else self.measured / max(self.peak, 1)

    @property
    def overhead(self) -> int | None:
        """Measured minus predicted bytes: what kernels allocate for their own use.

        None if nothing was measured, and for a compiled step, whose tensors are not those of the prediction.
        """
        return None if self.measured is None or self.compiled else self.measured - self.peak

    @property
    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes per trained parameter: of weights, their copies, optimizer state and gradients."""
        return {kind: self.most[kind] / max(self.params, 1) for kind in WEIGHTS if self.most.get(kind)}

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the timeline as dicts, strings and numbers, for JSON: bytes, FLOPs, seconds."""
        totals = "peak", "compiled", "measured", "measured_ratio", "overhead", "params"
        tables = "at_peak", "at_rest", "activations", "most", "bytes_per_parameter", "flops"
        return {
            **{name: getattr(self, name) for name in totals},
            **{name: dict(getattr(self, name)) for name in tables},
            "seconds": None if self.seconds is None else dict(self.seconds),
            "layout": None if self.layout is None else self.layout._asdict(),
            "traffic": [row._asdict() for row in self.traffic],
        }

    def plot(self, path: str | PathLike[str] | None = None) -> Figure:
        """Plot the memory over the operations of the step.

        `path` is a PNG or SVG file to write. Raises an OptionError for another suffix, and an FtrainError without
        matplotlib.
        """
        file, figure = as_file(path), blank(8.0, 4.0)
        axes = figure.add_subplot()
        phases = [operation.phase for operation in self.timeline.operations]
        kinds = [kind for kind in KINDS if self.most.get(kind)]
        mebibytes = [[size / 2**20 for size in self.timeline.curve(kind)] for kind in kinds]
        axes.stackplot(range(len(phases)), mebibytes, labels=kinds, linewidth=0, step="post")
        axes.set(xlabel="operation", ylabel="MiB")
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
        start = 0
        for phase, operations in groupby(phases):
            length = len(list(operations))
            is_wide_enough_for_text = length > len(phases) / 20
            if is_wide_enough_for_text:
                axes.axvline(start, color="black", linewidth=0.5, alpha=0.4)
                middle, above = start + length / 2, axes.get_xaxis_transform()
                axes.text(middle, 1.0, phase, ha="center", va="bottom", transform=above)
            start += length
        figure.legend(loc="outside right upper", frameon=False, reverse=True)
        return save(figure, file)

    def __repr__(self) -> str:
        return "\n".join([*self._memory_lines(), *self._traffic_lines(), "", *self._work_lines()])

    def _memory_lines(self) -> list[str]:
        unit, name = unit_of(self.peak)
        on_rank = ""
        if self.layout is not None:
            replicate, shard, level = self.layout
            on_rank = f" of one of {self.layout.ranks:,} ranks (replicate={replicate}, shard={shard}, level={level})"
        peak = f"{self.peak / unit:,.1f} {name} at the peak{on_rank}, predicted"
        if self.compiled:
            peak += f" {EAGER}"
        if self.measured is not None and self.measured_ratio is not None:
            ratio = f"{self.measured_ratio:.1%} of it" if self.compiled else f"{self.measured_ratio - 1:+.1%}"
            peak += f"; {self.measured / unit:,.1f} measured ({ratio})"
        lines = [peak]
        for kind, size in self.at_peak.items():
            lines.append(f"  {kind:<26} {size / unit:>12,.1f} {name}  {size / self.peak:6.1%}")
            if kind == ACTIVATIONS:
                blocks = list(self.activations.items())
                others = sum(size for _, size in blocks[MOST_SHOWN:])
                shown = blocks[:MOST_SHOWN] + ([("(others)", others)] if others else [])
                lines += [f"    {block or '(loss)':<24} {size / unit:>12,.1f} {name}" for block, size in shown]
        if self.overhead is not None:
            lines.append(f"  {'measured beyond that':<26} {self.overhead / unit:>12,.1f} {name}  {OVERHEAD}")
        by_kind = self.bytes_per_parameter
        terms = " + ".join(f"{value:.3g} {kind}" for kind, value in by_kind.items())
        return [*lines, f"{sum(by_kind.values()):.3g} bytes per parameter: {terms}"]

    def _traffic_lines(self) -> list[str]:
        if not self.traffic:
            return []
        total = sum(row.sent for row in self.traffic)
        unit, name = unit_of(total)
        lines = ["", f"{total / unit:,.1f} {name} sent by each rank per step, if collectives are rings"]
        for row in self.traffic:
            label = f"{row.kind}, {row.axis}"
            lines.append(
                f"  {label:<26} {row.sent / unit:>12,.1f} {name}  {row.sent / max(total, 1):6.1%}  {row.calls:,} calls"
            )
        return lines

    def _work_lines(self) -> list[str]:
        total = sum(self.flops.values())
        unit, name = unit_of(total, 1000, FLOP_UNITS)
        lines = [f"{total / unit:,.2f} {name}/step"]
        total_seconds = sum((self.seconds or {}).values())
        for group in GROUPS:
            count = self.flops.get(group, 0)
            line = f"  {group:<26} {count / unit:>12,.3f} {name}  {count / max(total, 1):6.1%}"
            if self.seconds is not None:
                seconds = self.seconds.get(group, 0.0)
                line += f"  {seconds * 1e3:>10,.2f} ms  {seconds / max(total_seconds, 1e-12):6.1%}"
            lines.append(line)
        if self.compiled and self.seconds is not None:
            lines.append(f"  {OUTSIDE}")
        return lines


def _sums(pairs: Iterable[tuple[str, int]]) -> Counter[str]:
    """Return key -> sum of its numbers."""
    sums = Counter[str]()
    for key, number in pairs:
        sums[key] += number
    return sums


def _block(name: str) -> str:
    """Return the block of a module: its dotted name up to the first number, or the first part if there is no number.

    >>> _block("blocks.0.feed.up"), _block("head"), _block("model.layers.11.mlp")
    ('blocks.0', 'head', 'model.layers.11')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]
