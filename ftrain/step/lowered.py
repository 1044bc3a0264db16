"""The report on a compiled step that `Step.lower` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftrain.backends.format_bytes import format_bytes
from ftrain.step.traffic import Traffic

MOST_SHOWN = 5


@dataclass(frozen=True)
class Lowered:
    """A report on a compiled step, from `ftrain.Step.lower`; `print` shows it.

    Args:
        lowering: ``"whole"``, ``"split"``, or ``"eager"`` if the compiler failed.
        graphs: the number of graphs that a step runs; 0 if it runs eagerly.
        nodes: the number of calls of each operation in them, most frequent first.
        peak_bytes: an upper bound of the bytes of intermediate results that exist at once: a compiler does not store
            those that it fuses. None unless the step is captured whole.
        breaks: the reason and the place of each graph break in the loss.
        traffic: what each rank sends, most first; a compiler may join collectives. Only of a step captured whole.
    """

    lowering: str
    graphs: int
    nodes: Mapping[str, int]
    peak_bytes: int | None
    breaks: tuple[str, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    def __repr__(self) -> str:
        total = sum(self.nodes.values())
        most_frequent = [f"{count} {name}" for name, count in self.nodes.items()][:MOST_SHOWN]
        if len(self.nodes) > MOST_SHOWN:
            most_frequent.append("...")
        peak = "unknown" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        lines = [
            f"lowering  {self.lowering}, {self.graphs} {'graph' if self.graphs == 1 else 'graphs'}",
            f"nodes     {total:,} ({', '.join(most_frequent)})",
            f"peak      {peak} of intermediate results",
            *(f"sends     {format_bytes(sent)} in {calls} {kind} ({axis})" for kind, axis, calls, sent in self.traffic),
            *(f"break     {text}" for text in self.breaks),
        ]
        return "\n".join(lines)
