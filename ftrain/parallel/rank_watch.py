"""Name the rank for which a collective has waited until the deadline, and say what that rank was doing.

Once per second every rank writes a heartbeat, with what it does, into the store of the process group. When a collective
fails, because a connection broke or time ran out, the other ranks read which rank has stopped writing or is elsewhere.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain._torch import store
from ftrain.checkpoint.heartbeats import heartbeat_key
from ftrain.errors import RankError, kind_and_text

log = logging.getLogger("ftrain")

BEAT = 1.0
"""Seconds between two heartbeats."""
PATIENCE = 3.0
"""Seconds in which a live rank writes a heartbeat."""
ALARM = 60.0
"""Seconds without progress after which this rank logs which others have died or failed."""
CLOSED_PAIR = "Application timeout caused pair closure"
"""The message of gloo, without its name, for a collective that fails because another one timed out."""
IN_STEP, BETWEEN_STEPS = "in", "after"
"""What a rank is doing, before the number of the step."""


class Watch:
    """Reports to the other ranks what this rank does. A context around the part of a step in which ranks may wait.

    An error of a collective in this context is raised as a `RankError`.
    """

    def __init__(self) -> None:
        self.rank, self.size = store.rank_and_size()
        # A group keeps its threads after it is destroyed if something still refers to it.
        self._group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else lambda: None
        self._note: dict[str, Any] = {
            "number": 0,
            "doing": BETWEEN_STEPS,
            "place": "",
            "waits": False,
            "failure": "",
            "has_waited": False,
            "has_ended": False,
            "beats": 0,
            "results": 0,
        }
        self._state_step: int | None = None
        self._ended = threading.Event()
        self._is_reporting = self.size > 1 and store.are_processes()
        if self._is_reporting:
            # A connection of its own: it is used from two threads.
            self._store = store.connect()
            self._write_heartbeat()
            thread = threading.Thread(target=self._write_heartbeats, name="ftrain-watch", daemon=True)
            thread.start()
            # A thread that is using the store when the interpreter exits would abort the process.
            atexit.register(self._end, thread)

    @property
    def is_current(self) -> bool:
        """Whether the process group for which this was made still exists."""
        return dist.is_initialized() and self._group() is dist.group.WORLD

    def begin(self, step: Tensor) -> None:
        """Note the number of the step that begins. A step that is retried after an OOM error keeps its number."""
        if _torch.is_fake(step):
            return
        count = int(step)
        if count != self._state_step:
            self._state_step = count
            # The first step of another run, whose count starts again, also gets a later number.
            self._note.update(number=max(self._note["number"], count) + 1, results=0)

    def note_results(self) -> None:
        """Note that the loss has returned once more in this step, and that this rank goes on with the result."""
        self._note["results"] += 1

    def note_place(self, place: str, *, waits: bool = False, at_once: bool = False) -> None:
        """Note where in or after the step this rank is, such as ``"at block 3"``; "" when it has left that place.

        `waits` is whether it waits there for all ranks. It is written with the next heartbeat, or `at_once`.
        """
        self._note.update(place=place and f", {place}", waits=waits)
        if at_once and self._is_reporting:
            self._write_heartbeat()

    def __enter__(self) -> None:
        self._note.update(doing=IN_STEP, failure="", has_waited=False)
        self.note_place("")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._note["doing"] = BETWEEN_STEPS
            self.note_place("")
        else:
            self.explain(error)

    def report_failure(self, error: BaseException | None) -> None:
        """Report to the other ranks that this rank has failed; with None, that it continues."""
        self._note["failure"] = "" if error is None else f"{kind_and_text(error):.200}"
        if self._is_reporting:
            self._write_heartbeat()

    def explain(self, error: BaseException) -> None:
        """Report an error to the other ranks. Raises a RankError that names the absent rank if a collective failed."""
        if not self._is_reporting:
            return
        if not is_failed_collective(error):
            self.report_failure(error)
            return
        self._note["has_waited"] = True
        self._write_heartbeat()
        work = "sharded: step" if self._note["doing"] == IN_STEP else "fit: what follows step"
        raise RankError(
            f"{work} {self._note['number']} did not end on rank {self.rank}{self._note['place']}: {self._cause()}. "
            f"Saved checkpoints are unchanged: run the program again. The error of the collective: {error!s:.200}"
        ) from error

    def _cause(self) -> str:
        """Return which other ranks caused the failure, and how; waits for their heartbeats."""
        try:
            gone, present = self._describe_others()
        except RuntimeError:
            return "the rank or launcher that keeps the store of the process group has ended; see the log of each rank"
        return "; ".join(gone or present)

    def _describe_others(self) -> tuple[list[str], list[str]]:
        """Return one text for each other rank: of those that died or failed, and else of the live ones.

        It waits for heartbeats.
        """
        earlier = self._read_heartbeats()
        threading.Event().wait(PATIENCE)
        later = self._read_heartbeats()
        dead, failed, behind, level, waited = [], [], [], [], []
        for rank, note in later.items():
            where = _where(note)
            if note is None:
                dead.append(f"rank {rank} never came")
            elif note["failure"]:
                failed.append(f"rank {rank} failed {where}: {note['failure']}")
            elif note["has_ended"]:
                dead.append(f"the program of rank {rank} has ended {where}; see its log")
            elif note["has_waited"]:
                waited.append(f"rank {rank} has waited, too, {where}")
            elif note == earlier[rank]:
                dead.append(f"rank {rank} died or hangs, and was {where} when it was last heard of")
            elif _progress(note) < _progress(self._note):
                behind.append(f"rank {rank} is {where}, and hangs there or runs another program")
            else:
                level.append(f"rank {rank} is still {where}, and hangs there")
        unknown = "none has said why: ranks may have different data, options or blocks; see the log of each"
        return failed or dead, behind or level or [*waited, unknown]

    def _read_heartbeats(self) -> dict[int, Any]:
        """Return the last heartbeat of every other rank; None for a rank that has written none."""
        heartbeats: dict[int, Any] = {}
        for rank in range(self.size):
            if rank != self.rank:
                key = heartbeat_key(rank)
                heartbeats[rank] = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return heartbeats

    def _write_heartbeat(self) -> None:
        self._note["beats"] += 1
        self._store.set(heartbeat_key(self.rank), json.dumps(self._note))

    def _write_heartbeats(self) -> None:
        """Write a heartbeat per second. After a minute without progress, log which ranks have died or failed."""
        where, seconds = "", 0.0
        while self.is_current and not self._ended.wait(BEAT):
            last = where
            where = _where(self._note)
            seconds = seconds + BEAT if where == last else 0.0
            try:
                self._write_heartbeat()
                if ALARM <= seconds < ALARM + BEAT:
                    self._log_gone_ranks()
            except RuntimeError:  # The run is over, and the process with the store has ended.
                return

    def _log_gone_ranks(self) -> None:
        """Log what a `RankError` would say: with NCCL the host does not wait, and torch ends the process."""
        gone, _ = self._describe_others()
        if gone:
            log.error("rank %d waits %s: %s", self.rank, _where(self._note), "; ".join(gone))

    def _end(self, thread: threading.Thread) -> None:
        self._ended.set()
        thread.join()
        self._note["has_ended"] = True
        if self.is_current:
            with suppress(RuntimeError):  # The process with the store may have ended.
                self._write_heartbeat()


def _progress(note: dict[str, Any]) -> tuple[int, bool]:
    """Return the number of the step that a rank began last, and whether it has ended it."""
    return note["number"], note["doing"] == BETWEEN_STEPS


def _where(note: dict[str, Any] | None) -> str:
    return "" if note is None else f"{note['doing']} step {note['number']}{note['place']}"


_watch: Watch | None = None


def watch() -> Watch:
    """Return the watch of this process; if ranks are threads, each has its own."""
    global _watch
    if not dist.is_initialized() or not store.are_processes():
        return Watch()
    if _watch is None or not _watch.is_current:
        _watch = Watch()
    return _watch


def is_failed_collective(error: BaseException) -> bool:
    """Whether an error says that a collective has failed. The libraries put their names into their messages."""
    text = str(error).lower()
    # The messages of `fit` are sent with the library of the host.
    libraries = {backends.default().distributed, backends.of(tree.HOST).distributed}
    is_of_library = type(error) is RuntimeError and any(part in text for part in (*libraries, CLOSED_PAIR.lower()))
    return isinstance(error, dist.DistError) or is_of_library
