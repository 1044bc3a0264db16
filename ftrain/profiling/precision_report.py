"""`precision_report`: where a narrow dtype overflows or underflows, from the metrics of watched steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ftrain.errors import OptionError
from ftrain.transforms.amp.overflow_counts import GRAD_OVERFLOW, MODEL, OVERFLOW, is_share
from ftrain.types import Mean

MOST_SHOWN = 20


class PrecisionRow(NamedTuple):
    """The shares of elements, in [0, 1], of a part of a model that overflowed or underflowed in a narrow dtype.

    `ftrain.with_amp` defines them. `overflow` and `underflow` are shares of the outputs of a module or block, the
    others of the gradient of these outputs; 0 without a gradient. `first` is the first step with an overflow, forward
    or backward; None without one, or if the numbers of steps are not known.
    """

    part: str
    overflow: float = 0.0
    underflow: float = 0.0
    grad_overflow: float = 0.0
    grad_underflow: float = 0.0
    first: int | None = None


@dataclass(frozen=True)
class PrecisionReport:
    """The result of `precision_report`; `print` shows it as a table.

    It has a row for each watched part: first the innermost parts with an overflow, by step and share; then the parts
    that contain them, or whose gradient overflowed; then the others, by the share that underflowed.
    """

    rows: tuple[PrecisionRow, ...]

    def __repr__(self) -> str:
        losing = [row for row in self.rows if any(row[1:5])]
        shown = losing[:MOST_SHOWN]
        width = max(4, *(len(row.part) for row in shown)) if shown else 4
        lines = [f"{'part':<{width}}  overflow  underflow  grad overflow  grad underflow  first step"]
        for row in shown:
            shares = f"{_percent(row.overflow):>8}  {_percent(row.underflow):>9}  {_percent(row.grad_overflow):>13}"
            first = "" if row.first is None else row.first
            line = f"{row.part:<{width}}  {shares}  {_percent(row.grad_underflow):>14}  {first:>10}"
            lines.append(line.rstrip())
        if len(losing) > len(shown):
            lines.append(f"and {len(losing) - len(shown)} more, which lose less")
        return "\n".join([*lines, f"{len(self.rows) - len(losing)} of {len(self.rows)} parts lose nothing"])


def _percent(share: float) -> str:
    """Format a share so that only zero looks like zero."""
    if not share:
        return "-"
    return f"{share:.2%}" if share >= 5e-5 else "<0.01%"


def precision_report(metrics: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> PrecisionReport:
    """Return where a narrow dtype overflows or underflows in a model, from steps ``with_amp(..., watch=True)``.

    Waits for the device if the metrics are on one.

    Args:
        metrics: the metrics of one step, or the history of `ftrain.fit`, or some of its records. Shares are means over
        steps.

    Raises:
        OptionError: `metrics` is neither, or the steps were not watched.

    >>> print(precision_report([{"step": 7, "overflow/blocks.0": 0.25, "underflow/blocks.1": 0.5}]))
    part      overflow  underflow  grad overflow  grad underflow  first step
    blocks.0    25.00%          -              -               -           7
    blocks.1         -     50.00%              -               -
    0 of 2 parts lose nothing
    """
    records = list(metrics) if isinstance(metrics, Sequence) else [metrics]
    if wrong := [record for record in records if not isinstance(record, Mapping)]:
        raise OptionError(
            f"precision_report: found {type(wrong[0]).__name__}; needs the metrics of a step, or the history of ft.fit"
        )
    shares: dict[str, dict[str, list[float]]] = {}
    first: dict[str, int] = {}
    for record in records:
        for kind, part, share in _shares(record):
            shares.setdefault(part, {}).setdefault(kind, []).append(share)
            if share and kind in (OVERFLOW, GRAD_OVERFLOW) and "step" in record:
                first.setdefault(part, int(record["step"]))
    if not shares:
        raise OptionError(
            "precision_report: found no metric such as 'overflow/<part>'; watch the steps with ft.with_amp(dtype, "
            "watch=True), and pass their metrics or the history of ft.fit"
        )
    means = {
        part: {kind: sum(values) / len(values) for kind, values in kinds.items()} for part, kinds in shares.items()
    }
    rows = [PrecisionRow(part, **kinds, first=first.get(part)) for part, kinds in means.items()]
    overflowing = [row.part for row in rows if row.overflow]
    return PrecisionReport(tuple(sorted(rows, key=lambda row: _sort_key(row, overflowing))))


def _shares(record: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, value in record.items():
        if is_share(name) and isinstance(value, int | float | Tensor | Mean):
            kind, _, part = name.partition("/")
            share = float(value)
            # A part without elements has no share.
            yield kind, part, 0.0 if math.isnan(share) else share


def _sort_key(row: PrecisionRow, overflowing: Sequence[str]) -> tuple[Any, ...]:
    """Return the key that sorts rows as `PrecisionReport` says; `overflowing` are the parts with an overflow."""
    is_innermost = row.overflow and not any(_contains(row.part, other) for other in overflowing)
    if is_innermost:
        tier, share = 0, row.overflow
    elif row.overflow or row.grad_overflow:
        tier, share = 1, max(row.overflow, row.grad_overflow)
    else:
        tier, share = 2, max(row.underflow, row.grad_underflow)
    step = math.inf if row.first is None or tier == 2 else row.first
    depth = 0 if row.part == MODEL else row.part.count(".") + 1
    return tier, step, -share, -depth, row.part


def _contains(part: str, other: str) -> bool:
    return part != other and (part == MODEL or other.startswith(f"{part}."))
