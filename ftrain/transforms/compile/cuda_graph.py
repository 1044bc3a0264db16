"""Record the work of a compiled graph on the device, and replay it: one launch instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftrain.backends import Recorder
from ftrain.transforms.compile import capture

log = logging.getLogger("ftrain")


@dataclass
class StepRecorder:
    """The recorder of all graphs of one step. When it has failed once, no other graph of the step is recorded.

    Torch may leave the memory pool that the graphs share open after a failure, so that the others fail, too.
    """

    record: Recorder
    failure: str = ""


@dataclass(frozen=True)
class NotReplayed:
    """A compiled graph that the device cannot record."""

    run: capture.Flat
    why: str

    @property
    def text(self) -> str:
        """How it prints."""
        return f"no replay: {self.why}"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the graph."""
        return self.run(*tensors)


class ReplayedGraph:
    """A compiled graph that writes its state in place, recorded and replayed by the device.

    The first call with a state runs normally, which also warms up. If the next call has the state at the same
    addresses, as a donated state is, it is recorded with slots for all other inputs. From then on the inputs are copied
    into the slots and the recording is replayed. Outputs are copies, so that they are safe to read later. A call with a
    state at other addresses runs normally, and is recorded if the state stays there.

    The first `size` inputs of the graph are the state; those of them with the indices `on_device` are on the device.
    """

    def __init__(self, run: capture.Flat, size: int, on_device: Sequence[int], recorder: StepRecorder) -> None:
        self._run, self._size, self._on_device, self._recorder = run, size, on_device, recorder
        self._seen: list[int] = []
        self._recorded: _Recording | None = None

    @property
    def text(self) -> str:
        """How it prints."""
        if self._recorder.failure and not self._recorded:
            return f"no replay: {self._recorder.failure}"
        return "replay"

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the graph, or replay it."""
        state, rest = tensors[: self._size], tensors[self._size :]
        # By address and not by identity: that is what a recording uses.
        addresses = [state[index].data_ptr() for index in self._on_device]
        if self._recorded is None or addresses != self._recorded.addresses:
            stays = addresses == self._seen
            self._seen = addresses
            # Freed first: the next recording can then use its memory.
            self._recorded = None
            if stays:
                self._recorded = self._record(addresses, state, rest)
        return self._recorded(rest) if self._recorded else self._run(*tensors)

    def _record(self, addresses: list[int], state: Sequence[Tensor], rest: Sequence[Tensor]) -> _Recording | None:
        if self._recorder.failure:
            return None
        # Compiled code relies on the strides of its inputs.
        slots = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in rest]
        try:
            recorded = self._recorder.record(lambda: self._run(*state, *slots))
        except RuntimeError as error:
            lines = str(error).strip().splitlines()
            why = lines[0] if lines else type(error).__name__
            log.warning("compiled: runs without replay, since the device cannot record it: %s", why)
            self._recorder.failure = why
            return None
        return _Recording(addresses, slots, *recorded)


@dataclass(frozen=True)
class _Recording:
    """Work that the device has recorded, and the addresses, slots and outputs that it reads and writes."""

    addresses: list[int]
    slots: list[Tensor]
    replay: Callable[[], None]
    outputs: Sequence[Tensor]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        _copy([*map(_unexpanded, self.slots)], [*map(_unexpanded, inputs)])
        self.replay()
        results = [torch.empty_like(output) for output in self.outputs]
        _copy(results, self.outputs)
        return results


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, with one launch for each group of similar ones instead of one for each tensor."""
    # Torch copies one by one if a single tensor differs from the others in its dtype, or from its source in its layout.
    groups: dict[Hashable, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = target.dtype, target.device, source.device, target.stride() == source.stride()
        group_targets, group_sources = groups.setdefault(key, ([], []))
        group_targets.append(target)
        group_sources.append(source)
    for group_targets, group_sources in groups.values():
        torch._foreach_copy_(group_targets, group_sources, non_blocking=True)


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a view without repeated elements of an expanded tensor, into which torch refuses to copy."""
    for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor
