"""The checkpoints of one run: which are kept, which is the newest good one, and who may write."""

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
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from ftrain import backends
from ftrain.checkpoint import files
from ftrain.checkpoint.manifest import environment
from ftrain.checkpoint.reading import load_parts, read_manifest
from ftrain.checkpoint.replacing import current, discard, put, settle
from ftrain.checkpoint.saving import Notes, clear, device_of
from ftrain.checkpoint.staging import Staging
from ftrain.checkpoint.treedef import Described, describe
from ftrain.errors import CheckpointError, OptionError, require_positive
from ftrain.types import PyTree

LOCK = ".lock"
NAME = re.compile(r"step-(\d{12,})(?:\.new)?")
PINNED = ".pinned"
MODES = {"min": 1.0, "max": -1.0}


class Found(NamedTuple):
    """A checkpoint that was loaded.

    Args:
        step: of the run.
        path: its directory.
        parts: the trees that were saved together, by name.
        environment: where it was written, as the manifest has it.
    """

    step: int
    path: Path
    parts: dict[str, PyTree]
    environment: Mapping[str, Any]

    @property
    def run(self) -> dict[str, PyTree]:
        """What `ftrain.fit` has saved beside the state.

        Raises:
            CheckpointError: when this was saved by somebody else.
        """
        run = self.parts.get("run")
        if not isinstance(run, dict) or run.keys() != {"record", "position", "began"}:
            raise CheckpointError(
                f"{self.path}: was not saved by fit, which cannot go on from it; use another directory"
            )
        return run


