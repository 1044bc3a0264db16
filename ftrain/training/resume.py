"""What of a run is on the disk: going on from it, and adding to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ftrain import data as sources
from ftrain import tree
from ftrain.checkpoint import Checkpoints
from ftrain.checkpoint.checkpoints import Found
from ftrain.checkpoint.journal import Journal, Mark, check, mark_of, read
from ftrain.checkpoint.manifest import environment
from ftrain.checkpoint.saving import require_savable
from ftrain.errors import CheckpointError, DeviceError, OptionError
from ftrain.training.history import History, unpack
from ftrain.training.iterate import Position, StepRecord, device_of, position_of
from ftrain.training.metrics import Recorder
from ftrain.types import PyTree, TrainState, consume, is_own, own

RESUME = "auto", "must", "never"


class Saved:
    """What of a run is on the disk, if anything is to be.

    Raises:
        OptionError: for another `resume`, or one that needs checkpoints when there are none.
    """

    def __init__(self, checkpoints: Checkpoints | None, data: Iterable[PyTree], run: Recorder, resume: str) -> None:
        if resume not in RESUME:
            raise OptionError(f"fit: resume is {resume!r}; choices are {', '.join(RESUME)}")
        if checkpoints is None and resume == "must":
            raise OptionError("fit: resume='must' needs checkpoints=")
        self._checkpoints, self._data, self._run, self._resume = checkpoints, data, run, resume
        self._last = -1, -1
        self._journal = Journal(checkpoints.directory) if checkpoints is not None else None
        self._began = Position(run.step, data=sources.position(data))._asdict()
        self._position: Position | None = None

    def restore(self, state: Any, *, donate: bool) -> tuple[Any, Position | None]:
        """Return the state to start from, and where in the data; with `donate` in the memory of the one given.

        Raises:
            CheckpointError: when it is not as `resume` demands, or nothing that is there can be read, or the state
                cannot be saved.
            StructureError: when what is there is of another structure.
            OptionError: for names of texts that lead elsewhere.
        """
        if self._checkpoints is None:
            return state, None
        # What the first save would refuse is refused before a step is made.
        run = {"record": self._run.packed(), "position": self._began, "began": self._began}
        require_savable({"state": state, "run": run}, self._checkpoints.texts)
        where = self._checkpoints.directory
        if self._resume == "never" and (steps := self._checkpoints.steps()):
            raise CheckpointError(
                f"fit: {where} holds a run at step {steps[-1]}, and resume='never'; use another directory"
            )
        refill = donate and isinstance(state, TrainState) and is_own(state)
        found = self._checkpoints.latest({"state": state}, on_host=refill, accept=_require_history)
        if found is None:
            if self._resume == "must":
                raise CheckpointError(f"fit: there is no checkpoint in {where}, and resume='must'")
            if self._checkpoints.begun:
                self._run.forget()
            return state, None
        require_alike(found, device_of(state))
        return self._taken_up(found, state, refill=refill)

    def reload(self, state: TrainState) -> tuple[Any, Position]:
        """Return the newest state that was saved, in the memory of one that is spoilt, and where in the data it was.

        Raises:
            DeviceError: when nothing was saved, or the data passes but once; nobody else can use the state then.
            CheckpointError: when nothing that is there can be read.
        """
        found, step = None, self._run.step + 1
        try:
            if self._checkpoints is not None and not _passes_once(self._data):
                self._checkpoints.wait()
                found = self._checkpoints.latest({"state": state}, on_host=True, accept=_require_history)
        finally:
            if found is None:
                consume(state)
        if found is None:
            raise DeviceError(
                f"fit: step {step} ran out of memory when it had begun to overwrite its state, which is lost, and "
                "there is no checkpoint to go back to, or the data passes but once; pass checkpoints= and data that "
                "can be gone through again, or keep the old state with donate=False"
            )
        return self._taken_up(found, state, refill=True)

    def _taken_up(self, found: Found, state: Any, *, refill: bool) -> tuple[Any, Position]:
        run = found.run
        self._began, self._position = run["began"], Position(**run["position"])
        self._run.restore(run["record"], history_of(found), found.step)
        if self._journal is not None:
            self._journal.go_on(_mark(found))
        self._last = found.step, self._run.last_evaluation
        loaded = found.parts["state"]
        return _refilled(state, loaded) if refill else loaded, self._position

    @property
    def saves(self) -> bool:
        """Whether anything is to be on the disk."""
        return self._checkpoints is not None

    @property
    def best(self) -> str | None:
        """The metric by which the best checkpoint is known."""
        return None if self._checkpoints is None else self._checkpoints.best

    def due(self, step: int) -> bool:
        """Whether a step is one after which to save."""
        return self._checkpoints is not None and step % self._checkpoints.every == 0

    def reach(self, made: StepRecord) -> None:
        """Note where in the data a step has left it, for a next one that takes its batch and may be abandoned."""
        if self._checkpoints is not None:
            self._position = position_of(made, self._data)

    def save(self, made: StepRecord, *, every: bool = False) -> None:
        """Save after a step, if it is due or the last, and tell of errors of the save before."""
        if self._checkpoints is None or self._journal is None:
            return
        self._checkpoints.check()
        done = made.step, self._run.last_evaluation
        if done == self._last or (every and not self.due(made.step)):
            return
        # Data from which nothing was taken yet is not where the run is, nor what a step was given that was abandoned.
        noted = self._position
        position = noted if noted and noted.step == made.step else position_of(made, self._data)
        # It adds to the journal, too.
        self._checkpoints.wait()
        mark, append = self._journal.following(self._run.history)
        record = {"history": mark._asdict(), **self._run.packed()}
        run = {"record": record, "position": position._asdict(), "began": self._began}
        self._checkpoints.save(
            made.step, {"state": made.state, "run": run}, metrics=self._run.at(made.step), wait=not every, first=append
        )
        self._last = done


def history_of(found: Found) -> History:
    """Return what was recorded until a checkpoint that `fit` has saved.

    Raises:
        CheckpointError: when it was saved by something else, or its records cannot be read.
    """
    mark, packed = _mark(found), found.run["record"]["history"]
    return unpack(packed) if mark is None else History(read(found.path.parent, mark))


def _mark(found: Found) -> Mark | None:
    """How much of the file of records is a checkpoint's; None when it has them in itself, or is not of `fit`."""
    run = found.parts.get("run")
    record = run.get("record") if isinstance(run, dict) else None
    return mark_of(record.get("history")) if isinstance(record, dict) else None


