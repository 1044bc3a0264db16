"""Whole parameters of which each rank has a part, so that the gradient of each part is the sum over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ftrain.parallel.gradient_sums import GradientSums
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, Results, start_gather_all

LARGEST = 4 << 30
"""Bytes of parameters above which nothing is gathered ahead: the computation needs the memory."""


class Parameters:
    """The parameters of one forward pass; the gradients of this rank's parts of them are sums over ranks.

    The arguments are those of `GradientSums`; parts that require no gradient are gathered without one. `narrow` is the
    dtype in which parameters with two or more axes are gathered; None for their own.
    """

    def __init__(
        self,
        group: Group,
        locals_: Mapping[Hashable, Tensor],
        parts: Mapping[Hashable, Part | None],
        copies: Group | None = None,
    ) -> None:
        self.group, self.leaves, self.parts = group, locals_, parts
        trained = {name: local for name, local in locals_.items() if local.requires_grad}
        self.sums = GradientSums(group, trained, parts, copies)
        self.narrow: torch.dtype | None = None
        self._ahead: tuple[Sequence[Hashable], Results] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device

    def start_ahead(self, names: Sequence[Hashable]) -> None:
        """Start to gather parameters that are probably needed next; at most one gather is started ahead.

        Ranks must start the same gathers in one order: a guess may depend only on what is the same on all ranks.
        """
        self.drop_ahead()
        if names and self._whole_bytes(names) <= LARGEST:
            self._ahead = names, self._start(names)

    def take(self, names: Sequence[Hashable]) -> dict[Hashable, Tensor]:
        """Return whole parameters by name, without gradients, whether their gather was started ahead or not."""
        if self._ahead is None or list(names) != list(self._ahead[0]):
            self.drop_ahead()
            return dict(zip(names, self._start(names)(), strict=True))
        (_, results), self._ahead = self._ahead, None
        return dict(zip(names, results(), strict=True))

    def drop_ahead(self) -> None:
        """Free what was started ahead and is not needed."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # A collective stays in memory until something waits for it.
            ahead[1]()

    def _start(self, names: Sequence[Hashable]) -> Results:
        locals_ = [self.leaves[name].detach() for name in names]
        return start_gather_all(
            self.group, [local.to(self._dtype(local)) for local in locals_], [self.parts[name] for name in names]
        )

    def _whole_bytes(self, names: Sequence[Hashable]) -> int:
        return sum(
            local.nbytes if part is None else part.padded * part.size * self._dtype(local).itemsize
            for local, part in ((self.leaves[name], self.parts[name]) for name in names)
        )

    def _dtype(self, local: Tensor) -> torch.dtype:
        is_wide = local.dim() > 1 and local.is_floating_point()
        return self.narrow if self.narrow is not None and is_wide else local.dtype
