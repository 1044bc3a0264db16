"""`python -m ftrain.checkpoint inspect|verify|diff PATH`: show, check and compare checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ftrain.checkpoint.reading import verify
from ftrain.checkpoint.report import checkpoints_at, differences, inspection, require_history
from ftrain.checkpoint.treedef import printable
from ftrain.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 1 for damage or a difference."""
    parser = argparse.ArgumentParser(prog="python -m ftrain.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("inspect", "print the tree of the newest one"), ("verify", "check every byte of each")):
        commands.add_parser(name, help=text).add_argument(
            "path", type=Path, help="a checkpoint, or the directory of a run"
        )
    diff = commands.add_parser("diff", help="print the leaves in which two differ")
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, help="a checkpoint, or the directory of a run, whose newest one counts")
    options = parser.parse_args(arguments)
    try:
        if options.command == "inspect":
            _print(*inspection(checkpoints_at(options.path)[-1]))
            return 0
        if options.command == "verify":
            return max(_verify(path) for path in checkpoints_at(options.path))
        lines = list(differences(*(checkpoints_at(path)[-1] for path in (options.first, options.second))))
        _print(*(lines or ["the same, to the bit"]))
        return int(bool(lines))
    except CheckpointError as error:
        _print(*str(error).split("\n"))
        return 1


def _print(*lines: str) -> None:
    """Print lines, with control characters in names escaped."""
    print("\n".join(map(printable, lines)))


def _verify(path: Path) -> int:
    try:
        manifest = verify(path)
        require_history(path, manifest)
    except CheckpointError as error:
        _print(*f"DAMAGED  {error}".split("\n"))
        return 1
    _print(f"whole    {path}: {len(manifest.tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
