"""`python -m ftrain.checkpoint inspect|verify|diff PATH`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ftrain.checkpoint.reading import verify
from ftrain.checkpoint.report import differences, found, inspected, require_history
from ftrain.checkpoint.treedef import printable
from ftrain.errors import CheckpointError


def main(given: list[str] | None = None) -> int:
    """Do what the command line says; the exit status is 1 for damage or a difference."""
    parser = argparse.ArgumentParser(prog="python -m ftrain.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("inspect", "print the tree of the newest one"), ("verify", "check every byte of each")):
        commands.add_parser(name, help=text).add_argument(
            "path", type=Path, help="a checkpoint, or the directory of a run"
        )
    diff = commands.add_parser("diff", help="print in which leaves two differ")
    diff.add_argument("paths", type=Path, nargs=2, help="checkpoints")
    options = parser.parse_args(given)
    try:
        if options.command == "inspect":
            _say(*inspected(found(options.path)[-1]))
            return 0
        if options.command == "verify":
            return max(_verified(path) for path in found(options.path))
        lines = list(differences(*options.paths))
        _say(*(lines or ["the same, to the bit"]))
        return int(bool(lines))
    except CheckpointError as error:
        _say(*str(error).split("\n"))
        return 1


def _say(*lines: str) -> None:
    """Print lines, whose names may be of anybody's making."""
    print("\n".join(map(printable, lines)))


def _verified(path: Path) -> int:
    try:
        manifest = verify(path)
        require_history(path, manifest)
    except CheckpointError as error:
        _say(*f"DAMAGED  {error}".split("\n"))
        return 1
    _say(f"whole    {path}: {len(manifest.tensors)} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
