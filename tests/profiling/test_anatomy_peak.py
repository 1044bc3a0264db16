"""Anatomy: the predicted peak of an eager step equals the one that is measured."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.profiling.live_memory import live_peak
from tests.profiling.models import MODELS, WRAPPERS, build
from tests.profiling.problem import assert_unchanged

CHOSEN = {
    "gpt": {"plain", "fp16", "attention", "budget", "update in backward", "clip within", "watched", "all", "others"},
    "bert": {"remat"},
    "convnet": {"plain", "bf16", "remat"},
}
"""The cases of `make test`: with one model every wrapper, some only within a stack; with the other models a few."""


@pytest.mark.parametrize(
    ("model", "wrapper"),
    [
        pytest.param(model, wrapper, marks=[] if wrapper in CHOSEN[model] else pytest.mark.exhaustive)
        for model, wrapper in itertools.product(MODELS, WRAPPERS)
    ],
)
def test_the_predicted_peak_equals_the_measured_one(model, wrapper):
    step, batch = build(model, wrapper)
    state = step.init()
    before = tree.clone((state, batch))
    anatomy = ft.anatomy(step, state, batch)
    assert_unchanged(state, batch, before)
    assert anatomy.peak == sum(anatomy.at_peak.values())
    assert anatomy.measured_ratio == anatomy.measured / anatomy.peak
    if model == "convnet":
        # The memory that kernels of convolutions allocate for themselves differs from one CPU to another.
        assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005)
        assert anatomy.measured > 0.995 * anatomy.peak
    else:
        assert anatomy.measured_ratio == pytest.approx(1, abs=0.05), anatomy


class Residual(nn.Module):
    """The block of a residual network (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, in_channels, out_channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out_channels), nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x):
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


CONVOLUTIONS = {
    "to a few channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 3, 3, 1, 1)),
        (8, 3, 48, 48),
    ),
    "upscaled": (
        lambda: nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 3, 1, 1)),
        (8, 8, 32, 32),
    ),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(16, 64, 5, 1, 2), nn.GELU(), nn.Conv1d(64, 16, 5)), (32, 16, 256)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(4, 16, 3), nn.ReLU(), nn.Conv3d(16, 4, 3)), (4, 4, 16, 16, 16)),
}
"""Name -> function that returns a model, and the shape of its input."""


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        *((name, "plain") for name in CONVOLUTIONS),
        ("upscaled", "fp16"),
        *exhaustive_rows((name, "fp16") for name in CONVOLUTIONS if name != "upscaled"),
    ],
)
def test_the_memory_of_other_convolutions_is_predicted(name, wrapper):
    make_model, shape = CONVOLUTIONS[name]
    loss = ft.from_module(make_model(), lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *WRAPPERS[wrapper])
    state, batch = step.init(), {"x": torch.randn(shape)}
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005), anatomy
    assert anatomy.measured > 0.995 * anatomy.peak
    assert anatomy.overhead == anatomy.measured - anatomy.peak


@pytest.mark.parametrize("wrapper", ["plain", "remat", *exhaustive(["fp16", "bf16", "accumulate"])])
def test_the_memory_of_residual_convolutions_is_predicted(wrapper):
    body = nn.Sequential(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    loss = ft.from_module(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *WRAPPERS[wrapper])
    state, batch = step.init(), {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(10, (8,))}
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005), anatomy
    assert anatomy.measured > 0.995 * anatomy.peak


def test_a_constant_that_the_loss_holds_is_not_counted():
    """The measurement exceeds the prediction only by the state of torch's generator, which a step saves."""
    table = torch.randn(1000, 64)
    step = ft.train_step(lambda params, batch: (table.T @ params["w"]).cos().sum() * batch, optim.sgd(0.1))
    anatomy = ft.anatomy(step, step.init({"w": torch.randn(1000)}), torch.ones(()))
    assert anatomy.measured - anatomy.peak == torch.default_generator.get_state().nbytes < table.nbytes / 10


def test_the_files_of_a_new_state_take_no_memory(tmp_path):
    """Without donation there are two states, and so two sets of files."""
    size = 100_000
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.adamw(1e-3))
    step = ft.compose(step, ft.offload("opt_state", directory=tmp_path))
    anatomy = ft.anatomy(step, step.init({"w": torch.ones(size)}), torch.ones(size))
    assert anatomy.measured_ratio == pytest.approx(1, abs=0.05)
