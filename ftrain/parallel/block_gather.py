"""Gather the parameters of a model block by block, for its forward and again for its backward pass, and keep none.

While a block computes, those of the next one are gathered: in the forward pass those of the block that is registered
next, so that two blocks are in memory. In the backward pass, where most of the activations are in
memory, the gather of the block that ran before starts when this block has read half of its parameters, each of which
is freed when the backward pass no longer needs it. The rest of the block takes as long as a forward pass does.
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
"""Number of blocks that hold what they gathered again: the current one, and one inside or next to it."""


class _View(NamedTuple):
    """A view of a gathered parameter, or of its cast to another dtype; `number` counts what is saved for a block."""

    number: int
    name: str
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt


class NotGathered(Tensor):
    """A parameter of a block outside the block's forward, where each rank has only its part.

    Its shape, dtype and device can be read. An operation on it in the backward pass, where `torch.utils.checkpoint`
    computes a part of the block again, gathers it; any other raises a LossError.
    """

    _name: str
    _gather: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, name: str, shape: Sequence[int], local: Tensor, gather: Callable[[], Tensor]) -> Self:
        """Return a placeholder for a parameter of this whole shape, of which this rank has the part `local`."""
        # What is computed again must save the same tensors, so it requires a gradient if the parameter does.
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
    """The blocks of a module: those that `remat` would recompute, each with the parameters that only blocks read.

    With `as_autocast`, those with two or more axes are gathered in the dtype to which autocast would cast them.
    """

    def __init__(self, module: nn.Module, watch: Watch, *, as_autocast: bool = False) -> None:
        self._watch, self._as_autocast = watch, as_autocast
        self._slots = _slots_by_block(module)
        module_names = {part: name for name, part in module.named_modules()}
        self._block_names = [module_names[block] for block in self._slots]
        self._names_by_block = [[*dict.fromkeys(slot.name for slot in slots)] for slots in self._slots.values()]
        self.names = {name for names in self._names_by_block for name in names}
        """The names of parameters that are gathered by block."""
        self._gathered_again: list[_BlockRun] = []
        self._pass: _Pass | None = None
        self._latest: dict[str, _BlockRun] = {}
        self._placeholders: dict[tuple[str, torch.dtype, bool], NotGathered] = {}

    def leave_out(self, params: Parameters) -> dict[str, Tensor]:
        """Return placeholders for the parameters of blocks from now on; each block gathers its own parameters."""
        if self._pass is not None:
            self._pass.params.drop_ahead()
        self._pass = _Pass(params, self._names_by_block)
        return {name: self._placeholder(params, name) for name in self.names}

    def _placeholder(self, params: Parameters, name: str) -> NotGathered:
        local, part = params.leaves[name], params.parts[name]
        key = name, local.dtype, local.requires_grad
        if key not in self._placeholders:
            shape = local.shape if part is None else part.shape
            # In the backward pass of its block, a part of the block may be computed again.
            self._placeholders[key] = NotGathered(name, shape, local, lambda: self._latest[name].whole(name))
        return self._placeholders[key]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which the forward of every block gathers its parameters first."""
        gathering = [
            (block, self._gathering(number, block, slots)) for number, (block, slots) in enumerate(self._slots.items())
        ]
        with forwarding(gathering):
            try:
                yield
                if self._pass is not None:
                    self._pass.params.drop_ahead()
            finally:
                self._pass, self._latest = None, {}
                while self._gathered_again:
                    self._gathered_again[0].forget()

    def finish(self) -> None:
        """Check, in the first step, that no other rank runs one more block."""
        self._require_same(len(self._block_names))
        cast(_Pass, self._pass).params.drop_ahead()

    def take_part(self) -> None:
        """Gather the blocks that have not run, as the other ranks do, when the forward pass has failed on this one.

        The others run them in the order in which the module has them; if they do not, or if this rank has failed
        before the first block of ``gather="amp"``, they wait until the deadline.
        """
        current = cast(_Pass, self._pass)
        left = current.left()
        if self._as_autocast and len(left) == len(self._block_names):
            return  # The first block would have shown in which dtype the others gather.
        for index, names in enumerate(left):
            if index:
                current.params.start_ahead(names)
            current.params.take(names)

    def _require_same(self, number: int) -> None:
        params = cast(_Pass, self._pass).params
        require_same_block(params.group, self._block_names, number, params.device)

    def _gathering(self, number: int, block: nn.Module, slots: Sequence[Slot]) -> Callable[..., Any]:
        forward, names = block.forward, self._names_by_block[number]

        def gathering(*args: Any, **kwargs: Any) -> Any:
            current = cast(_Pass, self._pass)
            _require_plain(self._block_names[number], (args, kwargs))
            if self._as_autocast:
                current.gather_as_autocast()
            self._require_same(number)
            tell = partial(self._watch.tell_place, f"at block {self._block_names[number]}")
            tell()
            run = _BlockRun(current.params, names, self._gathered_again, tell)
            wholes = current.params.sums.at_once(current.params.take(names), run.finish)
            if _torch.in_backward():
                current.start_before(number)
            else:
                current.start_after(number, run)
            self._latest |= dict.fromkeys(names, run)
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
        self._is_in_order, self._guess = True, 0
        self._runs: list[tuple[int, _BlockRun]] = []

    def gather_as_autocast(self) -> None:
        """Gather in the dtype of autocast from now on, if the first block of the pass runs under it."""
        device = self.params.device.type
        if not self._runs and torch.is_autocast_enabled(device):
            self.params.narrow = torch.get_autocast_dtype(device)

    def left(self) -> Sequence[Sequence[str]]:
        """Return the parameters of each block that is registered after the last one that has run."""
        return self._names_by_block[self._guess :]

    def start_after(self, number: int, run: _BlockRun) -> None:
        """Start the gather of the block that is registered after the one that runs now.

        A model may leave out blocks. If it runs an earlier block again, its order is unknown and nothing is prefetched.
        """
        if self._runs:
            run.before = self._runs[-1][1]
        self._runs.append((number, run))
        self._is_in_order = self._is_in_order and number >= self._guess
        self._guess = number + 1
        if self._is_in_order and self._guess < len(self._names_by_block):
            self.params.start_ahead(self._names_by_block[self._guess])

    def start_before(self, number: int) -> None:
        """Start the gather of the block that ran before the one that is computed again for its gradient."""
        while self._runs:
            last, run = self._runs.pop()
            if last == number:
                run.start_before()
                return


