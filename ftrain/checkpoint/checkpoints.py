"""The checkpoints of one run: saving, rotation, loading the newest intact one, and the lock of the directory."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from ftrain import backends
from ftrain.checkpoint import files
from ftrain.checkpoint.directory_lock import (
    lock_directory,
    published,
    require_held,
    require_locked_by,
    system_errors,
)
from ftrain.checkpoint.frozen_files import FrozenFiles
from ftrain.checkpoint.heartbeats import SILENCE
from ftrain.checkpoint.manifest import Manifest, environment
from ftrain.checkpoint.model_files import frozen_numbers
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import LoadedCheckpoint, load_checkpoint, read_manifest
from ftrain.checkpoint.replacing import current_path, discard, finish_replacement, write_or_replace
from ftrain.checkpoint.saving import (
    LocalTree,
    copied_to_host,
    local_tree,
    remove_abandoned,
    require_named,
    texts_by_name,
)
from ftrain.checkpoint.saving_on_ranks import help_write, write_verified
from ftrain.checkpoint.treedef import flatten
from ftrain.errors import (
    CheckpointError,
    OptionError,
    UnreachableError,
    add_note,
    as_path,
    require_choice,
    require_positive,
    require_switches,
    warn,
    warn_of_mode,
    whole_number,
)
from ftrain.tree import device_off_host
from ftrain.types import PyTree

NAME = re.compile(r"step-(\d{12,})(?:\.new)?")
PINNED = ".pinned"
MODES = {"min": 1.0, "max": -1.0}


class Checkpoints:
    """A directory in which a run saves its state, and from which it resumes.

    Pass it to `ftrain.fit` as ``checkpoints=``, or use it as a context, in which only this process may write:

        with Checkpoints("runs/a", every=100) as checkpoints:
            checkpoints.save(100, {"state": state})

    `save` copies the state and returns; a thread writes the copy, one at a time, and the next `check`, `save` or `wait`
    raises its errors. Each checkpoint is verified before older ones are removed. Frozen parameters are written once:
    later checkpoints share their file by a hard link.

    Args:
        directory: directory of the run; created if it is missing.
        every: number of steps between saves.
        keep: number of newest checkpoints to keep, in addition to the best one and pinned ones.
        best: name of the evaluation metric that determines the best checkpoint; values that are not finite never win.
            Only saved steps count: `fit` warns if its ``evaluate_every`` is not a multiple of `every`.
        mode: ``"min"`` when lower values of the metric are better, ``"max"`` when higher ones are.
        async_: write in a background thread.
        texts: content of additional files in every checkpoint by their names. With
            ``{"params/config.json": model.config.to_json_string()}``, ``from_pretrained`` of transformers reads the
            directory ``params``.

    Raises:
        OptionError: when an argument is not as above.
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
        require_switches("Checkpoints", async_=async_)
        if not isinstance(best, str | None):
            raise OptionError(f"Checkpoints: best is {best!r}, needs the name of a metric, such as 'eval_loss'")
        require_choice("Checkpoints", "mode", mode, [*MODES])
        warn_of_mode("Checkpoints(best=)", best or "", mode)
        self.directory, self.every, self.keep = as_path("Checkpoints", "directory", directory), every, keep
        self.best, self.mode, self.async_, self.texts = best, mode, async_, texts_by_name("Checkpoints", texts)
        self._lock: files.Lock | None = None
        self._ranks: Ranks | None = None
        self._saving: Ranks | None = None
        self._run = ""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._buffers: Sequence[Tensor] = ()
        self._frozen_files = FrozenFiles()
        self._metrics: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.directory)!r}, every={self.every}, keep={self.keep})"

    def __enter__(self) -> Self:
        """Lock the directory for this process.

        Raises:
            CheckpointError: when another process has locked it, which the message names; when this context is open
                already; or when ranks have different directories.
        """
        if self._ranks is not None:
            raise CheckpointError(
                f"Checkpoints: {self.directory} is open already; fit(checkpoints=) opens it itself, so call it outside "
                "of `with checkpoints:`, and give a run within a run a directory of its own"
            )
        self._ranks, self._saving, self._frozen_files = Ranks("Checkpoints"), Ranks("Checkpoints.save"), FrozenFiles()
        self._metrics = {}
        try:
            self._ranks.on_first(self._open)
            if self._ranks.size > 1:
                with system_errors(self.directory):
                    expected = self._ranks.on_first(lambda: published(self._lock) if self._lock is not None else "")
                    self._ranks.gather(lambda: require_locked_by(self.directory, expected))
        except BaseException:
            self._close()
            raise
        return self

    def _open(self) -> None:
        """Lock the directory, and remove what interrupted saves left."""
        with system_errors(self.directory):
            files.make_directories(self.directory)
            self._lock = lock_directory(self.directory)
            # A killed process may have renamed checkpoints without syncing the directory.
            files.sync_directory(self.directory)
            remove_abandoned(self.directory)
            for step in self.steps():
                finish_replacement(self._step_path(step), step)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Wait for the save in the background, and release the lock; a note of `error` says if the save failed."""
        try:
            if error is not None and self._pending is not None and self._saving is not None:
                # The other ranks finish it too, unless they have ended.
                wait_for([self._pending], SILENCE if isinstance(error, Exception) else 0)
                self._saving.abandon()
            self.wait()
        except Exception as save_error:
            if error is None:
                raise
            add_note(error, f"the save in the background failed, too: {save_error}")
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._pool = None
            self._close()

    def _close(self) -> None:
        self._ranks = self._saving = None
        held, self._lock = self._lock, None
        if held is not None:
            files.unlock(held)

    def path(self, step: int) -> Path:
        """Return the directory for the checkpoint of a step. Raises an OptionError if `step` is not a step number."""
        return current_path(self._step_path(whole_number("Checkpoints.path", "step", step)))

    def _step_path(self, step: int) -> Path:
        return self.directory / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in ascending order. Raises a CheckpointError for a system error."""
        with system_errors(self.directory):
            # The directory of a run may be a link, for example to a larger disk; a checkpoint may not.
            if not files.is_directory(files.resolved(self.directory)):
                return []
            matches = [NAME.fullmatch(name) for name in files.names(self.directory)]
            steps = {int(match[1]) for match in matches if match}
            return [step for step in sorted(steps) if files.is_directory(self.path(step))]

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step: rotation never removes it. Raises a CheckpointError if there is none."""
        if step not in self.steps():
            raise CheckpointError(f"Checkpoints.pin: there is no checkpoint of step {step} in {self.directory}")
        with system_errors(self.directory):
            files.touch(self._step_path(step).with_suffix(PINNED))

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
            first: function that is called before writing, in the same thread; `fit` writes the history with it.

        Raises:
            CheckpointError: when this save or the previous one failed, when another run has saved a different
                checkpoint of this step, outside of the context, and when the directory or its lock was removed.
            OptionError: when `step` is not a whole number of at least 0.
            StructureError: when `parts` is not a dict.
        """
        if self._ranks is None or self._saving is None:
            raise CheckpointError("Checkpoints.save: not open for writing; use it as a context: with checkpoints: ...")
        step, ranks, saving = whole_number("Checkpoints.save", "step", step), self._ranks, self._saving
        require_named("Checkpoints.save", "parts", parts)
        self.wait()
        with ranks.all_or_none():
            if self._lock is not None:
                require_held(self._lock)
            flat = flatten(dict(parts))
            device = device_off_host(leaf.value for leaf in flat.leaves)
            scalars = {name: value for name, value in (metrics or {}).items() if type(value) in (bool, int, float)}
            self._run = self._run or uuid.uuid4().hex
            draft = Manifest(step, self._run, scalars, environment(device), flat.treedef)
            content = local_tree(flat, ranks.rank, frozen_numbers(flat))
            content = self._frozen_files.without_written(content, ranks)
            if self.async_:
                content = copied_to_host(content, self._buffers)
                self._buffers = [*content.locals.values()]
                backends.of(device).synchronize()
        if not self.async_:
            self._write(step, content, draft, first, saving)
            return
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending = self._pool.submit(self._write, step, content, draft, first, saving)
        if wait:
            self.wait()

    def check(self) -> None:
        """Raise the CheckpointError of a save in the background that has failed, without waiting.

        Does nothing on many ranks, which see the error at different times: the next `save` or `wait` raises it.
        """
        is_one_rank = self._ranks is None or self._ranks.size == 1
        if is_one_rank and self._pending is not None and self._pending.done():
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
            accept: function of a loaded checkpoint that raises a CheckpointError to reject it as damaged. On many ranks
                the first one calls it.

        Raises:
            CheckpointError: when this process may not read one, all are damaged, or none has a finite metric of `best`.
            OptionError: for ``best=True`` without ``Checkpoints(best=)``, or when `before` is not a step.
            StructureError: when the checkpoint differs from `like`, or `like` is not a dict.
        """
        require_switches("Checkpoints.latest", best=best, on_host=on_host)
        require_named("Checkpoints.latest", "like", {} if like is None else like)
        ranks, errors = self._ranks or Ranks("Checkpoints"), list[str]()
        for step in ranks.on_first(lambda: self._steps_to_try(before, best=best)):
            try:
                loaded = load_checkpoint(self.path(step), step, like or {}, ranks, on_host=on_host, accept=accept)
            except UnreachableError:
                raise
            except CheckpointError as error:
                if self._ranks is None and step not in ranks.on_first(self.steps):
                    # The run that writes to this directory saved a newer one, and removed this one.
                    return self.latest(like, before=before, best=best, on_host=on_host, accept=accept)
                errors.append(str(error))
                continue
            if errors and ranks.is_first:
                warn(
                    f"Checkpoints: going back to step {step}, since newer checkpoints are damaged:\n  "
                    + "\n  ".join(errors)
                )
            self._run = loaded.manifest.run
            return loaded
        if errors and best:
            raise CheckpointError(
                f"Checkpoints: the best checkpoint in {self.directory} cannot be read; restore it, or load the newest "
                f"one, latest():\n  {errors[0]}"
            )
        if errors:
            raise CheckpointError(
                f"Checkpoints: {self.directory} holds a run, and no checkpoint of it can be read; restore one, or use "
                "another directory for a new run:\n  " + "\n  ".join(errors)
            )
        return None

    def _steps_to_try(self, before: int | None, *, best: bool) -> list[int]:
        """Return the steps whose checkpoints `latest` tries to load, in this order."""
        last = float("inf") if before is None else whole_number("Checkpoints.latest", "before", before)
        steps = [step for step in reversed(self.steps()) if step <= last]
        if not best:
            return steps
        if self.best is None:
            raise OptionError("Checkpoints.latest: best=True needs a metric: Checkpoints(..., best='eval_loss')")
        best_step = self._best_step({step: self._best_metric(step) for step in steps})
        if best_step is None:
            until = "" if before is None else f" up to step {before}"
            raise CheckpointError(f"Checkpoints: no checkpoint in {self.directory}{until} has a finite {self.best}")
        return [best_step]

    def _write(
        self, step: int, content: LocalTree, draft: Manifest, first: Callable[[], None] | None, ranks: Ranks
    ) -> None:
        """Write and verify a checkpoint with the other ranks, and remove older ones; in the background if `async_`."""
        with ranks.all_or_none():
            if not ranks.is_first:
                help_write(self.directory, content, ranks)
                self._frozen_files.record(content, self.directory, None)
                return
            if first is not None:
                first()
            path = self._step_path(step)
            with system_errors(self.directory):
                written = write_or_replace(
                    path, step, lambda new: write_verified(new, content, draft, self.texts, ranks)
                )
            self._frozen_files.record(content, path, written)
            self._metrics.pop(step, None)
            try:
                self._rotate(step)
            except OSError as error:
                text = f"Checkpoints: {path} is saved, but an older one cannot be removed: {error}"
                raise CheckpointError(text) from error

    def _best_step(self, values: Mapping[int, float]) -> int | None:
        """Return the step with the best metric, the earliest of equally good ones; None if no metric is finite."""
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return min(finite, key=lambda step: (MODES[self.mode] * values[step], step), default=None)

    def _best_metric(self, step: int) -> float:
        """Return the metric that `best` names from the manifest of a checkpoint; NaN if it has none."""
        try:
            value = read_manifest(self.path(step)).metrics.get(self.best or "")
        except UnreachableError:
            raise
        except CheckpointError:
            return float("nan")
        return float(value) if isinstance(value, int | float) else float("nan")

    def _rotate(self, verified: int) -> None:
        """Remove old checkpoints, after the checkpoint of the step `verified` was verified."""
        # Checkpoints of later steps are damaged: the run resumed from an older one. They do not count as kept.
        steps = [step for step in self.steps() if step <= verified]
        steps_to_keep = {*steps[-self.keep :]}
        if self.best:
            # Each manifest is read once: to read those of thousands of checkpoints takes longer than a save.
            known = self._metrics
            self._metrics = {step: known[step] if step in known else self._best_metric(step) for step in steps}
            best_step = self._best_step(self._metrics)
            steps_to_keep |= set() if best_step is None else {best_step}
        for step in steps:
            if step not in steps_to_keep and not files.exists(self._step_path(step).with_suffix(PINNED)):
                discard(self.path(step))
