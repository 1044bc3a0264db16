"""Manifests that are malformed in one place are refused, although their digest is right."""

import pytest

from ftrain.checkpoint import load, save
from ftrain.errors import CheckpointError
from tests.faults.malformed import MALFORMED_CONTAINERS, MANIFEST, PARTS, ChangedCheckpoint, manifest_of

MALFORMED_TREES = {
    **MALFORMED_CONTAINERS,
    "a tensor that is not there": {"tensor": 10**30},
    "a tensor by a bool": {"tensor": True},
    "a tensor and something": {"tensor": 0, "float": "nan"},
    "a number that is none": {"float": "much"},
    "a number too large": {"float": "0x1p99999"},
    "a complex number of one": {"complex": ["0x1p0"]},
    "an object of nothing": {},
    "a list that is no container": [1],
}


@pytest.mark.parametrize("tree", MALFORMED_TREES.values(), ids=MALFORMED_TREES)
def test_nonsense_in_a_manifest_is_refused(tree, tmp_path):
    save(tmp_path / "a", PARTS)
    checkpoint = ChangedCheckpoint(tmp_path / "a")
    checkpoint.body["tree"]["nodes"][1] = tree
    checkpoint.write(MANIFEST, manifest_of(checkpoint.body))
    with pytest.raises(CheckpointError, match=r"(?i)manifest"):
        load(tmp_path / "a")


STRIDES = [
    [0, 0],
    [6, 0],
    [0, 1],
    [1, 1],
    [7, 1],
    [2**40, 1],
    [1, 2**61],
    [6, -1],
    [12, 2],
    [6],
    [6, 1, 1],
    [6.0, 1],
    "61",
    {},
]


@pytest.mark.parametrize("stride", STRIDES, ids=map(str, range(len(STRIDES))))
def test_strides_that_do_not_fill_a_memory_once_are_refused(stride, tmp_path):
    """The bytes and the digest of the tensor are right, but it would overlap itself or need more memory."""
    save(tmp_path / "a", PARTS)
    checkpoint = ChangedCheckpoint(tmp_path / "a")
    item = next(item for item in checkpoint.body["tensors"] if item["shape"] == [4, 6])
    item["stride"] = stride
    checkpoint.write(MANIFEST, manifest_of(checkpoint.body))
    with pytest.raises(CheckpointError, match="MANIFEST"):
        load(tmp_path / "a")