class _BlockRun:
    """Saves references instead of gathered tensors for the backward pass, and gathers the tensors again there.

    Each tensor is freed once the graph has moved on from the last node that saved it. `before` is the block that has
    run before, and `is_needed` whether the backward pass probably needs the parameters.
    """

    def __init__(
        self, params: Parameters, names: Sequence[str], gathered_again: list[_BlockRun], tell: Callable[[], None]
    ) -> None:
        self._tell = tell
        self._params, self._names, self._gathered_again = params, names, gathered_again
        self._names_by_memory: dict[int, str] = {}
        self._names_by_node: dict[tuple[Any, int], str] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._names_of_views: list[str] = []
        self._unread: dict[str, set[int]] = {}
        self._wholes: dict[Any, Tensor] = {}
        self._nbytes: dict[str, int] = {}
        self._node = -1
        self._has_started_before = False
        self.before: _BlockRun | None = None
        self.is_needed = False

    @contextmanager
    def saving(self, wholes: Mapping[Any, Tensor]) -> Iterator[None]:
        """Context in which autograd does not save these parameters, their views and casts, but gathers them again."""
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
            # Only while the forward runs, when they exist: the number of freed memory may come back for other memory,
            # and the nodes hold this object.
            self._names_by_memory, self._names_by_node = {}, {}

    def _pack(self, tensor: Tensor) -> Any:
        base = _torch.base_of(tensor)
        name = self._names_by_memory.get(_torch.storage_id(tensor))
        if name is None:
            name = self._cast_of(base)
        # A view as complex numbers has another dtype; one of the imaginary parts of a conjugate is marked as negative.
        if name is None or tensor.dtype != base.dtype or tensor.is_neg():
            return tensor
        self.is_needed = True
        self._names_of_views.append(name)
        number = len(self._names_of_views) - 1
        return _View(number, name, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _cast_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter of which a tensor is a cast; autocast makes one for each use."""
        source = _torch.cast_from(tensor)
        name = None if source is None else self._names_by_node.get(source)
        if name is None or tensor.stride() != self._strides[name] or _torch.version_of(tensor):
            return None  # Made contiguous, say, or written to.
        return name

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _View):
            return cast(Tensor, saved)
        node = _torch.backward_node()
        if node != self._node:
            # Not when they are read for the last time: a function may ask twice for what it has saved.
            self._node = node
            for name in [name for name, numbers in self._unread.items() if not numbers]:
                self._wholes.pop(name, None)
        whole = self.whole(saved.name)
        self._unread[saved.name].discard(saved.number)
        if not self._has_started_before and self._is_half_read():
            self.start_before()
        return whole.to(saved.dtype).as_strided(saved.shape, saved.strides, saved.offset)

    def whole(self, name: str) -> Tensor:
        """Return a parameter, gathered again."""
        if name not in self._wholes:
            self.forget()
            self._tell()
            self._wholes = self._params.take(self._names)
            self._unread = {}
            for number, read in enumerate(self._names_of_views):
                self._unread.setdefault(read, set()).add(number)
            self._nbytes = {read: self._wholes[read].nbytes for read in self._unread}
            # A block that trains nothing has no gradient that says when it is done: the next block but one does.
            self._gathered_again.append(self)
            if len(self._gathered_again) > MOST_BLOCKS:
                self._gathered_again[0].forget()
        return self._wholes[name]

    def _is_half_read(self) -> bool:
        # In bytes of the parameters that the backward pass needs, which are the same on all ranks.
        left = sum(nbytes for name, nbytes in self._nbytes.items() if self._unread[name])
        return left < sum(self._nbytes.values()) / 2

    def start_before(self) -> None:
        """Start the gather of the block that has run before, whose backward pass is next."""
        self._has_started_before = True
        if self.before is not None and self.before.is_needed:
            self._params.start_ahead(self.before._names)

    def finish(self) -> None:
        """Free what was gathered again, when the gradients are complete."""
        if self._wholes and not self._has_started_before:
            self.start_before()
        self.forget()

    def forget(self) -> None:
        if self._wholes:
            self._wholes = {}
            self._gathered_again.remove(self)


def _slots_by_block(module: nn.Module) -> dict[nn.Module, list[Slot]]:
    """Return the parameters of each block that are used only in blocks, with their names in the whole module."""
    slots = {(id(slot.tensors), slot.key): slot for slot in slots_of(module)}
    blocks = {
        block: [slots[id(slot.tensors), slot.key] for slot in slots_of(block) if not slot.is_buffer]
        for block in repeated_children(module)
    }
    within = {(id(slot.tensors), slot.key) for each in blocks.values() for slot in each}
    outside = {slot.name for place, slot in slots.items() if place not in within}
    return {
        block: [slot for slot in each if slot.name not in outside and slot.tensors[slot.key].is_floating_point()]
        for block, each in blocks.items()
    }
