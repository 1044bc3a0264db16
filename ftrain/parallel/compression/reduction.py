"""The sum of gradients over the ranks of a mesh, compressed where bandwidth is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from optree import PyTreeSpec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain.errors import ComposeError, OptionError
from ftrain.parallel.compression.memory_slot import SLOT, first_memory, memories_of, stored_of
from ftrain.parallel.compression.method import Compression, Exchange
from ftrain.parallel.compression.sixteen_bits import bf16, fp16
from ftrain.parallel.mesh import ALL, REPLICATE, SHARD, groups
from ftrain.parallel.partition import Part, start_scatter_all
from ftrain.step.wrapper import SlotSpec, Wrapper
from ftrain.types import PyTree

METHODS = {"fp32": None, "bf16": bf16(), "fp16": fp16()}


def compression_of(reduce: str | Compression) -> Compression | None:
    """Return the compression method of ``sharded(reduce=)``; None for ``"fp32"``. Raises an OptionError if invalid."""
    if isinstance(reduce, str) and reduce in METHODS:
        return METHODS[reduce]
    if not isinstance(reduce, Compression):
        raise OptionError(
            f"sharded: reduce is {reduce!r}; needs 'fp32' (no compression), 'bf16', 'fp16', ft.parallel.powersgd(rank) "
            "or ft.parallel.sign()"
        )
    return reduce


class Reduction:
    """A compression method on a mesh: between the copies of a state, or between all ranks if there is one copy.

    Attributes:
        text: what `print(step)` shows for it.
        needs_all: whether all gradients must exist at once; also on one rank, where they are not compressed.
        is_active: whether gradients are compressed; one rank sends none.
        slot: the part of the state for the memory of the method, if it has one.

    Raises an OptionError at level 3 on a mesh with one copy of the state, whose gradients are added block by block.
    """

    def __init__(self, reduce: str | Compression, mesh: DeviceMesh, level: int) -> None:
        method = compression_of(reduce)
        ranks = groups(mesh)
        self._method, self._level = method, level
        self._shard = ranks[SHARD]
        self._of_blocks = level > 0 and mesh.size(0) > 1
        self._ranks = ranks[REPLICATE if self._of_blocks else ALL]
        self.text = f", reduce={method.text}" if method else ""
        self.needs_all = method is not None
        if method and level == 3 and mesh.size(0) == 1 and mesh.size(1) > 1:
            raise OptionError(
                f"sharded: reduce is {method.text} at level 3 on a mesh of {mesh.size(0)}x{mesh.size(1)}, where "
                "gradients are added while the backward pass runs, in their own dtype, and there is no other copy of "
                "the state to send them to; use level=2, or ft.parallel.mesh(replicate=...)"
            )
        self.is_active = method is not None and mesh.size() > 1
        self.slot: SlotSpec | None = None
        if method is not None and method.init is not None and self.is_active:
            init = partial(first_memory, method.init, mesh, self._of_blocks)
            self.slot = SlotSpec(init)

    @property
    def sends(self) -> str:
        """The kinds of collectives that ranks run for the gradients, with what they send; empty on one rank."""
        is_divided = self._level > 0 and self._shard.size > 1
        kind = self._shard.scatter_kind if is_divided else "all-reduce"
        texts = []
        if is_divided and self._of_blocks:
            texts.append(f"{kind} of gradients")
            kind = "all-reduce"
        if self._method is not None and self.is_active:
            texts.append(self._method.sends.format(sum=kind, gather=self._ranks.gather_kind))
        elif self._ranks.size > 1:
            texts.append(f"{kind} of {'their parts' if texts else 'gradients'}")
        return "; ".join(texts)

    def require_one_gradient(self, wrappers: Sequence[Wrapper]) -> None:
        """Check that a method with a memory, which is added to the next gradient, gets one gradient per step.

        Also on one rank, which sends nothing, so that a step that runs there runs on many. Raises a ComposeError if
        not.
        """
        several = [wrapper for wrapper in wrappers if wrapper.grad is not None and wrapper.grad.evaluations > 1]
        method = self._method
        if method is not None and method.init is not None and several:
            raise ComposeError(
                f"sharded: {several[0].text} takes several gradients in a step, and {method.text} adds to each "
                "what was not sent of the last one; use reduce='bf16' or 'fp16', which add nothing"
            )

    def __call__(
        self, grads: list[Tensor], parts: Sequence[Part | None], slots: Mapping[str, PyTree], params: PyTreeSpec
    ) -> tuple[list[Tensor], dict[str, PyTree]]:
        """Return the parts that this rank needs of the sums of the gradients, and the new slots.

        The gradients are whole; at level 3 they are this rank's blocks, summed over its copy of the state.
        """
        method: Compression = self._method  # type: ignore[assignment]
        if self._of_blocks:
            grads = start_scatter_all(self._shard, grads, parts)() if self._level < 3 else grads
            parts = [None] * len(grads)
        memories = memories_of(slots[SLOT], params) if self.slot else [{} for _ in grads]
        sums, memories = method.combine(grads, memories, Exchange(self._ranks, parts))
        return sums, {SLOT: stored_of(memories, params)} if self.slot else {}
