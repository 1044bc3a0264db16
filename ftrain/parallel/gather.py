"""Gather whole parameters of which each rank has a part; the gradient of each part is the sum over ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ftrain.parallel.gradient_sums import GradientSums
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, Results, start_gather_all

MOST_PREFETCHED_BYTES = 4 << 30
"""Bytes of parameters above which nothing is prefetched: the computation needs the memory."""


class Parameters:
    """The parameters of one forward pass; the gradients of this rank's parts of them are sums over ranks.

    The arguments are those of `GradientSums`; parts that require no gradient are gathered without one. `matrix_dtype`
    is the dtype in which parameters with two or more axes are gathered; None for their own.
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
        self.matrix_dtype: torch.dtype | None = None
        self._prefetched: tuple[Sequence[Hashable], Results] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device

    def prefetch(self, names: Sequence[Hashable]) -> None:
        """Start to gather parameters that are probably needed next; an earlier prefetch is dropped.

        Ranks must start the same gathers in one order, so `names` may depend only on values that are equal on all.
        """
        self.drop_prefetched()
        if names and self._whole_bytes(names) <= MOST_PREFETCHED_BYTES:
            self._prefetched = names, self._start(names)

    def take(self, names: Sequence[Hashable]) -> dict[Hashable, Tensor]:
        """Return whole parameters by name, without gradients, whether they were prefetched or not."""
        if self._prefetched is not None and list(names) == list(self._prefetched[0]):
            results = self._prefetched[1]
            self._prefetched = None
        else:
            self.drop_prefetched()
            results = self._start(names)
        return dict(zip(names, results(), strict=True))

    def drop_prefetched(self) -> None:
        """Free what was prefetched and is not needed."""
        if self._prefetched is not None:
            results = self._prefetched[1]
            self._prefetched = None
            # A collective stays in memory until something waits for it.
            results()

    def _start(self, names: Sequence[Hashable]) -> Results:
        locals_ = [self.leaves[name].detach() for name in names]
        cast = [local.to(self._dtype(local)) for local in locals_]
        return start_gather_all(self.group, cast, [self.parts[name] for name in names])

    def _whole_bytes(self, names: Sequence[Hashable]) -> int:
        total = 0
        for name in names:
            local, part = self.leaves[name], self.parts[name]
            total += local.nbytes if part is None else part.padded * part.size * self._dtype(local).itemsize
        return total

    def _dtype(self, local: Tensor) -> torch.dtype:
        is_matrix = local.dim() > 1 and local.is_floating_point()
        return self.matrix_dtype if self.matrix_dtype is not None and is_matrix else local.dtype
