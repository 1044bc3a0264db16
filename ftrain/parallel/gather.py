"""Whole parameters of which each rank has a part, so that the gradient of each part is the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ftrain.parallel.gradient_sums import GradientSums, Start
from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part, Results, start_gather_all, start_scatter_all


class Parameters:
    """The parameters of one forward pass, of which this rank has parts; the gradients of the parts are sums over ranks.

    Args:
        group: the ranks that have a part each.
        locals_: the parts of this rank by name; those that require no gradient are gathered without one.
        parts: how each is divided; None for one that every rank has.
        over_copies: see `GradientSums`.

    Attributes:
        narrow: the dtype in which parameters with two or more axes are gathered; None for their own.
    """

    def __init__(
        self,
        group: Group,
        locals_: Mapping[Hashable, Tensor],
        parts: Mapping[Hashable, Part | None],
        over_copies: Start | None = None,
    ) -> None:
        self.group, self.leaves, self.parts = group, locals_, parts
        trained = [name for name, local in locals_.items() if local.requires_grad]
        self.sums = GradientSums([str(name) for name in trained], [locals_[name] for name in trained], over_copies)
        self._numbers = {name: number for number, name in enumerate(trained)}
        self._trained_parts = [parts[name] for name in trained]
        self._trained_dtypes = [locals_[name].dtype for name in trained]
        self._locals = {name: local.detach() for name, local in locals_.items()}
        self.narrow: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.leaves.values())).device

    def whole_bytes(self, names: Sequence[Hashable]) -> int:
        """Return the size in bytes of whole tensors."""
        return sum(
            local.nbytes if part is None else part.padded * part.size * self._dtype(local).itemsize
            for local, part in ((self._locals[name], self.parts[name]) for name in names)
        )

    def start_gather(self, names: Sequence[Hashable]) -> Results:
        """Start to gather whole tensors, which have no gradient yet."""
        locals_ = [self._locals[name] for name in names]
        return start_gather_all(
            self.group, [local.to(self._dtype(local)) for local in locals_], [self.parts[name] for name in names]
        )

    def _dtype(self, local: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter is gathered."""
        is_wide = local.dim() > 1 and local.is_floating_point()
        return self.narrow if self.narrow is not None and is_wide else local.dtype

    def joined(
        self, names: Sequence[Hashable], wholes: Sequence[Tensor], on_backward: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """Return gathered tensors whose gradients are reduce-scattered when all of them are complete.

        Args:
            names: names of the parameters.
            wholes: what `start_gather` has gathered for these names.
            on_backward: function that is called when the gradients are complete.
        """

        def combine(numbers: Sequence[int], grads: list[Tensor]) -> Results:
            on_backward()
            return self._scattered(numbers, grads)

        indices = self._trained_of(names)
        numbers = [self._numbers[names[index]] for index in indices]
        new = self.sums.at_once([wholes[index] for index in indices], numbers, combine) if indices else []
        return _replaced(wholes, indices, new)

    def joined_in_buckets(self, names: Sequence[Hashable], wholes: Sequence[Tensor]) -> list[Tensor]:
        """As `joined`, for parameters that are used in this order throughout the model."""
        indices = self._trained_of(names)
        numbers = [self._numbers[names[index]] for index in indices]
        new = self.sums.in_buckets(
            {n: wholes[index] for n, index in zip(numbers, indices, strict=True)}, self._scattered
        )
        return _replaced(wholes, indices, [new[number] for number in numbers])

    def _trained_of(self, names: Sequence[Hashable]) -> list[int]:
        return [index for index, name in enumerate(names) if name in self._numbers]

    def _scattered(self, numbers: Sequence[int], grads: list[Tensor]) -> Results:
        # Gradients of what was gathered in another dtype are summed in the dtype of the parameters.
        wide = [grad.to(self._trained_dtypes[number]) for number, grad in zip(numbers, grads, strict=True)]
        return start_scatter_all(self.group, wide, [self._trained_parts[number] for number in numbers])


def _replaced(tensors: Sequence[Tensor], indices: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    results = list(tensors)
    for index, tensor in zip(indices, new, strict=True):
        results[index] = tensor
    return results
