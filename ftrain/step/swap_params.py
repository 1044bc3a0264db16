"""Run a module on the tensors of a state: the slots that hold its tensors, and contexts that replace them."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftrain import _torch
from ftrain._torch import dtensor
from ftrain.errors import LossError, listed, log_on_first_rank
from ftrain.types import LossFn, LossOutput, PyTree

_is_training = attrgetter("training")


class Slot(NamedTuple):
    """Where a module holds a tensor: the dict of its tensors, the key in it, and the dotted name of the tensor."""

    tensors: dict[str, Any]
    key: str
    name: str
    is_buffer: bool


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter, then every buffer, with its dotted name; a tied one once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def slots_of(module: nn.Module) -> list[Slot]:
    """Return the slots of all parameters and buffers; the slots of a tied tensor have the name of the first one."""
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    return [
        Slot(tensors, key, names[id(tensor)], tensors is _torch.buffers_of(part))
        for part in module.modules()
        for tensors in (_torch.parameters_of(part), _torch.buffers_of(part))
        for key, tensor in tensors.items()
        if tensor is not None
    ]


class bound:  # noqa: N801
    """Context in which slots of a module hold the tensors `values`."""

    def __init__(self, slots: Sequence[Slot], values: Sequence[Any]) -> None:
        self._slots, self._values = slots, values

    def __enter__(self) -> None:
        self._old_values = [tensors[key] for tensors, key, _, _ in self._slots]
        put(self._slots, self._values)

    def __exit__(self, *error: object) -> None:
        put(self._slots, self._old_values)


def put(slots: Sequence[Slot], values: Sequence[Any]) -> None:
    """Put tensors into slots."""
    for (tensors, key, _, _), value in zip(slots, values, strict=True):
        tensors[key] = value


class preserve_dicts:  # noqa: N801
    """Context that restores the items of dicts at its end."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._dicts = dicts

    def __enter__(self) -> None:
        self._copies = [*map(dict.copy, self._dicts)]

    def __exit__(self, *error: object) -> None:
        refill(self._dicts, self._copies)


def refill(dicts: Sequence[dict[str, Any]], items: Sequence[dict[str, Any]]) -> None:
    """Replace the items of each dict by the items of the dict at the same index of `items`."""
    # A deque of length 0 runs `map` to its end in C. A Python loop would be slower: a module has hundreds of dicts.
    deque(map(dict.clear, dicts), maxlen=0)
    deque(map(dict.update, dicts, items), maxlen=0)


class Borrowed:
    """Context of a run in which the dicts of a module may hold other tensors.

    After a run within a step they stay there until the step ends (`steps` is 0, and `restore` is called) or the next
    run begins, because models that use `torch.utils.checkpoint` run parts of themselves again in the backward pass.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self.dicts = dicts
        # The items that the dicts hold outside of all runs; None when they hold them now.
        self._original: list[dict[str, Any]] | None = None
        self.steps = 0
        # For each active run, the items at its beginning if it is nested in another run, else None.
        self._runs: list[list[dict[str, Any]] | None] = []

    def __enter__(self) -> None:
        self._runs.append([*map(dict.copy, self.dicts)] if self._runs else None)
        if self._original is None:
            self._original = [*map(dict.copy, self.dicts)]
        else:
            refill(self.dicts, self._original)

    def __exit__(self, *error: object) -> None:
        outer = self._runs.pop()
        if outer is not None:
            refill(self.dicts, outer)
        elif self.steps == 0:
            self.restore()

    def restore(self) -> None:
        """Restore the items that the dicts hold outside of all runs."""
        if self._original is not None:
            refill(self.dicts, self._original)
            self._original = None

    def kept_from(self, compiled: LossFn, slots: Sequence[Slot]) -> LossFn:
        """Return a loss of `torch.compile` that leaves its tensors in the slots for the backward pass, as an eager one.

        A compiled run itself restores the dicts at its end. But where Dynamo breaks its graph within
        `torch.utils.checkpoint`, a part of the module runs again in the backward pass, and needs the tensors.
        """

        def run(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            with self:
                mean, metrics, new_buffers = compiled(params, batch, rng=rng, buffers=buffers)
                named = {**new_buffers, **params}
                put(slots, [named[slot.name] for slot in slots])
            return mean, metrics, new_buffers

        return run


class BorrowedModule(Borrowed):
    """As `Borrowed`, for the parameters and buffers of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.parts = module, list(module.modules())
        super().__init__(
            [tensors for part in self.parts for tensors in (_torch.parameters_of(part), _torch.buffers_of(part))]
        )
        self.overrides_train = any(type(part).train is not nn.Module.train for part in self.parts)
        # The modes of the parts before the first training step, until its first run ends; then they are checked.
        self.modes_before: list[bool] | None = None
        self.are_modes_checked = False

    def __exit__(self, *error: object) -> None:
        if self.modes_before is not None:
            _log_changed_modes(self.module, dict(zip(self.parts, self.modes_before, strict=True)))
            self.modes_before, self.are_modes_checked = None, True
        super().__exit__(*error)


_threads: dict[int, int] = {}
"""The id of each module that is in a step -> the thread of that step."""