class Checkpoints:
    """A directory in which a run saves its state and from which it goes on.

    `ftrain.fit` takes it as ``checkpoints=``. By hand it is a context, in which this process alone may write:

        with Checkpoints("runs/a", every=100) as checkpoints:
            checkpoints.save(100, {"state": state})

    Saving copies the state and returns; a thread writes it, one at a time, and an error in it is raised by the next
    `check`, `save` or `wait`. A checkpoint is read back and verified before older ones are removed.

    Args:
        directory: made when it is missing.
        every: steps between saves.
        keep: how many of the newest stay; the best one and pinned ones stay besides.
        best: a metric of evaluation by which the best one is known; one that is not finite never wins. Only steps that
            are saved count: `fit` warns when its ``evaluate_every`` is no multiple of `every`.
        mode: ``"min"`` when less of it is better, ``"max"`` when more is.
        async_: write in the background.
        texts: files that go into every checkpoint, such as ``{"params/config.json": model.config.to_json_string()}``,
            with which ``from_pretrained`` of transformers reads the directory ``params``.

    Raises:
        OptionError: for numbers that are not positive, or another mode.
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
        self.begun = False
        """Whether a run has been here before this context, though it may have saved nothing."""
        self._lock: files.Lock | None = None
        self._run = ""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._staging = Staging()
        self._values: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, every={self.every}, keep={self.keep})"

    def __enter__(self) -> Self:
        """Become the only one to write here.

        Raises:
            CheckpointError: when somebody else is; the message says who.
        """
        holder = {"host": socket.gethostname(), "process": os.getpid()}
        try:
            with _named(self.directory):
                files.make_directories(self.directory)
                self.begun = files.exists(self.directory / LOCK)
                self._lock = files.lock(self.directory / LOCK, holder)
                if not self._lock.excludes:
                    warnings.warn(
                        f"Checkpoints: the file system of {self.directory} has no locks, so that nothing keeps another "
                        "process from writing there; see to it that there is none",
                        stacklevel=3,
                    )
                # What a killed process has renamed is there, and may not be on the disk.
                files.sync_directory(self.directory)
                clear(self.directory)
                for step in self.steps():
                    settle(self._place(step), step)
                self._look()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what is being written, and let others write."""
        try:
            if error is None:
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
        """Return the directory of a step's checkpoint, whether it is there or not."""
        return current(self._place(step))

    def _place(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """Return the steps of which there is a checkpoint, oldest first.

        Raises:
            CheckpointError: when the directory cannot be read.
        """
        with _named(self.directory):
            # The directory of a run may be a link to a larger disk; a checkpoint in it may not.
            if not files.is_directory(Path(os.path.realpath(self.directory))):
                return []
            matches = [NAME.fullmatch(name) for name in files.names(self.directory)]
            steps = {int(match[1]) for match in matches if match}
            return [step for step in sorted(steps) if files.is_directory(self.path(step))]

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step for good.

        Raises:
            CheckpointError: when there is none, or it cannot be noted.
        """
        if step not in self.steps():
            raise CheckpointError(f"Checkpoints.pin: there is no checkpoint of step {step} in {self.directory}")
        with _named(self.directory):
            files.touch(self._pin(step))

    def save(
        self,
        step: int,
        parts: Mapping[str, PyTree],
        *,
        metrics: Mapping[str, Any] | None = None,
        wait: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        """Save trees by name as the checkpoint of a step; they may change as soon as this returns.

        A checkpoint that this run has of the step already is replaced, if anything in it differs.

        Args:
            step: steps that the state has made.
            parts: the state as ``"state"``, and whatever belongs to it.
            metrics: numbers known of the state; `best` looks here.
            wait: until it is on the disk.
            first: called by what writes, before it does: brings to the disk what the checkpoint depends on.

        Raises:
            CheckpointError: when this or the save before could not be written, or there is one of this step that
                another run has saved; outside of the context, and when the directory or its lock is no longer there.
        """
        self._require_lock("save")
        self.wait()
        described = describe(dict(parts))
        device = device_of(described.leaves)
        numbers = {name: value for name, value in (metrics or {}).items() if type(value) in (bool, int, float)}
        notes = Notes(step, self._run or uuid.uuid4().hex, numbers, environment(device), self.texts)
        self._run = notes.run
        if not self.async_:
            self._write(step, described, notes, first)
            return
        copied = described._replace(leaves=self._staging.copies(described.leaves))
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
        with _named(self.directory):
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
        """Raise the error of a save in the background that has ended.

        Raises:
            CheckpointError: when it could not be written.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: when it could not be.
        """
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
        accept: Callable[[Found], None] | None = None,
    ) -> Found | None:
        """Load the newest checkpoint that is whole; None when there is none at all.

        Args:
            like: trees by name that the saved ones must be like.
            before: take one of no later step.
            best: take the best one instead.
            on_host: leave tensors on the host, instead of putting them where those of `like` are.
            accept: raises a CheckpointError for one that is to count as damaged, for what belongs to it is.

        Raises:
            CheckpointError: when there are some, and none is whole, or it is not known which is the best.
            OptionError: for the best one of checkpoints without ``best=``.
            StructureError: when it differs from `like`.
        """
        refused: list[str] = []
        steps = [self._best()] if best else [step for step in self.steps() if before is None or step <= before]
        for step in reversed(steps):
            try:
                manifest, parts = load_parts(self.path(step), like or {}, on_host=on_host)
                if manifest.step != step:
                    raise CheckpointError(f"{self.path(step)}: is of step {manifest.step}, and was renamed")
                found = Found(step, self.path(step), parts, manifest.environment)
                if accept is not None:
                    accept(found)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            if refused:
                warnings.warn(
                    f"Checkpoints: going back to step {step}, for newer ones are damaged:\n  " + "\n  ".join(refused),
                    stacklevel=2,
                )
            self._run = manifest.run
            return found
        if refused:
            raise CheckpointError(
                f"Checkpoints: {self.directory} holds a run, and no checkpoint of it can be read; restore one, or use "
                "another directory to start anew:\n  " + "\n  ".join(refused)
            )
        return None

    def _write(self, step: int, described: Described, notes: Notes, first: Callable[[], None] | None) -> None:
        if first is not None:
            first()
        path = self._place(step)
        with _named(self.directory):
            put(path, step, described, notes)
        self._note(step)
        try:
            self._rotate(step)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints: {path} is saved, but an older one cannot be removed: {error}"
            ) from error

    def _look(self) -> None:
        self._values = {}
        for step in self.steps():
            self._note(step)

    def _best(self) -> int:
        if self.best is None:
            raise OptionError(
                "Checkpoints.latest: best=True needs the name of a metric: Checkpoints(..., best='eval_loss')"
            )
        if self._lock is None:
            self._look()
        if not self._values:
            raise CheckpointError(f"Checkpoints: no checkpoint in {self.directory} has a finite {self.best}")
        # Of equals the first one, which later ones must beat.
        return min(self._values, key=lambda step: (MODES[self.mode] * self._values[step], step))

    def _note(self, step: int) -> None:
        """Remember the metric by which the best one is known."""
        if self.best is None:
            return
        try:
            value = read_manifest(self.path(step)).metrics.get(self.best)
        except CheckpointError:
            return
        if isinstance(value, int | float) and abs(value) < float("inf"):
            self._values[step] = float(value)

    def _rotate(self, verified: int) -> None:
        """Remove what is not to be kept, now that this step's was verified."""
        # Later ones are damaged, or the run would not be here; they count for nothing.
        steps = [step for step in self.steps() if step <= verified]
        kept = {*steps[-self.keep :]}
        self._values = {step: value for step, value in self._values.items() if step in steps}
        if self._values:
            kept.add(self._best())
        for step in steps:
            if step not in kept and not files.exists(self._pin(step)):
                discard(self.path(step))

    def _pin(self, step: int) -> Path:
        return self.directory / f"{self._place(step).name}{PINNED}"


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Turn errors of the system into one that names the directory of the run."""
    try:
        yield
    except BlockingIOError as error:
        raise CheckpointError(
            f"Checkpoints: {directory} is being written to by {error}; use another directory, or stop that one"
        ) from None
    except OSError as error:
        raise CheckpointError(f"Checkpoints: {directory} cannot be used: {error}") from error
