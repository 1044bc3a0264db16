"""The checkpoints of one run: saving, rotation, loading the newest intact one, and the lock of the directory."""

from __future__ import annotations

import os
import re
import socket
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from ftrain import backends
from ftrain.checkpoint import files
from ftrain.checkpoint.manifest import environment
from ftrain.checkpoint.reading import load_parts, read_manifest
from ftrain.checkpoint.replacing import current_path, discard, finish_replacement, write_or_replace
from ftrain.checkpoint.saving import Notes, device_of, remove_abandoned
from ftrain.checkpoint.staging import Staging
from ftrain.checkpoint.treedef import FlatTree, flatten
from ftrain.errors import CheckpointError, OptionError, require_positive
from ftrain.types import PyTree

LOCK = ".lock"
NAME = re.compile(r"step-(\d{12,})(?:\.new)?")
PINNED = ".pinned"
MODES = {"min": 1.0, "max": -1.0}


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded: its trees by name, and versions, threads, device and flags when it was saved."""

    step: int
    path: Path
    parts: dict[str, PyTree]
    environment: Mapping[str, Any]

    @property
    def run(self) -> dict[str, PyTree]:
        """What `ftrain.fit` saved beside the state.

        Raises:
            CheckpointError: when `fit` did not save this checkpoint.
        """
        run = self.parts.get("run")
        if not isinstance(run, dict) or run.keys() != {"record", "position", "began"}:
            raise CheckpointError(
                f"{self.path}: was not saved by fit, which cannot go on from it; use another directory"
            )
        return run


class Checkpoints:
    """A directory in which a run saves its state, and from which it resumes.

    Pass it to `ftrain.fit` as ``checkpoints=``, or use it as a context, in which only this process may write:

        with Checkpoints("runs/a", every=100) as checkpoints:
            checkpoints.save(100, {"state": state})

    `save` copies the state and returns; a thread writes the copy, one at a time, and the next `check`, `save` or `wait`
    raises its errors. Each checkpoint is verified before older ones are removed.

    Args:
        directory: created when it is missing.
        every: steps between saves.
        keep: number of newest checkpoints to keep, besides the best one and pinned ones.
        best: name of the evaluation metric that determines the best checkpoint; values that are not finite never win.
            Only saved steps count: `fit` warns when its ``evaluate_every`` is no multiple of `every`.
        mode: ``"min"`` when lower values of the metric are better, ``"max"`` when higher ones are.
        async_: write in a background thread.
        texts: content of additional files in every checkpoint by their names. With
            ``{"params/config.json": model.config.to_json_string()}``, ``from_pretrained`` of transformers reads the
            directory ``params``.

    Raises:
        OptionError: when `every` or `keep` is not positive, or the mode is unknown.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int,
        keep: int = 3,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        async_: bool = True,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        require_positive("Checkpoints", "every", every)
        require_positive("Checkpoints", "keep", keep)
        if mode not in MODES:
            raise OptionError(f"Checkpoints: mode is {mode!r}; choices are {', '.join(MODES)}")
        self.directory, self.every, self.keep = Path(directory), every, keep
        self.best, self.mode, self.async_, self.texts = best, mode, async_, dict(texts or {})
        self.was_used = False
        """Whether a run used the directory before this context, even if it saved nothing."""
        self._lock: files.Lock | None = None
        self._run = ""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._staging = Staging()
        self._values: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, every={self.every}, keep={self.keep})"

    def __enter__(self) -> Self:
        """Lock the directory for this process.

        Raises:
            CheckpointError: when another process has locked it; the message names its host and process.
        """
        holder = {"host": socket.gethostname(), "process": os.getpid()}
        try:
            with _error_names(self.directory):
                files.make_directories(self.directory)
                self.was_used = files.exists(self.directory / LOCK)
                self._lock = files.lock(self.directory / LOCK, holder)
                if not self._lock.excludes:
                    warnings.warn(
                        f"Checkpoints: the file system of {self.directory} has no locks, so nothing keeps another "
                        "process from writing there; make sure that none does",
                        stacklevel=3,
                    )
                # A killed process may have renamed checkpoints without syncing the directory.
                files.sync_directory(self.directory)
                remove_abandoned(self.directory)
                for step in self.steps():
                    finish_replacement(self._step_path(step), step)
                self._read_metrics()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for the save in the background, and release the lock."""
        try:
            if kind is None:
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = None
            self._unlock()

    def _unlock(self) -> None:
        held, self._lock = self._lock, None
        if held is not None:
            files.unlock(held)

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step, which need not exist."""
        return current_path(self._step_path(step))

    def _step_path(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first.

        Raises:
            CheckpointError: when the directory cannot be read.
        """
        with _error_names(self.directory):
            # The directory of a run may be a link, to a larger disk for example; a checkpoint may not.
            if not files.is_directory(Path(os.path.realpath(self.directory))):
                return []
            matches = [NAME.fullmatch(name) for name in files.names(self.directory)]
            steps = {int(match[1]) for match in matches if match}
            return [step for step in sorted(steps) if files.is_directory(self.path(step))]

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step: rotation never removes it.

        Raises:
            CheckpointError: when the step has no checkpoint, or the pin cannot be written.
        """
        if step not in self.steps():
            raise CheckpointError(f"Checkpoints.pin: there is no checkpoint of step {step} in {self.directory}")
        with _error_names(self.directory):
            files.touch(self._pin_path(step))

    def save(
        self,
        step: int,
        parts: Mapping[str, PyTree],
        *,
        metrics: Mapping[str, Any] | None = None,
        wait: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Save trees by name as the checkpoint of a step; the trees may change as soon as this returns.

        If this run already has a checkpoint of the step with other content, it is replaced.

        Args:
            step: steps of training done.
            parts: the state as ``"state"``, and other trees that belong to it.
            metrics: metrics of the state by name, among them that of `best`.
            wait: return when the checkpoint is on disk.
            first: called before writing, in the same thread: writes what the checkpoint depends on.

        Raises:
            CheckpointError: when this save or the previous one failed, when another run has saved a different
                checkpoint of this step, outside of the context, and when the directory or its lock was removed.
        """
        self._require_lock("save")
        self.wait()
        flat = flatten(dict(parts))
        device = device_of(flat.leaves)
        numbers = {name: value for name, value in (metrics or {}).items() if type(value) in (bool, int, float)}
        notes = Notes(step, self._run or uuid.uuid4().hex, numbers, environment(device), self.texts)
        self._run = notes.run
        if not self.async_:
            self._write(step, flat, notes, first)
            return
        copied = flat._replace(leaves=self._staging.copies(flat.leaves))
        backends.of(device).synchronize()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending = self._pool.submit(self._write, step, copied, notes, first)
        if wait:
            self.wait()

    def _require_lock(self, function: str) -> None:
        held = self._lock
        if held is None:
            raise CheckpointError(
                f"Checkpoints.{function}: not open for writing; use it as a context: with checkpoints: ..."
            )
        with _error_names(self.directory):
            if files.is_held(held):
                return
        if held.process != os.getpid():
            why = f"it is open for writing in process {held.process}, of which this one is a copy; open it here anew"
        elif not files.exists(self.directory):
            why = "it was renamed or removed while this process wrote to it, and nothing more can be saved there"
        else:
            why = (
                f"its {LOCK} was removed or replaced while this process wrote to it, so that another one may write "
                "there now; leave that file alone, and go on from the newest checkpoint"
            )
        raise CheckpointError(f"Checkpoints.{function}: {self.directory}: {why}")

    def check(self) -> None:
        """Raise the CheckpointError of a save in the background that has failed, without waiting."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background; raises its CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(
        self,
        like: Mapping[str, PyTree] | None = None,
        *,
        before: int | None = None,
        best: bool = False,
        on_host: bool = False,
        accept: Callable[[LoadedCheckpoint], None] | None = None,
    ) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint; None when the directory has no checkpoint.

        Args:
            like: trees by name with the expected structure, shapes, dtypes and devices.
            before: the latest step to load. Default: any.
            best: load the best checkpoint instead of the newest.
            on_host: keep tensors on the CPU, and not on the devices of `like`.
            accept: called with each loaded checkpoint; raises a CheckpointError to reject it as damaged.

        Raises:
            CheckpointError: when all checkpoints are damaged, or none has a finite value of the metric of `best`.
            OptionError: for ``best=True`` without ``Checkpoints(best=)``.
            StructureError: when the checkpoint differs from `like`.
        """
        errors: list[str] = []
        steps = [self._best()] if best else [step for step in self.steps() if before is None or step <= before]
        for step in reversed(steps):
            try:
                manifest, parts = load_parts(self.path(step), like or {}, on_host=on_host)
                if manifest.step != step:
                    raise CheckpointError(f"{self.path(step)}: is of step {manifest.step}, and was renamed")
                loaded = LoadedCheckpoint(step, self.path(step), parts, manifest.environment)
                if accept is not None:
                    accept(loaded)
            except CheckpointError as error:
                errors.append(str(error))
                continue
            if errors:
                warnings.warn(
                    f"Checkpoints: going back to step {step}, since newer checkpoints are damaged:\n  "
                    + "\n  ".join(errors),
                    stacklevel=2,
                )
            self._run = manifest.run
            return loaded
        if errors:
            raise CheckpointError(
                f"Checkpoints: {self.directory} holds a run, and no checkpoint of it can be read; restore one, or use "
                "another directory to start anew:\n  " + "\n  ".join(errors)
            )
        return None

    def _write(self, step: int, flat: FlatTree, notes: Notes, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        path = self._step_path(step)
        with _error_names(self.directory):
            write_or_replace(path, step, flat, notes)
        self._note_metric(step)
        try:
            self._rotate(step)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints: {path} is saved, but an older one cannot be removed: {error}"
            ) from error

    def _read_metrics(self) -> None:
        self._values = {}
        for step in self.steps():
            self._note_metric(step)

    def _best(self) -> int:
        if self.best is None:
            raise OptionError(
                "Checkpoints.latest: best=True needs the name of a metric: Checkpoints(..., best='eval_loss')"
            )
        if self._lock is None:
            self._read_metrics()
        if not self._values:
            raise CheckpointError(f"Checkpoints: no checkpoint in {self.directory} has a finite {self.best}")
        # The earliest of equal ones.
        return min(self._values, key=lambda step: (MODES[self.mode] * self._values[step], step))

    def _note_metric(self, step: int) -> None:
        """Remember the metric of `best` of a checkpoint."""
        if self.best is None:
            return
        try:
            value = read_manifest(self.path(step)).metrics.get(self.best)
        except CheckpointError:
            return
        if isinstance(value, int | float) and abs(value) < float("inf"):
            self._values[step] = float(value)

    def _rotate(self, verified: int) -> None:
        """Remove old checkpoints, after that of this step was verified."""
        # The run resumed from an older checkpoint, so later ones are damaged and do not count.
        steps = [step for step in self.steps() if step <= verified]
        steps_to_keep = {*steps[-self.keep :]}
        self._values = {step: value for step, value in self._values.items() if step in steps}
        if self._values:
            steps_to_keep.add(self._best())
        for step in steps:
            if step not in steps_to_keep and not files.exists(self._pin_path(step)):
                discard(self.path(step))

    def _pin_path(self, step: int) -> Path:
        return self.directory / f"{self._step_path(step).name}{PINNED}"


@contextmanager
def _error_names(directory: Path) -> Iterator[None]:
    """Turn errors of the system into a CheckpointError that names the directory."""
    try:
        yield
    except BlockingIOError as error:
        raise CheckpointError(
            f"Checkpoints: {directory} is being written to by {error}; use another directory, or stop that one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"Checkpoints: {directory} cannot be used: {error}") from error