def require_no_other_thread(module: nn.Module) -> None:
    """Check that a module is not in a step of another thread, whose tensors it would hold. Raises a LossError if so."""
    if _threads.get(id(module), thread := get_ident()) != thread:
        raise _in_another_thread(module)


def _in_another_thread(module: nn.Module) -> LossError:
    return LossError(
        f"from_module: {type(module).__name__} is in a step of another thread, and holds the tensors of its state; use "
        "one loss per thread: ft.from_module(copy.deepcopy(module), ...)"
    )


def _set_modes(parts: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for part, mode in zip(parts, modes, strict=True):
        # nn.Module.__setattr__ looks for parameters and takes ten times as long.
        part.__dict__["training"] = mode


def _log_changed_modes(module: nn.Module, was_training: Mapping[nn.Module, bool]) -> None:
    """Log which parts of a module in training mode were in evaluation mode, and are not at the end of a run.

    It does not log if the whole module was in evaluation mode: ``from_pretrained`` of transformers, for example, puts
    it in that mode, which says nothing about what the user wants.
    """
    parts = dict(module.named_modules())
    changed = [
        name
        for name, part in parts.items()
        if part.training and not was_training.get(part, True) and name and was_training[parts[name.rpartition(".")[0]]]
    ]
    if changed:
        log_on_first_rank(
            "from_module: a training step puts all of %s into training mode, also what was in evaluation mode: %s. If "
            "its dropout should be off and its BatchNorm keep its statistics, call .eval() on it in the criterion",
            type(module).__name__,
            listed(changed),
        )


class DuringStep:
    """Context of a step, in which a module and its children are in training or evaluation mode.

    Raises a LossError on entry if the module is in a step of another thread.
    """

    __slots__ = ("_borrowed", "_is_outermost", "_modes", "_training")

    def __init__(self, borrowed: BorrowedModule, training: bool) -> None:
        self._borrowed, self._training = borrowed, training

    def __enter__(self) -> None:
        borrowed, thread = self._borrowed, get_ident()
        self._is_outermost = id(borrowed.module) not in _threads
        if _threads.setdefault(id(borrowed.module), thread) != thread:
            raise _in_another_thread(borrowed.module)
        self._modes = [*map(_is_training, borrowed.parts)]
        if self._training and not borrowed.are_modes_checked:
            borrowed.modes_before = self._modes
        if borrowed.overrides_train:
            borrowed.module.train(self._training)
        elif self._modes.count(self._training) < len(self._modes):
            # A model has hundreds of modules, which mostly have their mode already.
            _set_modes(borrowed.parts, [self._training] * len(borrowed.parts))
        borrowed.steps += 1

    def __exit__(self, *error: object) -> None:
        borrowed = self._borrowed
        borrowed.steps -= 1
        if borrowed.steps == 0:
            borrowed.restore()
        if [*map(_is_training, borrowed.parts)] != self._modes:
            _set_modes(borrowed.parts, self._modes)
        if self._is_outermost:
            del _threads[id(borrowed.module)]


@contextmanager
def preserve_attributes(module: nn.Module | None) -> Iterator[None]:
    """Context that restores the attributes of a module and its children, and the items of their lists and dicts.

    Models cache masks and tables between runs; those of a run on fake tensors must not stay.
    """
    attributes = [] if module is None else [vars(part) for part in module.modules()]
    containers = [
        *attributes,
        *(each for of_part in attributes for each in of_part.values() if type(each) in (dict, list, OrderedDict)),
    ]
    copies = [container.copy() for container in containers]
    try:
        yield
    finally:
        for container, copy in zip(containers, copies, strict=True):
            container.clear()
            if isinstance(container, list):
                container.extend(copy)
            else:
                container.update(copy)


_donated: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def to_meta_(module: nn.Module) -> None:
    """Move the parameters and buffers of a module to the meta device, freeing their memory."""
    if not all(tensor.is_meta for _, tensor in named_tensors(module)):
        _donated.add(module)
    _replace(module, {name: tensor.detach().to("meta") for name, tensor in named_tensors(module)})


def is_donated(module: nn.Module) -> bool:
    """Whether `to_meta_` freed the values of a module, and `fill` has not been called since."""
    return module in _donated


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of a module with the same names; replace its meta tensors and quantised ones by copies.

    DTensors are gathered one after the other. Raises a LossError if the module is in a step of another thread.
    """
    require_no_other_thread(module)
    copies = {}
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            value = dtensor.whole(tensors[name]).detach()
            if _torch.is_wrapper_subclass(value):
                copies[name] = value.clone()
            elif tensor.is_meta or _torch.is_wrapper_subclass(tensor):
                device = value.device if tensor.is_meta else tensor.device
                copies[name] = value.to(device, tensor.dtype, copy=True)
            else:
                tensor.copy_(value)
    _replace(module, copies)
    _donated.discard(module)


def _replace(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    new = {
        name: nn.Parameter(tensors[name], old.requires_grad) if isinstance(old, nn.Parameter) else tensors[name]
        for name, old in named_tensors(module)
        if name in tensors
    }
    for tensors_of_part, key, name, _ in slots_of(module):
        if name in new:
            tensors_of_part[key] = new[name]
