"""Save and load any tree, on one rank or on many."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ftrain import tree as trees
from ftrain.checkpoint.blocks import has_many_ranks
from ftrain.checkpoint.manifest import environment
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import load_tree
from ftrain.checkpoint.saving import Notes, local_tree, texts_by_name, write
from ftrain.checkpoint.saving_on_ranks import help_write, lead_write
from ftrain.checkpoint.treedef import flatten
from ftrain.errors import OptionError, as_path
from ftrain.tree import device_off_host
from ftrain.types import PyTree


def save(
    path: str | Path, tree: PyTree, *, step: int | None = None, run: str = "", texts: Mapping[str, str] | None = None
) -> None:
    """Save a tree exactly, as a new directory that is on disk when this returns.

    Parameters and buffers of a `TrainState` go to ``params/model.safetensors`` under their dotted names, so that
    any reader of safetensors loads the model. All other tensors go to ``state.safetensors``. ``MANIFEST.json`` holds
    the structure, the numbers and strings among the leaves, and a sha256 of every tensor. Nothing is pickled. The
    files are written to a temporary directory next to `path`, which is renamed when all of them are on disk: a save
    that fails or is killed leaves `path` as it was. Leaves may be dense tensors, bool, int, float, complex, str and
    bytes.

    A tree with DTensors of several ranks must be saved by all of them: each writes its own blocks into the
    files that one rank would write. The first rank writes what is not divided, and no rank ever holds
    a whole leaf. All ranks must see one directory, whose path may differ.

    Args:
        path: path of the new directory, which must not exist.
        tree: any tree, such as a `TrainState`; its tensors may be tied, strided, and on any device.
        step: number of training steps done, for the manifest.
        run: id of the run, for the manifest.
        texts: content of additional files by their names in the directory, such as ``{"params/config.json": ...}``.

    Raises:
        CheckpointError: when `path` exists, a leaf cannot be saved, or writing fails.
        OptionError: if an argument is not as above, or a name in `texts` is outside the directory or in use.
        RankError: when another rank failed in another way, or did not call this.
    """
    path = as_path("save", "path", path)
    if (step is not None and (type(step) is not int or step < 0)) or not isinstance(run, str):
        raise OptionError(f"save: step is {step!r} and run {run!r}; needs a whole number of at least 0, and a str")
    flat = flatten(tree)
    device = device_off_host(leaf.value for leaf in flat.leaves)
    notes = Notes(step, run, {}, environment(device), texts_by_name("save", texts))
    ranks = Ranks("save", alone=not _has_many_ranks(tree))
    with ranks.all_or_none():
        content = local_tree(flat, ranks.rank)
        if ranks.size == 1:
            write(path, content, notes)
        elif ranks.is_first:
            lead_write(path, content, notes, ranks)
        else:
            help_write(path.parent, content, ranks)


def load(
    path: str | Path,
    *,
    like: PyTree = None,
    partial: bool = False,
    rename: Mapping[str, str] | None = None,
) -> PyTree:
    """Read a tree that `save` has written, and verify every byte of it.

    If `like` has DTensors of several ranks, all of them must call it: each reads its own blocks and verifies a
    share of the whole tensors, and an error on one rank is an error on all.

    Args:
        path: the directory of the checkpoint.
        like: a tree with the expected structure, shapes and dtypes. The result has its types, and its tensors are on
            the devices of those of `like`. Default: the types that were saved, on the CPU.
        partial: load the leaves whose paths are in the checkpoint, and keep the other leaves of `like`.
        rename: old -> new prefixes of paths, such as ``{"params.encoder": "params.backbone"}``.

    Raises:
        CheckpointError: when it is missing or damaged; the message names the file and the tensor.
        DeviceError: when memory runs out.
        StructureError: when it differs from `like`; the message lists the paths, at most 20.
        OptionError: if `path` is no path, or no path in the tree begins with a name in `rename`.
        RankError: when another rank failed in another way, or did not call this.
    """
    path = as_path("load", "path", path)
    ranks, results = Ranks("load", alone=not _has_many_ranks(like)), list[PyTree]()
    ranks.together(lambda: results.append(load_tree(path, like=like, partial=partial, rename=rename or {})))
    return results[0]


def _has_many_ranks(tree: PyTree) -> bool:
    return any(has_many_ranks(leaf) for leaf in trees.leaves(tree))
