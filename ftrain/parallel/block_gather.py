"""Gather the parameters of a model block by block, for the forward and again for the backward pass, and keep none.

While a block computes, the parameters of the next block are gathered, so that two blocks are in memory. In the forward
pass the next block is the one that is registered next; in the backward pass it is the one that ran before. The backward
pass begins with all activations in memory, so there the gather starts later, when this block has read half of its
parameters: what remains takes about as long as a forward pass of the block. A parameter is freed as soon as the
backward pass no longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ftrain import _torch, tree
from ftrain.errors import LossError
from ftrain.parallel.gather import Parameters
from ftrain.parallel.rank_watch import Watch
from ftrain.parallel.same_loss import require_same_block
from ftrain.step.blocks import forwarding, repeated_children
from ftrain.step.swap_params import Slot, bound, slots_of
from ftrain.types import PyTree

MOST_BLOCKS = 2
"""Number of blocks that keep parameters in the backward pass: the current one, and one inside or next to it."""


class _View(NamedTuple):
    """A view of a gathered parameter, or of its cast to another dtype, that autograd saves by this description.

    `number` is its index among all views that are saved for a run of the block.
    """

    number: int
    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt


class NotGathered(Tensor):
    """A parameter of a block outside the block's forward, where each rank has only its part.

    Its shape, dtype and device can be read. In the backward pass, where `torch.utils.checkpoint` computes a part of the
    block again, an operation on it gathers it; any other operation raises a LossError.
    """

    _name: str
    _gather: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, name: str, shape: Sequence[int], local: Tensor, gather: Callable[[], Tensor]) -> Self:
        """Return a placeholder for a parameter whose whole shape is `shape`; this rank has the part `local`."""
        # A part that is computed again must save the same tensors, so this requires a gradient if the parameter does.
        self: Self = _torch.tensor_without_values(cls, shape, local, requires_grad=local.requires_grad)
        self._name, self._gather = name, gather
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call an operation on the gathered parameter."""
        args, kwargs = tree.map(lambda leaf: leaf._whole() if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self) -> Tensor:
        if _torch.in_backward():
            return self._gather()
        raise LossError(
            f"sharded: the loss reads the parameter {self._name} outside of the forward of its block, and level 3 "
            "gathers it only there; read it there, or use level=2"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return its name and shape."""
        return f"NotGathered({self._name}, {list(self.shape)})"


class BlockGather:
    """Gathers the parameters of each block of a module. The blocks are those that `remat` would recompute.

    Parameters that are also read outside of blocks are not among them. With `as_autocast`, parameters with two or more
    axes are gathered in the dtype to which autocast would cast them.
    """

    def __init__(self, module: nn.Module, watch: Watch, *, as_autocast: bool = False) -> None:
        self._watch, self._as_autocast = watch, as_autocast
        self._slots = _slots_by_block(module)
        module_names = {part: name for name, part in module.named_modules()}
        self._block_names = [module_names[block] for block in self._slots]
        self._names_by_block = [[*dict.fromkeys(slot.name for slot in slots)] for slots in self._slots.values()]
        self.names = {name for names in self._names_by_block for name in names}
        """The names of parameters that are gathered by block."""
        self._holders: list[_BlockRun] = []  # Runs that keep parameters in the backward pass, oldest first.
        self._pass: _Pass | None = None
        self._latest_runs: dict[str, _BlockRun] = {}  # The run that read a parameter last, by name.
        self._placeholders: dict[tuple[str, torch.dtype, bool], NotGathered] = {}

    def begin(self, params: Parameters) -> dict[str, Tensor]:
        """Begin a forward pass: return placeholders for the parameters of blocks, which each block gathers itself."""
        if self._pass is not None:
            self._pass.params.drop_prefetched()
        self._pass = _Pass(params, self._names_by_block)
        return {name: self._placeholder(params, name) for name in self.names}

    def _placeholder(self, params: Parameters, name: str) -> NotGathered:
        local, part = params.leaves[name], params.parts[name]
        key = name, local.dtype, local.requires_grad
        if key not in self._placeholders:
            shape = local.shape if part is None else part.shape
            # In the backward pass of its block, a part of the block may be computed again.
            self._placeholders[key] = NotGathered(name, shape, local, lambda: self._latest_runs[name].whole(name))
        return self._placeholders[key]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the forward of every block gathers its parameters first."""
        forwards = [
            (block, self._gathering(number, block, slots)) for number, (block, slots) in enumerate(self._slots.items())
        ]
        with forwarding(forwards):
            try:
                yield
                if self._pass is not None:
                    self._pass.params.drop_prefetched()
            finally:
                self._pass, self._latest_runs = None, {}
                while self._holders:
                    self._holders[0].free()

    def finish(self) -> None:
        """End a forward pass: check, in the first step, that no other rank runs one more block."""
        self._require_same(len(self._block_names))
        cast(_Pass, self._pass).params.drop_prefetched()

    def take_part(self) -> None:
        """Gather the blocks that have not run, as the other ranks do, when the forward pass has failed on this one.

        The others run them in the order in which the module has them; if they do not, or if this rank has failed
        before the first block of ``gather="amp"``, they wait until the deadline.
        """
        current = cast(_Pass, self._pass)
        remaining = current.remaining()
        if self._as_autocast and len(remaining) == len(self._block_names):
            return  # Only the first block shows in which dtype the others gather.
        for index, names in enumerate(remaining):
            # After a block has run, the others prefetch the next one.
            if index:
                current.params.prefetch(names)
            current.params.take(names)

    def _require_same(self, number: int) -> None:
        params = cast(_Pass, self._pass).params
        require_same_block(params.group, self._block_names, number, params.device)

    def _gathering(self, number: int, block: nn.Module, slots: Sequence[Slot]) -> Callable[..., Any]:
        """Return the forward of a block that gathers its parameters first."""
        forward, names = block.forward, self._names_by_block[number]

        def gathering(*args: Any, **kwargs: Any) -> Any:
            current = cast(_Pass, self._pass)
            _require_plain(self._block_names[number], (args, kwargs))
            if self._as_autocast:
                current.gather_as_autocast()
            self._require_same(number)
            note_place = partial(self._watch.note_place, f"at block {self._block_names[number]}")
            note_place()
            run = _BlockRun(current.params, names, self._holders, note_place)
            wholes = current.params.sums.of_block(current.params.take(names), run.finish)
            if _torch.in_backward():
                current.prefetch_previous(number)
            else:
                current.prefetch_next(number, run)
            self._latest_runs |= dict.fromkeys(names, run)
            with bound(slots, [wholes[slot.name] for slot in slots]), run.saving(wholes):
                return forward(*args, **kwargs)

        return gathering


def _require_plain(block: str, arguments: PyTree) -> None:
    if any(tree.is_tensor(leaf) and _torch.is_transformed(leaf) for leaf in tree.leaves(arguments)):
        raise LossError(
            f"sharded: the loss runs the block {block} within a transform of torch.func (jvp, vmap, grad), in which "
            "level 3 cannot gather its parameters; use level=2"
        )


class _Pass:
    """One forward pass of a model and its backward pass: which blocks have run, and which is probably next."""

    def __init__(self, params: Parameters, names_by_block: Sequence[Sequence[str]]) -> None:
        self.params = params
        self._names_by_block = names_by_block
        self._is_in_order = True
        self._next_number = 0
        self._runs: list[tuple[int, _BlockRun]] = []

    def gather_as_autocast(self) -> None:
        """Gather in the dtype of autocast from now on, if the first block of the pass runs under it."""
        device = self.params.device.type
        if not self._runs and torch.is_autocast_enabled(device):
            self.params.matrix_dtype = torch.get_autocast_dtype(device)

    def remaining(self) -> Sequence[Sequence[str]]:
        """Return the parameters of each block that is registered after the last one that has run."""
        return self._names_by_block[self._next_number :]

    def prefetch_next(self, number: int, run: _BlockRun) -> None:
        """Prefetch the block that is registered after the one that runs now.

        A model may leave out blocks. If it runs an earlier block again, its order is unknown and nothing is prefetched.
        """
        if self._runs:
            run.previous = self._runs[-1][1]
        self._runs.append((number, run))
        self._is_in_order = self._is_in_order and number >= self._next_number
        self._next_number = number + 1
        if self._is_in_order and self._next_number < len(self._names_by_block):
            self.params.prefetch(self._names_by_block[self._next_number])

    def prefetch_previous(self, number: int) -> None:
        """Prefetch the block that ran before the one that is computed again for its gradient."""
        while self._runs:
            last, run = self._runs.pop()
            if last == number:
                run.prefetch_previous()
                return


class _BlockRun:
    """One run of a block: autograd saves a `_View` for each gathered tensor, and the backward pass gathers it again.

    A tensor is freed when the backward pass has left the last node that saved it. `previous` is the run of the block
    before; `is_needed` is whether the backward pass probably needs the parameters.
    """

    def __init__(
        self, params: Parameters, names: Sequence[str], holders: list[_BlockRun], note_place: Callable[[], None]
    ) -> None:
        self._params, self._names = params, names
        self._holders, self._note_place = holders, note_place
        # In the forward pass.
        self._names_by_memory: dict[int, str] = {}
        self._names_by_node: dict[tuple[Any, int], str] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._names_of_views: list[str] = []
        # In the backward pass.
        self._wholes: dict[Any, Tensor] = {}
        self._unread: dict[str, set[int]] = {}  # The numbers of the views that are still to be read, by name.
        self._nbytes: dict[str, int] = {}
        self._node = -1
        self._has_prefetched = False
        self.previous: _BlockRun | None = None
        self.is_needed = False

    @contextmanager
    def saving(self, wholes: Mapping[Any, Tensor]) -> Iterator[None]:
        """Context in which autograd saves a `_View` in place of these parameters, their views and casts."""
        # An outer hook takes all saved tensors: rematerialisation runs the block again, and so gathers again.
        if _torch.saved_tensors_pack_hook() is not None:
            self.is_needed = True
            yield
            return
        divided = [(name, whole) for name, whole in wholes.items() if self._params.parts[name]]
        self._names_by_memory = {_torch.storage_id(whole): name for name, whole in divided}
        self._names_by_node = {(whole.grad_fn, whole.output_nr): name for name, whole in divided if whole.requires_grad}
        self._strides = {name: whole.stride() for name, whole in divided}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            # The parameters are freed after the forward: an id of their memory may then be that of other memory. And
            # the nodes refer to this object, so a reference to them would be a cycle.
            self._names_by_memory, self._names_by_node = {}, {}

    def _pack(self, tensor: Tensor) -> Any:
        base = _torch.base_of(tensor)
        name = self._names_by_memory.get(_torch.storage_id(tensor))
        if name is None:
            name = self._cast_of(base)
        # `as_strided` cannot make all views again: a view as complex numbers has another dtype, and one of the
        # imaginary parts of a conjugate is marked as negative.
        if name is None or tensor.dtype != base.dtype or tensor.is_neg():
            return tensor
        self.is_needed = True
        self._names_of_views.append(name)
        number = len(self._names_of_views) - 1
        return _View(number, name, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _cast_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter of which a tensor is a cast; autocast makes a cast for each use."""
        source = _torch.cast_from(tensor)
        name = None if source is None else self._names_by_node.get(source)
        # With other strides (made contiguous), or written to, it is not what a cast of the parameter would be.
        if name is None or tensor.stride() != self._strides[name] or _torch.version_of(tensor):
            return None
        return name

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return cast(Tensor, saved)
        node = _torch.backward_node()
        if node != self._node:
            # Freed at the next node and not with the last read: a node may read its saved tensors twice.
            self._node = node
            for name, unread in self._unread.items():
                if not unread:
                    self._wholes.pop(name, None)
        whole = self.whole(saved.name)
        self._unread[saved.name].discard(saved.number)
        if not self._has_prefetched and self._is_half_read():
            self.prefetch_previous()
        return whole.to(saved.dtype).as_strided(saved.shape, saved.strides, saved.offset)

    def whole(self, name: str) -> Tensor:
        """Return a parameter, gathered again."""
        if name not in self._wholes:
            self.free()
            self._note_place()
            self._wholes = self._params.take(self._names)
            self._unread = {}
            for number, name_of_view in enumerate(self._names_of_views):
                self._unread.setdefault(name_of_view, set()).add(number)
            self._nbytes = {needed: self._wholes[needed].nbytes for needed in self._unread}
            # A block that trains nothing has no gradients, with which it would free its parameters (`finish`). So they
            # are freed when the next block but one gathers.
            self._holders.append(self)
            if len(self._holders) > MOST_BLOCKS:
                self._holders[0].free()
        return self._wholes[name]

    def _is_half_read(self) -> bool:
        # In bytes of the parameters that the backward pass needs, which are the same on all ranks.
        unread_bytes = sum(nbytes for name, nbytes in self._nbytes.items() if self._unread[name])
        return unread_bytes < sum(self._nbytes.values()) / 2

    def prefetch_previous(self) -> None:
        """Prefetch the block that ran before, whose backward pass is next."""
        self._has_prefetched = True
        if self.previous is not None and self.previous.is_needed:
            self._params.prefetch(self.previous._names)

    def finish(self) -> None:
        """Free the parameters when the gradients of the block are complete."""
        if self._wholes and not self._has_prefetched:
            self.prefetch_previous()
        self.free()

    def free(self) -> None:
        """Free the parameters that the backward pass has gathered again."""
        if self._wholes:
            self._wholes = {}
            self._holders.remove(self)


def _slots_by_block(module: nn.Module) -> dict[nn.Module, list[Slot]]:
    """Return the parameters of each block that are used only in blocks, with their names in the whole module."""
    slots = {(id(slot.tensors), slot.key): slot for slot in slots_of(module)}
    keys_by_block = {
        block: [(id(slot.tensors), slot.key) for slot in slots_of(block) if not slot.is_buffer]
        for block in repeated_children(module)
    }
    keys_in_blocks = {key for keys in keys_by_block.values() for key in keys}
    names_outside = {slot.name for key, slot in slots.items() if key not in keys_in_blocks}

    def is_gathered(slot: Slot) -> bool:
        return slot.name not in names_outside and slot.tensors[slot.key].is_floating_point()

    return {block: [slots[key] for key in keys if is_gathered(slots[key])] for block, keys in keys_by_block.items()}
