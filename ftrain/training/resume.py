"""The checkpoints of `fit`: the records of a run that are saved beside its state, and how a run continues from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import data as sources
from ftrain import tree
from ftrain.checkpoint import Checkpoints
from ftrain.checkpoint.journal import Journal, check, mark_of, read
from ftrain.checkpoint.manifest import environment
from ftrain.checkpoint.reading import LoadedCheckpoint, read_manifest
from ftrain.checkpoint.saving import require_savable
from ftrain.checkpoint.treedef import flatten, items_by_path, require_loadable
from ftrain.data.stateful import start_position
from ftrain.errors import CheckpointError, DeviceError, OptionError, StructureError, require_choice, warn
from ftrain.parallel.compression.memory_slot import SLOT
from ftrain.parallel.state import divided
from ftrain.training.history import History, record_of, unpack
from ftrain.training.iterate import Position, device_of_state, num_batches_of
from ftrain.training.pipeline_changes import pipeline_texts, warn_of_changes
from ftrain.types import PyTree, TrainState, consume, is_donatable, mark_donatable

POSITION_KEYS = "epoch", "window", "batch"
"""The entries of a position of `ftrain.data.Loader` that are 0 at the beginning of the data."""

POSITION = "the position of the data (state_dict or get_state)"


class LastSteps(NamedTuple):
    """The last step after which each kind of work was done; -1 for never. Checkpoints use these names."""

    checked: int
    """`Step.check` was called."""
    last_evaluation: int = -1
    settled: int = -1
    """All work after reading metrics was done: evaluate, stop, adapt."""


class ResumePoint(NamedTuple):
    """A point at which a run begins, continues, or is saved."""

    state: Any
    step: int
    """Steps done."""
    last: LastSteps
    history: History
    position: Position | None = None
    """The position in the data; None for a run that begins."""
    logged: tuple[int, int] | None = None
    """``(step, count)``: loggers remove later records than the first `count` of that step; None to remove none."""


class RunCheckpoints:
    """Loads and saves the checkpoints of one run. The first rank warns and writes the history.

    Raises an OptionError for a `resume` that `fit` does not know, or for ``"must"`` without checkpoints.
    """

    def __init__(
        self, checkpoints: Checkpoints | None, step: Any, data: Iterable[PyTree], resume: str, *, is_first: bool
    ) -> None:
        require_choice("fit", "resume", resume, ("auto", "must", "never"))
        if checkpoints is None and resume == "must":
            raise OptionError("fit: resume='must' needs checkpoints=")
        self._checkpoints, self._data, self._resume = checkpoints, data, resume
        self._step, self._is_first = step, is_first
        self._pipeline = pipeline_texts(step)
        self._journal = Journal(checkpoints.directory) if checkpoints is not None and is_first else None
        self._num_batches = num_batches_of(data)
        self._began: dict[str, Any] = {}
        self._saved: tuple[int, int, int] | None = None
        self._has_begun = False

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self._checkpoints is not None and step % self._checkpoints.every == 0

    def require_one(self) -> None:
        """On the first rank, raises a CheckpointError if there is no checkpoint."""
        if self._checkpoints is not None and self._is_first and not self._checkpoints.steps():
            raise CheckpointError(f"fit: there is no checkpoint in {self._checkpoints.directory}, and resume='must'")

    def load(self, state: Any, *, donate: bool) -> ResumePoint:
        """Return the point at which the run begins with `state`, or continues from a checkpoint; raises as `fit` does.

        With `donate`, a checkpoint is loaded into the memory of `state`, if that is the only owner of its tensors. The
        state is then consumed.
        """
        step = int(getattr(state, "step", 0))
        start = ResumePoint(state, step, LastSteps(step), History())
        self._began = Position(step, data=start_position(self._data))._asdict()
        if self._checkpoints is None:
            self._warn_if_data_has_begun(step)
            return start
        # What cannot be saved is an error now, and not at the first save, after many steps.
        run = {"record": start.last._asdict(), "position": self._began, "began": self._began}
        require_savable({"state": state, "run": run}, self._checkpoints.texts)
        require_loadable("fit", POSITION, self._began["data"])
        directory = self._checkpoints.directory
        if self._resume == "never" and (steps := self._checkpoints.steps()):
            raise CheckpointError(
                f"fit: {directory} holds a run at step {steps[-1]}, and resume='never'; use another directory"
            )
        refill = donate and isinstance(state, TrainState) and is_donatable(state)
        try:
            checkpoint = self._newest(self._checkpoints, state, on_host=refill)
        except StructureError as error:
            error.add_note(
                f"fit: {directory} holds a run of another step; pass that step, or use another directory (to go on "
                "from its parameters: ft.to_module(model, checkpoints.latest().parts['state']), then state = "
                "step.init(); to keep its step and moments too: ft.checkpoint.load(path, like={'state': state}, "
                "partial=True))"
            )
            raise
        if checkpoint is not None:
            if self._is_first:
                _warn_of_environment(checkpoint, device_of_state(state))
                _warn_of_unused_state(checkpoint, state, step, may_begin=self._resume == "auto")
                self._warn_of_other_data(checkpoint)
            point = self._resume_point(checkpoint, state, refill=refill)
            if self._is_first:
                warn_of_changes(self._step, checkpoint, point.history)
            return point
        self._warn_if_data_has_begun(step)
        # A run that was killed before its first save may have logged steps, which are made again. If it logged none,
        # the last lines of a log are those of another run.
        has_logged = self._journal is not None and self._journal.exists
        return start._replace(logged=(step + 1, 0)) if has_logged else start

    def begin_history(self) -> None:
        """Record in the directory that the run has called loggers, before it does so for the first time.

        Raises a CheckpointError if that fails.
        """
        if self._journal is not None and not self._has_begun:
            self._journal.begin()
            self._has_begun = True

    def _warn_if_data_has_begun(self, step: int) -> None:
        """Warn if a run begins with data that is not at its beginning."""
        position = (self._began["data"] or {}) if step == 0 and self._is_first else {}
        if any(position.get(name) for name in POSITION_KEYS):
            place = ", ".join(f"{name} {position[name]}" for name in POSITION_KEYS if name in position)
            warn(
                f"fit: the state is at step 0, and the data at {place}, where an earlier run left it; make a new "
                "loader for each run, so that equal runs get equal batches"
            )

    def _warn_of_other_data(self, checkpoint: LoadedCheckpoint) -> None:
        """Warn if data that keeps no position has another number of batches than when the checkpoint was saved."""
        saved, current = checkpoint.run["record"].get("batches"), self._num_batches
        batches_done = checkpoint.run["position"]["batch"]
        # `iterate` warns if there are fewer batches than the run has read.
        if saved and current and saved != current and current >= batches_done:
            warn(
                f"fit: the data has {current} batches, and had {saved} when {checkpoint.path} was saved: the run "
                f"goes on after the first {batches_done} of this pass. If others were only added at the end, nothing "
                "is lost or repeated; else pass the data of the run, or another directory for a new one"
            )

    def _newest(self, checkpoints: Checkpoints, state: Any, *, on_host: bool) -> LoadedCheckpoint | None:
        """Return the newest checkpoint; None if there is none.

        The unsent compressed gradients of a checkpoint of other ranks are divided over the ranks of `state`.
        """
        if not (isinstance(state, TrainState) and _is_of_other_ranks(checkpoints, state)):
            return checkpoints.latest({"state": state}, on_host=on_host, accept=_require_history)
        loaded = checkpoints.latest(accept=_require_history)
        if loaded is None:
            return None
        if self._is_first and SLOT in loaded.parts["state"].slots:
            outcome = "is divided equally over those of this run" if SLOT in state.slots else "is dropped"
            warn(f"fit: {loaded.path} is of other ranks; what these had not sent yet {outcome}")
        return loaded._replace(parts={**loaded.parts, "state": divided(loaded.parts["state"], like=state)})

    def reload(self, state: TrainState, step: int) -> ResumePoint:
        """Return the newest saved point, after step number `step` has failed while it overwrote its state.

        It is loaded into the memory of `state`. Raises a DeviceError if there is no checkpoint, or the data can be
        iterated only once.
        """
        checkpoint = None
        passes_once = isinstance(self._data, Iterator) and sources.position(self._data) is None
        try:
            if self._checkpoints is not None and not passes_once:
                self._checkpoints.wait()
                checkpoint = self._newest(self._checkpoints, state, on_host=True)
        finally:
            if checkpoint is None:
                consume(state)
        if checkpoint is None:
            raise DeviceError(
                f"fit: step {step} ran out of memory when it had begun to overwrite its state, which is lost. There is "
                "no checkpoint to go back to, or the data can be iterated only once: pass checkpoints= and data that "
                "can be iterated again, or keep the old state with donate=False"
            )
        return self._resume_point(checkpoint, state, refill=True)

    def _resume_point(self, checkpoint: LoadedCheckpoint, state: Any, *, refill: bool) -> ResumePoint:
        step, record = checkpoint.step, checkpoint.run["record"]
        last = LastSteps(record.get("checked", step), record["last_evaluation"], record.get("settled", step))
        history = history_of(checkpoint)
        if self._journal is not None:
            self._journal.continue_after(mark_of(checkpoint.manifest))
        self._began = checkpoint.run["began"]
        self._saved = _save_key(step, last)
        loaded = checkpoint.parts["state"]
        return ResumePoint(
            _refill(state, loaded) if refill else loaded,
            step,
            last,
            history,
            Position(**checkpoint.run["position"]),
            logged=(step, sum(record["step"] == step for record in history)),
        )

    def wait(self) -> None:
        """Wait for a save in the background; raises its CheckpointError if it failed."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def needs(self, step: int, last: LastSteps) -> bool:
        """Whether the state of a step is not saved, or was evaluated or adapted after it was saved."""
        return self._checkpoints is not None and self._saved != _save_key(step, last)

    def save(self, point: ResumePoint, *, wait: bool) -> None:
        """Save a point; with `wait`, return only when it is on the disk."""
        if self._checkpoints is None or point.position is None:
            return
        require_loadable("fit", POSITION, point.position.data)
        # An earlier save, if it is still being written, must append to the journal first.
        self._checkpoints.wait()
        history, append = None, None
        if self._journal is not None:
            mark, append = self._journal.prepare_append(point.history)
            history = mark._asdict()
        record = {"history": history, **self._pipeline, "batches": self._num_batches, **point.last._asdict()}
        run = {"record": record, "position": point.position._asdict(), "began": self._began}
        self._checkpoints.save(
            point.step,
            {"state": point.state, "run": run},
            metrics=record_of(point.history, point.step),
            wait=wait,
            first=append,
        )
        self._saved = _save_key(point.step, point.last)


