"""A checkpoint of a run, loaded into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.checkpoint.manifest import Manifest
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import load_parts
from ftrain.errors import CheckpointError
from ftrain.types import PyTree


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded: its trees by name, and its manifest."""

    step: int
    path: Path
    parts: dict[str, PyTree]
    manifest: Manifest

    def __repr__(self) -> str:
        # Not the manifest, which lists every tensor.
        return f"LoadedCheckpoint(step={self.step}, path={str(self.path)!r}, parts={[*self.parts]})"

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions, threads, device and flags when it was saved."""
        return self.manifest.environment

    @property
    def run(self) -> dict[str, PyTree]:
        """What `ftrain.fit` saved in addition to the state.

        Raises:
            CheckpointError: when `fit` did not save this checkpoint.
        """
        run = self.parts.get("run")
        if not isinstance(run, dict) or run.keys() != {"record", "position", "began"}:
            raise CheckpointError(
                f"{self.path}: was not saved by ftrain.fit, which cannot resume from it; use another directory"
            )
        return run


def load_checkpoint(
    path: Path,
    step: int,
    like: Mapping[str, PyTree],
    ranks: Ranks,
    *,
    on_host: bool,
    accept: Callable[[LoadedCheckpoint], None] | None,
) -> LoadedCheckpoint:
    """Load the checkpoint of a step on all ranks; the arguments are those of `Checkpoints.latest`.

    Raises a CheckpointError on every rank when it is damaged, of another step, or rejected by `accept`.
    """
    results = list[LoadedCheckpoint]()

    def load() -> None:
        manifest, parts = load_parts(path, like, on_host=on_host, share=(ranks.rank, ranks.size))
        if manifest.step != step:
            raise CheckpointError(f"{path}: is of step {manifest.step}, and was renamed")
        results.append(LoadedCheckpoint(step, path, parts, manifest))
        if accept is not None and ranks.is_first:
            accept(results[0])

    ranks.together(load)
    return results[0]
