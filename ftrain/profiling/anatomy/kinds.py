"""What memory is for, by when it came and went."""

from __future__ import annotations

from ftrain.profiling.anatomy.timeline import Piece, Timeline
from ftrain.transforms.compile.plan import BACKWARD, FORWARD, UPDATE

KINDS = (
    "parameters",
    "frozen parameters",
    "low-precision copies",
    "optimizer state",
    "gradients",
    "activations",
    "buffers and slots",
    "batch",
    "next state",
    "temporaries",
)
PARAMETERS, FROZEN, COPIES, OPTIMIZER, GRADIENTS, ACTIVATIONS, REST, BATCH, NEXT, TEMPORARIES = KINDS


def name_the_rest(timeline: Timeline, update: int) -> None:
    """Say of pieces what they were for, by when they came and went; `update` is the first operation of the update."""
    backward = [number for number, each in enumerate(timeline.operations) if each.phase == BACKWARD]
    starts = [n for n, before in zip(backward, [-2, *backward], strict=False) if n != before + 1]
    ends = [n for n, following in zip(backward, [*backward[1:], -1], strict=True) if n + 1 != following]
    after = min(ends, default=update)

    def outlives(piece: Piece, moments: list[int]) -> bool:
        return any(piece.born <= moment < timeline.end(piece) - 1 for moment in moments)

    for piece in timeline.pieces:
        if piece.kind:
            continue
        if piece.phase == FORWARD and _is_parameter(piece.source):
            piece.kind = COPIES
        elif piece.phase == FORWARD and outlives(piece, starts):
            piece.kind = ACTIVATIONS
        elif (
            outlives(piece, ends) if piece.phase == BACKWARD else piece.phase == UPDATE and after < piece.born < update
        ):
            # What is left of a backward pass, and what is made of it before the update: sums, clipped ones.
            piece.kind = GRADIENTS
        else:
            piece.kind = TEMPORARIES


def _is_parameter(piece: Piece | None) -> bool:
    return piece is not None and piece.kind in (PARAMETERS, FROZEN, COPIES)