def _save_key(step: int, last: LastSteps) -> tuple[int, int, int]:
    """Return the step, and the work after it that changes what is saved: two saves with equal keys are the same."""
    return step, last.last_evaluation, last.settled


def history_of(checkpoint: LoadedCheckpoint) -> History:
    """Return the history of a run up to a checkpoint that `fit` has saved."""
    mark, packed = mark_of(checkpoint.manifest), checkpoint.run["record"]["history"]
    return unpack(packed) if mark is None else History(read(checkpoint.path.parent, mark))


def _require_history(checkpoint: LoadedCheckpoint) -> None:
    if (mark := mark_of(checkpoint.manifest)) is not None:
        check(checkpoint.path.parent, mark)


def _is_of_other_ranks(checkpoints: Checkpoints, state: TrainState) -> bool:
    """Whether the newest checkpoint has unsent compressed gradients of other shapes than a state."""
    steps = checkpoints.steps()
    if not steps:
        return False
    try:
        manifest = read_manifest(checkpoints.path(steps[-1]))
    except CheckpointError:  # `latest` raises it.
        return False
    saved = items_by_path(manifest.tree, manifest.tensors)
    needed = flatten({"state": state}).items_by_path()
    return _unsent_shapes(saved) != _unsent_shapes(needed)


def _unsent_shapes(items: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
    """Return the shapes of the unsent compressed gradients, by path; () for an item without a shape."""
    return {path: tuple(getattr(item, "shape", ())) for path, item in items.items() if path[1:3] == ("slots", SLOT)}


def _refill(state: TrainState, loaded: TrainState) -> TrainState:
    """Return `loaded` in the memory of `state`, which is consumed: the device may have no memory for both."""

    def copy_into(leaf: Any, value: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return value
        # With other strides torch might choose another kernel, whose results have other bits.
        return leaf.copy_(value) if leaf.stride() == value.stride() else value.to(leaf.device)

    refilled = mark_donatable(tree.map(copy_into, state, loaded))
    consume(state)
    return refilled


def _warn_of_environment(checkpoint: LoadedCheckpoint, device: torch.device) -> None:
    """Warn if a checkpoint was written with other versions, threads or hardware, which may change the last bits."""
    saved = checkpoint.environment
    differences = [
        f"{name}: {saved.get(name)}, now {value}"
        for name, value in environment(device).items()
        if saved.get(name) != value
    ]
    if differences:
        warn(
            f"fit: continues from {checkpoint.path}, which was written in another environment; the run may differ in "
            "the last bits from one that was not interrupted:\n  " + "\n  ".join(differences)
        )


def _warn_of_unused_state(checkpoint: LoadedCheckpoint, state: Any, step: int, *, may_begin: bool) -> None:
    """Warn if the state that the caller passed is not of the run whose checkpoint is loaded in its place.

    Seeds are compared only if the run might also have begun with that state.
    """
    saved = checkpoint.parts["state"]
    has_other_seed = may_begin and isinstance(state, TrainState) and not torch.equal(state.rng, saved.rng)
    if step > checkpoint.step:
        difference = f"the state has made {step} steps, and {checkpoint.path} is of step {checkpoint.step}"
    elif has_other_seed:
        difference = f"the state has another seed (step.init(seed=)) than {checkpoint.path}"
    else:
        return
    warn(
        f"fit: {difference}: the run continues from the checkpoint, and the state is not used; pass another directory "
        "to continue from the state"
    )
