"""The sum of gradients over the ranks of a mesh, compressed where bandwidth is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optree import PyTreeSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain.errors import ComposeError, OptionError
from ftrain.parallel.compression.memory_slot import SLOT, Stored, memories_of, stored_of
from ftrain.parallel.compression.method import Compression, Exchange
from ftrain.parallel.mesh import REPLICATE, SHARD, all_ranks, group
from ftrain.parallel.partition import Part, scatter_all
from ftrain.step.wrapper import SlotSpec, Wrapper
from ftrain.types import PyTree


class Reduction:
    """A compression method on a mesh: between the copies of a state, or between all ranks if it has no copies.

    Args:
        method: compression method; None if gradients are sent as they are.
        mesh: mesh of shape (replicate, shard).
        level: level of `sharded`.

    Raises:
        OptionError: at level 3 on a mesh with one copy of the state, whose gradients are added block by block.
    """

    def __init__(self, method: Compression | None, mesh: DeviceMesh, level: int) -> None:
        self._shard, self._level = group(mesh, SHARD), level
        self._of_blocks = level > 0 and mesh.size(0) > 1
        self.text = f", reduce={method.text}" if method else ""
        self.needs_all = method is not None
        """Whether all gradients must exist at once; also on one rank, where they are not compressed."""
        if method and level == 3 and mesh.size(0) == 1 < mesh.size(1):
            raise OptionError(
                f"sharded: reduce is {method.text} at level 3 on a mesh of {mesh.size(0)}x{mesh.size(1)}, where "
                "gradients are added while the backward pass runs, in their own dtype, and there is no other copy of "
                "the state to send them to; use level=2, or ft.parallel.mesh(replicate=...)"
            )
        self._remembering = method.text if method is not None and method.init is not None else None
        self._method = method if mesh.size() > 1 else None
        self._ranks = group(mesh, REPLICATE) if self._of_blocks else all_ranks(mesh)
        has_memory = self._method is not None and self._method.init is not None
        self._stored = Stored(self._method, mesh, self._of_blocks) if self._method and has_memory else None

    @property
    def is_active(self) -> bool:
        """Whether gradients are compressed; one rank sends none."""
        return self._method is not None

    @property
    def slot(self) -> SlotSpec | None:
        """The part of the state for the memory of the method, if it has one."""
        return SlotSpec(self._stored.init) if self._stored else None

    @property
    def sends(self) -> str:
        """What ranks send for the gradients, and with which kind of collective; empty on one rank."""
        is_divided = self._level > 0 and self._shard.size > 1
        within = self._shard.scatter_kind if is_divided else "all-reduce"
        texts = []
        if is_divided and self._of_blocks:
            texts.append(f"{within} of gradients")
            within = "all-reduce"
        if self._method is not None:
            texts.append(self._method.sends.format(sum=within, gather=self._ranks.gather_kind))
        elif self._ranks.size > 1:
            texts.append(f"{within} of {'their parts' if texts else 'gradients'}")
        return "; ".join(texts)

    def require_once(self, wrappers: Sequence[Wrapper]) -> None:
        """Check that the gradient is taken once per step if what has not been sent is added to the next one.

        Also on one rank, which sends nothing, so that a step can run on many.

        Raises:
            ComposeError: naming the wrapper that takes it more than once.
        """
        twice = [other for other in wrappers if other.grad is not None and other.grad.evaluations > 1]
        if self._remembering is not None and twice:
            raise ComposeError(
                f"sharded: {twice[0].text} takes several gradients in a step, and {self._remembering} adds to each "
                "what was not sent of the last one; use reduce='bf16' or 'fp16', which add nothing"
            )

    def __call__(
        self, grads: list[Tensor], parts: Sequence[Part | None], slots: Mapping[str, PyTree], params: PyTreeSpec
    ) -> tuple[list[Tensor], dict[str, PyTree]]:
        """Return what this rank needs of the sums of gradients, and the new slots.

        Args:
            grads: gradients of this rank: whole ones; at level 3 its blocks of those of its copy of the state.
            parts: how the parameters are divided.
            slots: slots of the state, with the leaves of this rank.
            params: the structure of the parameters.
        """
        method: Compression = self._method  # type: ignore[assignment]
        if self._of_blocks:
            grads = scatter_all(self._shard, grads, parts) if self._level < 3 else grads
            parts = [None] * len(grads)
        memories = memories_of(slots[SLOT], params) if self._stored else [{} for _ in grads]
        sums, memories = method.combine(grads, memories, Exchange(self._ranks, parts))
        return sums, {SLOT: stored_of(memories, params)} if self._stored else {}
