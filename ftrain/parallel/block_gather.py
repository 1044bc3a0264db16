"""Gather the parameters of a model block by block, for its forward and again for its backward pass, and keep none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ftrain import _torch
from ftrain.parallel.gather import Parameters
from ftrain.parallel.not_gathered import NotGathered
from ftrain.parallel.same_program import require_same_block
from ftrain.step.blocks import forwarding, repeated_children
from ftrain.step.swap_params import Slot, bound, slots_of

MOST_BLOCKS = 2
"""Blocks whose parameters are gathered again at a time: one, and one within or beside it."""

_View: TypeAlias = tuple[int, torch.Size, tuple[int, ...], int]
"""The number of a gathered tensor; shape, strides and offset of a view of it."""


class BlockGather:
    """The blocks of a module: those that `remat` would recompute, each with the parameters that only blocks read.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = {block: _parameters(block, module) for block in repeated_children(module)}
        module_names = {part: name for name, part in module.named_modules()}
        self._block_names = [module_names[block] for block in self._slots]
        self.names = _only_in(self._slots.values(), slots_of(module))
        """The names of parameters that are gathered by block."""
        self._gathered_again: deque[_Again] = deque()
        self._params: Parameters | None = None
        self._latest: dict[str, tuple[_Again, int]] = {}
        self._placeholders: dict[tuple[str, torch.dtype, bool], NotGathered] = {}

    def leave_out(self, params: Parameters) -> dict[str, Tensor]:
        """Return what stands for the parameters of blocks from now on; each block gathers its own.

        It has no values: to read the parameter of a block outside of its forward is an error.
        """
        self._params = params
        return {name: self._placeholder(params, name) for name in self.names}

    def _placeholder(self, params: Parameters, name: str) -> NotGathered:
        local, part = params.leaves[name], params.parts[name]
        key = name, local.dtype, local.requires_grad
        if key not in self._placeholders:
            shape = local.shape if part is None else part.shape
            self._placeholders[key] = NotGathered(name, shape, local, partial(self._gather_latest, name))
        return self._placeholders[key]

    def _gather_latest(self, name: str) -> Tensor:
        """Return a whole parameter in the backward pass of its block, of which a part is computed again."""
        again, index = self._latest[name]
        return again.whole(index)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the forward of every block gathers its parameters first."""
        gathering = [
            (block, self._gathering(number, block, slots)) for number, (block, slots) in enumerate(self._slots.items())
        ]
        with forwarding(gathering):
            try:
                yield
            finally:
                self._params, self._latest = None, {}

    def finish(self) -> None:
        """Check, in the first step, that no other rank runs one more block."""
        self._require_same(len(self._block_names))

    def _require_same(self, number: int) -> None:
        params = cast(Parameters, self._params)
        require_same_block(params.group, self._block_names, number, params.device)

    def _gathering(self, number: int, block: nn.Module, slots: Sequence[Slot]) -> Callable[..., Any]:
        forward, slots = block.forward, [slot for slot in slots if slot.name in self.names]
        names = list(dict.fromkeys(slot.name for slot in slots))

        def gathering(*args: Any, **kwargs: Any) -> Any:
            params = cast(Parameters, self._params)
            self._require_same(number)
            again = _Again(params, names, self._gathered_again)
            wholes = params.joined(names, params.start_gather(names)(), again.forget)
            again.watch(wholes)
            self._latest.update((name, (again, index)) for index, name in enumerate(names))
            by_name = dict(zip(names, wholes, strict=True))
            # An outer hook takes all saved tensors: rematerialisation runs this again, and so gathers again.
            is_outermost = _torch.saved_tensors_pack_hook() is None
            saving = saved_tensors_hooks(again.pack, again.unpack) if is_outermost else nullcontext()
            with bound(slots, [by_name[slot.name] for slot in slots]), saving:
                return forward(*args, **kwargs)

        return gathering


class _Again:
    """Saves parts of gathered tensors for the backward pass in place of these, and gathers them again there."""

    def __init__(self, params: Parameters, names: Sequence[str], gathered_again: deque[_Again]) -> None:
        self._params, self._names, self._gathered_again = params, names, gathered_again
        self._places: dict[int, int] = {}
        self._wholes: list[Tensor] | None = None

    def watch(self, wholes: Sequence[Tensor]) -> None:
        """Replace these tensors, and views of them, when autograd saves them."""
        # Only while the forward runs, when they exist: the number of freed memory may come back for other memory.
        self._places = {
            _torch.storage_id(whole): index
            for index, whole in enumerate(wholes)
            if self._params.parts[self._names[index]]
        }

    def pack(self, tensor: Tensor) -> Any:
        """Return what is saved for a tensor."""
        place = self._places.get(_torch.storage_id(tensor))
        return tensor if place is None else (place, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that was saved."""
        if isinstance(saved, Tensor):
            return saved
        place, shape, strides, offset = cast(_View, saved)
        return self.whole(place).as_strided(shape, strides, offset)

    def whole(self, place: int) -> Tensor:
        """Return a tensor of a number, gathered again."""
        if self._wholes is None:
            self._wholes = self._params.start_gather(self._names)()
            # Of a block that trains nothing no gradient tells when it is done: the next but one block does.
            self._gathered_again.append(self)
            if len(self._gathered_again) > MOST_BLOCKS:
                self._gathered_again.popleft().forget()
        return self._wholes[place]

    def forget(self) -> None:
        """Free what was gathered again."""
        self._wholes = None


def _parameters(block: nn.Module, module: nn.Module) -> list[Slot]:
    """Return the places of parameters in a block, with their names in the whole module."""
    names = {(id(slot.place), slot.key): slot.name for slot in slots_of(module)}
    return [slot._replace(name=names[id(slot.place), slot.key]) for slot in slots_of(block) if not slot.is_buffer]


def _only_in(blocks: Any, everywhere: Sequence[Slot]) -> set[str]:
    """Return the names of parameters that have no place outside of blocks."""
    within = {(id(slot.place), slot.key) for slots in blocks for slot in slots}
    outside = {slot.name for slot in everywhere if (id(slot.place), slot.key) not in within}
    floating = {slot.name for slots in blocks for slot in slots if slot.place[slot.key].is_floating_point()}
    return floating - outside
