"""What `tune` planned for the ranks of a mesh, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ftrain.backends.format_bytes import format_bytes
from ftrain.profiling.anatomy.mesh_layout import MeshLayout
from ftrain.profiling.tuning.record import Trial, Trials

FLOPS, NODE, NETWORK = 400e12, 400e9, 50e9
"""What a device is assumed to do in a second: floating-point operations; bytes to others of its node, and to others.

Of an H100 (NVIDIA's data sheet) 40% of the dense bfloat16 operations, most of NVLink, and 400 Gbit/s of network. What
counts are the ratios, and those of an A100 are alike."""


@dataclass(frozen=True, kw_only=True)
class MeshTrial(Trial):
    """A layout of ranks with a number of microbatches and a policy of rematerialisation, and what is predicted of it.

    Args:
        layout: of the ranks.
        sent: bytes that each rank sends in a step.
        between: those of them that go to another node.
    """

    layout: MeshLayout
    sent: int = 0
    between: int = 0

    @property
    def estimate(self) -> float:
        """Seconds of a step, if nothing overlaps and a device does what `FLOPS`, `NODE` and `NETWORK` say."""
        return self.flops / FLOPS + (self.sent - self.between) / NODE + self.between / NETWORK


@dataclass(frozen=True, kw_only=True)
class MeshTrials(Trials):
    """What `tune` planned for a mesh; `print` shows it.

    Args:
        mesh: (nodes, devices of each).
    """

    mesh: tuple[int, int]

    def __repr__(self) -> str:
        nodes, devices = self.mesh
        lines = [
            f"{nodes} x {devices} ranks, {self.examples:,} examples, each rank within {format_bytes(self.memory)}",
            f"Seconds are an estimate, at {FLOPS / 1e12:.0f} TFLOP/s, {NODE / 1e9:.0f} GB/s in a node and "
            f"{NETWORK / 1e9:.0f} GB/s between nodes, without overlap",
            "",
            f"{'replicate x shard':>17} {'level':>5} {'pieces':>6}  {'remat':<5} {'predicted':>10} {'FLOP':>6} "
            f"{'sent':>10} {'to nodes':>10} {'seconds':>8}",
        ]
        least = min((row.flops for row in self.rows if row.flops), default=1)
        for row in cast("list[MeshTrial]", self.rows):
            cells = [
                f"{f'{row.layout.replicate} x {row.layout.shard}':>17} {row.layout.level:>5}",
                f"{row.pieces:>6}  {row.policy:<5}",
                f"{'' if row.predicted is None else format_bytes(row.predicted):>10}",
            ]
            if row.flops:
                cells += [
                    f"{f'x{row.flops / least:.2f}':>6} {format_bytes(row.sent):>10} {format_bytes(row.between):>10}"
                ]
                cells += [f"{row.estimate:>8,.3g}"]
            lines.append(f"{' '.join(cells)}  {row.verdict}".rstrip())
        return "\n".join(lines)
