"""Golden checkpoints: every version of ftrain must load those of all earlier formats, with the same bits.

`python tests/golden/test_checkpoint_format.py` writes those that are missing, once for each version of the format.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.types import Mean, TrainState

GOLDEN = Path(__file__).parent / "checkpoints"


def numbers(dtype, count=4):
    """Return a tensor of the bytes 0, 1, 2, ..., so that the test compares bits and not rounded numbers."""
    return torch.arange(count * dtype.itemsize, dtype=torch.uint8).view(dtype)


def golden_tree():
    """Return the tree that the checkpoints hold, with leaves of many dtypes, all containers and plain values."""
    weight = numbers(torch.float32, 6).view(2, 3)
    return {
        "state": TrainState(
            step=torch.tensor(1200),
            params={"layer.weight": weight, "layer.bias": numbers(torch.bfloat16)},
            frozen={"layer.weight": None, "layer.bias": None, "head.weight": numbers(torch.float16)},
            buffers={"layer.count": torch.tensor(7)},
            opt_state={"count": torch.tensor(3.0), "mu": {"layer.weight": weight.T}},
            slots={"ema": {"layer.weight": weight}},
            rng=torch.tensor([3, -5]),
        ),
        "run": {
            "numbers": [1, -(2**70), 0.1, float("inf"), 1 - 2j, True, None, "tëxt", b"\x00\xff"],
            "tuple": (torch.tensor(True), [], {}),
            "mean": Mean(torch.tensor(6.0), torch.tensor(3.0), plain=True),
            "complex": numbers(torch.complex64, 2),
            "float8": numbers(torch.float8_e5m2),
            "empty": torch.empty(0, 3, dtype=torch.int16),
        },
    }


# Version 2 names the classes of ftrain without their module.
TAGS = {"1": ["ftrain.types.TrainState", "ftrain.types.Mean"], "2": ["TrainState", "Mean"]}


@pytest.mark.parametrize("version", TAGS)
def test_the_checkpoint_of_each_version_is_loaded_with_the_same_bits(version):
    path, expected = GOLDEN / version, golden_tree()
    actual = checkpoint.load(path)
    assert_same(actual, expected)
    assert_same(checkpoint.load(path, like=expected), expected)
    assert checkpoint.verify(path).step == 1200
    manifest = (path / "MANIFEST.json").read_text()
    assert f'"version": {version}' in manifest
    assert all(f'"kind": "{tag}"' in manifest for tag in TAGS[version])


def test_the_newest_version_is_written_as_its_golden_checkpoint(tmp_path):
    """All bytes are equal, except the description of the environment and the digest that depends on it."""
    write(tmp_path / "written")
    expected, actual = contents(GOLDEN / "2"), contents(tmp_path / "written")
    expected_manifest, manifest = (json.loads(files.pop("MANIFEST.json")) for files in (expected, actual))
    assert actual == expected
    assert manifest.keys() == expected_manifest.keys()
    different = {name for name in manifest if manifest[name] != expected_manifest[name]}
    assert different <= {"environment", "digest"}


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def write(path):
    checkpoint.save(path, golden_tree(), step=1200, run="golden", texts={"params/config.json": "{}"})


def assert_same(actual, expected):
    """Assert that two trees have the same types, order of keys, strides and bits."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert actual.contiguous().flatten().view(torch.uint8).equal(expected.contiguous().flatten().view(torch.uint8))
    elif isinstance(expected, dict | list | tuple):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        assert len(actual) == len(expected)
        for key in keys:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, TrainState | Mean):
        for name in expected.__dataclass_fields__:
            assert_same(getattr(actual, name), getattr(expected, name))
    else:
        assert actual == expected


# A run of `fit`: version 1 stored its history in each checkpoint

GOLDEN_RUN = Path(__file__).parent / "fitted" / "1"
LOSSES = [
    1.0,
    1.0294380187988281,
    0.8918353915214539,
    0.9540951251983643,
    1.4243688583374023,
    0.8550089001655579,
    1.0568166971206665,
]


def squares(params, batch):
    return ((batch["x"] @ params["w"] - 1) ** 2).mean()


@pytest.mark.filterwarnings("ignore:fit. continues from:UserWarning")
def test_a_run_of_version_1_resumes_with_its_history(tmp_path):
    """The checkpoint is of step 7: the history of the resumed run has those 7 steps and its own."""
    directory = tmp_path / "run"
    shutil.copytree(GOLDEN_RUN, directory)
    data = [{"x": torch.ones(4, 3) * number} for number in range(1, 6)]
    step = ft.compose(ft.train_step(squares, ft.optim.sgd(0.125)), ft.clip(1.0))

    def resume(steps):
        checkpoints = ft.Checkpoints(directory, every=4, keep=1)
        return ft.fit(
            step, step.init({"w": torch.zeros(3)}, seed=1), data, steps=steps, checkpoints=checkpoints, progress=False
        )

    for steps in (9, 10):
        history = resume(steps).history
        assert history["loss"][:7] == LOSSES
        assert [(record["step"], record["norm"]) for record in history if "norm" in record] == [
            (3, 0.04490649327635765),
            (6, 0.04969368875026703),
            (7, 0.033212579786777496),
        ]
        assert [record["step"] for record in history if "loss" in record] == list(range(1, steps + 1))


if __name__ == "__main__":
    for version in TAGS:
        if not (GOLDEN / version).exists():
            write(GOLDEN / version)
