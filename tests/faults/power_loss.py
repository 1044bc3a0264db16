"""A disk that loses power: a stand-in for `os` that records all changes, and what may be on the disk afterwards."""

import errno
import math
import os
import random
import sys
from itertools import product
from pathlib import Path

from ftrain.checkpoint import files
from tests.faults.disk import READING, WRITING, Calls


class PowerCut(BaseException):
    """Stands for the end of the process."""


class Recorded(Calls):
    """Keeps a log of all changes of a disk: entries of directories, bytes of files, and syncs.

    Nodes are numbers, the root is 0. A line of the log is one of ``("entries", directory, {name: node or None})``,
    ``("directory", node)``, ``("bytes", file, offset, data)``, ``("cut", file, length)``, ``("sync", node)`` and
    ``("event", ...)``.

    Args:
        root: the directory of the disk.
        dropped: a function of a site (see `site_of`) that returns whether the sync there is left out.
        dies: the number of changes after which the process ends. Default: it does not end.

    A call for which ``broken(name, args)`` is true fails.
    """

    def __init__(self, root, dropped=lambda site: False, dies=None):
        super().__init__()
        self.root, self.dropped, self.dies = Path(root), dropped, dies
        self.log, self.sites, self.changes = [], [], 0
        self.broken = lambda name, args: False
        self._entries, self._files, self._count = {0: {}}, {}, 1

    def note(self, *event):
        self.log.append(("event", *event))

    def revive(self):
        """Continue as a new process after `PowerCut`."""
        self.dies = None
        # The locks of the old process ended with it.
        for descriptor in [*files._held]:
            files.release(descriptor)

    def call(self, number, name, function, args):
        if name == "close":
            self._files.pop(args[0], None)
            return function(*args)
        if name in WRITING:
            self.changes += 1
        if self.dies is not None and self.changes > self.dies:
            raise PowerCut
        if self.broken(name, args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if name in READING:
            return function(*args)
        return getattr(self, f"_{name}")(function, *args)

    def _place(self, path):
        """Return the node of the parent directory of a path, and the name in it; ``(0, "")`` for the root."""
        *parents, name = Path(path).relative_to(self.root).parts or ("",)
        node = 0
        for parent in parents:
            node = self._entries[node][parent]
        return node, name

    def _node(self, path):
        directory, name = self._place(path)
        return self._entries[directory].get(name) if name else directory

    def _enter(self, directory, changed):
        self.log.append(("entries", directory, changed))
        for name, node in changed.items():
            if node is None:
                self._entries[directory].pop(name)
            else:
                self._entries[directory][name] = node

    def _new(self):
        self._count += 1
        return self._count - 1

    def _opened(self, path, flags):
        if not Path(path).is_relative_to(self.root):
            # Directories above the disk may be synced too.
            return None
        node = self._node(path)
        if node is None and flags & os.O_CREAT:
            directory, name = self._place(path)
            node = self._new()
            self._enter(directory, {name: node})
        return node

    def _open(self, function, path, flags, *mode):
        descriptor = function(path, flags, *mode)
        self._files[descriptor] = [self._opened(path, flags), 0, Path(path)]
        return descriptor

    def _write(self, function, descriptor, data):
        count = function(descriptor, data)
        node, offset, _ = self._files[descriptor]
        self.log.append(("bytes", node, offset, bytes(data)[:count]))
        self._files[descriptor][1] += count
        return count

    def _lseek(self, function, descriptor, offset, whence):
        self._files[descriptor][1] = function(descriptor, offset, whence)

    def _ftruncate(self, function, descriptor, length):
        function(descriptor, length)
        self.log.append(("cut", self._files[descriptor][0], length))

    def _fsync(self, function, descriptor):
        node, _, path = self._files[descriptor]
        site = site_of(path)
        self.sites.append(site)
        if not self.dropped(site):
            self.log.append(("sync", node))

    def _mkdir(self, function, path):
        function(path)
        node = self._new()
        self._entries[node] = {}
        self.log.append(("directory", node))
        directory, name = self._place(path)
        self._enter(directory, {name: node})

    def _rename(self, function, old, new):
        function(old, new)
        (directory, before), (new_directory, after) = self._place(old), self._place(new)
        if directory != new_directory:
            raise NotImplementedError("renames are within one directory")
        self._enter(directory, {after: self._entries[directory][before], before: None})

    def _link(self, function, path, new):
        function(path, new)
        directory, name = self._place(new)
        self._enter(directory, {name: self._node(path)})

    def _unlink(self, function, path):
        function(path)
        directory, name = self._place(path)
        self._enter(directory, {name: None})

    _rmdir = _unlink


def site_of(path):
    """Return where in the code a sync is: (function of `files` < its caller, name of the path that is synced)."""
    frame, names = sys._getframe(1), []
    while frame is not None and len(names) < 2:
        file = frame.f_code.co_filename
        if "/ftrain/checkpoint/" in file:
            name = frame.f_code.co_name
            if not file.endswith("files.py") or name in ("created", "make_directories", "touch", "append"):
                names.append(name)
                if names == ["make_directories"] * 2:
                    # It calls itself for the parents.
                    names.pop()
        frame = frame.f_back
    return " < ".join(names), "temporary" if path.name.endswith(".tmp") else path.name


class Disk:
    """The possible contents of a disk after a power loss at the end of a log.

    The bytes of a file and the entries of a directory are on the disk up to its last sync. Of each later change a part
    may be there: "none" or "all" of it, and of a write also the first "half", or "zeros" in place of the data.
    """

    def __init__(self, log):
        self._entries = {0: {}, **{line[1]: {} for line in log if line[0] == "directory"}}
        self._bytes = {}
        synced = {line[1]: at for at, line in enumerate(log) if line[0] == "sync"}
        changes = [(at, line) for at, line in enumerate(log) if line[0] in ("entries", "bytes", "cut")]
        for at, line in changes:
            if at < synced.get(line[1], -1):
                _apply(line, self._entries, self._bytes, "all")
        pending = [line for at, line in changes if at > synced.get(line[1], -1)]
        seen = self._reachable(pending)
        # Changes of nodes that no directory holds any more cannot be seen.
        self.pending = [line for line in pending if line[1] in seen]

    def _reachable(self, pending):
        below = {node: {*entries.values()} for node, entries in self._entries.items()}
        for line in pending:
            if line[0] == "entries":
                below[line[1]].update(node for node in line[2].values() if node is not None)
        seen, left = set(), [0]
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left += below.get(node, ())
        return seen

    def states(self, max_others, seed):
        """Yield the different trees that may be on the disk, each as ``{name: tree or bytes}``.

        First those with none and all of the pending changes, and with one change more or less; then all others, or a
        random sample of `max_others` if there are more.
        """
        seen = set()
        for parts in self._parts(max_others, seed):
            tree = self.tree(parts)
            key = frozen(tree)
            if key not in seen:
                seen.add(key)
                yield tree

    def _parts(self, max_others, seed):
        """Yield lists of the part of each pending change that is on the disk, in the order of `states`."""
        options = [("none", "all", "half", "zeros") if line[0] == "bytes" else ("none", "all") for line in self.pending]
        none, everything = ["none"] * len(options), ["all"] * len(options)
        yield none
        for at in range(len(options)):
            yield [*none[:at], "all", *none[at + 1 :]]
        yield everything
        for at, possible_parts in enumerate(options):
            for part in possible_parts:
                yield [*everything[:at], part, *everything[at + 1 :]]
        if math.prod(map(len, options)) <= max_others:
            yield from product(*options)
        else:
            draw = random.Random(seed)
            for _ in range(max_others):
                yield [draw.choice(possible_parts) for possible_parts in options]

    def tree(self, parts):
        """Return the tree on the disk, of which there is this part of each pending change."""
        entries = {node: dict(names) for node, names in self._entries.items()}
        contents = dict(self._bytes)
        for line, part in zip(self.pending, parts, strict=True):
            if part != "none":
                _apply(line, entries, contents, part)

        def below(node):
            if node not in entries:
                return contents.get(node, b"")
            return {name: below(child) for name, child in entries[node].items()}

        return below(0)


def _apply(line, entries, contents, part):
    """Apply a part of a line of the log to the entries of directories and the bytes of files."""
    if line[0] == "entries":
        entries[line[1]].update(line[2])
        for name in [name for name, node in line[2].items() if node is None]:
            entries[line[1]].pop(name, None)
        return
    before = contents.get(line[1], b"")
    if line[0] == "cut":
        contents[line[1]] = before[: line[2]].ljust(line[2], b"\0")
        return
    offset, data = line[2:]
    data = {"all": data, "half": data[: len(data) // 2], "zeros": bytes(len(data))}[part]
    contents[line[1]] = before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]


def frozen(tree, seen=True):
    """Return a tree as a tuple that can be compared; in temporary directories, whose files nobody reads, only names."""
    if not isinstance(tree, dict):
        return tree if seen else b""
    return tuple(sorted((name, frozen(below, seen and not name.endswith(".tmp"))) for name, below in tree.items()))


def laid_out(tree, directory):
    """Write a tree of `Disk.states` into a directory."""
    directory.mkdir()
    for name, below in tree.items():
        if isinstance(below, dict):
            laid_out(below, directory / name)
        else:
            (directory / name).write_bytes(below)