def _require_history(found: Found) -> None:
    if (mark := _mark(found)) is not None:
        check(found.path.parent, mark)


def _passes_once(data: Iterable[PyTree]) -> bool:
    return isinstance(data, Iterator) and sources.position(data) is None


def _refilled(state: TrainState, loaded: TrainState) -> TrainState:
    """`loaded` in the memory of a state that nobody else has, which is consumed: there may be no room for a second."""
    places, spec = tree.flatten(state)
    new = own(tree.unflatten(spec, [_filled(*pair) for pair in zip(places, tree.leaves(loaded), strict=True)]))
    consume(state)
    return new


def _filled(place: Any, value: Any) -> Any:
    if not isinstance(place, Tensor):
        return value
    # Kernels may choose by strides, so that other strides could be other bits.
    return place.copy_(value) if place.stride() == value.stride() else value.to(place.device)


def require_alike(found: Found, device: torch.device) -> None:
    """Warn when bits may come out differently here than where a checkpoint was written."""
    here = environment(device)
    other = [
        f"{name}: {found.environment.get(name)}, now {value}"
        for name, value in here.items()
        if found.environment.get(name) != value
    ]
    if other:
        warnings.warn(
            f"fit: goes on from {found.path}, which was written elsewhere; the run may differ in the last bits from "
            "one that was not interrupted:\n  " + "\n  ".join(other),
            stacklevel=4,
        )
