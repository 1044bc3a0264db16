"""Pytrees of tensors: arithmetic, comparison, and the names of leaves."""

from ftrain.tree.ops import HOST as HOST
from ftrain.tree.ops import MAX_LISTED as MAX_LISTED
from ftrain.tree.ops import add as add
from ftrain.tree.ops import all_finite as all_finite
from ftrain.tree.ops import batch_length as batch_length
from ftrain.tree.ops import cast as cast
from ftrain.tree.ops import clone as clone
from ftrain.tree.ops import describe as describe
from ftrain.tree.ops import device_of as device_of
from ftrain.tree.ops import flatten as flatten
from ftrain.tree.ops import global_norm as global_norm
from ftrain.tree.ops import is_blank as is_blank
from ftrain.tree.ops import is_tensor as is_tensor
from ftrain.tree.ops import leaf_names as leaf_names
from ftrain.tree.ops import leaves as leaves
from ftrain.tree.ops import map as map  # noqa: A004
from ftrain.tree.ops import map_named as map_named
from ftrain.tree.ops import norm_of as norm_of
from ftrain.tree.ops import overlay as overlay
from ftrain.tree.ops import path as path
from ftrain.tree.ops import require_same as require_same
from ftrain.tree.ops import scale as scale
from ftrain.tree.ops import scale_leaves as scale_leaves
from ftrain.tree.ops import scale_leaves_ as scale_leaves_
from ftrain.tree.ops import signature as signature
from ftrain.tree.ops import split as split
from ftrain.tree.ops import take as take
from ftrain.tree.ops import to as to
from ftrain.tree.ops import unflatten as unflatten
from ftrain.tree.ops import where as where

__all__ = [
    "HOST",
    "MAX_LISTED",
    "add",
    "all_finite",
    "batch_length",
    "cast",
    "clone",
    "describe",
    "device_of",
    "flatten",
    "global_norm",
    "is_blank",
    "is_tensor",
    "leaf_names",
    "leaves",
    "map",
    "map_named",
    "norm_of",
    "overlay",
    "path",
    "require_same",
    "scale",
    "scale_leaves",
    "scale_leaves_",
    "signature",
    "split",
    "take",
    "to",
    "unflatten",
    "where",
]
