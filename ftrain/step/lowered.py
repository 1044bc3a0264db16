"""The record of a compiled step: what `Step.lower` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftrain.backends.format_bytes import format_bytes
from ftrain.step.traffic import Traffic

MOST_SHOWN = 5


@dataclass(frozen=True)
class Lowered:
    """What `ftrain.Step.lower` found out; `print` shows it.

    Args:
        lowering: ``"whole"``, ``"split"``, or ``"eager"`` where the compiler failed.
        graphs: how many graphs a step runs; 0 where it runs eagerly.
        nodes: how often each operation is called in them, most frequent first.
        peak_bytes: bytes of intermediate results alive at once, at most, if every operation ran by itself in
            the order it was captured in; what a compiler fuses is never stored, so it is an estimate from
            above. None where the graphs are not known as a whole.
        breaks: why and where the loss is split into several graphs, one text each.
        traffic: what each rank sends in a step on many ranks, most first, as it was captured: a compiler may join
            collectives. Empty where the graphs are not known as a whole.
    """

    lowering: str
    graphs: int
    nodes: Mapping[str, int]
    peak_bytes: int | None
    breaks: tuple[str, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    def __repr__(self) -> str:
        total, shown = sum(self.nodes.values()), list(self.nodes.items())[:MOST_SHOWN]
        often = ", ".join(f"{count} {name}" for name, count in shown)
        peak = "unknown" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        lines = [
            f"lowering  {self.lowering}, {self.graphs} {'graph' if self.graphs == 1 else 'graphs'}",
            f"nodes     {total:,} ({often}{', ...' if len(self.nodes) > len(shown) else ''})",
            f"peak      {peak} of intermediate results",
            *(f"sends     {format_bytes(sent)} in {calls} {kind} ({axis})" for kind, axis, calls, sent in self.traffic),
            *(f"break     {text}" for text in self.breaks),
        ]
        return "\n".join(lines)
