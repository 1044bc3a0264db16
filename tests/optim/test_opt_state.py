"""The state of optimizers: its leaves and dtypes, and the counts of updates."""

import math
import subprocess
import sys
import warnings

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.optim import adamw, sgd

F64 = torch.float64


def test_state_of_sgd():
    params = {"w": torch.ones(2, 3, dtype=F64), "b": torch.ones(3)}
    assert sgd(0.1).init(params) == {}
    state = sgd(0.1, momentum=0.9).init(params)
    assert tree.signature(state) == {"momentum.b": "float32[3]", "momentum.w": "float64[2, 3]"}
    assert all(not leaf.any() for leaf in tree.leaves(state))


def test_state_of_adamw():
    params = {"w": torch.ones(2, 3, dtype=F64), "b": torch.ones(3).bfloat16()}
    state = adamw(0.1).init(params)
    assert tree.signature(state) == {
        "count": "float32[]",
        "mu.b": "bfloat16[3]",
        "mu.w": "float64[2, 3]",
        "nu.b": "bfloat16[3]",
        "nu.w": "float64[2, 3]",
    }
    assert all(not leaf.any() for leaf in tree.leaves(state))


def test_an_eps_that_is_0_in_the_dtype_of_the_parameters_is_warned_of():
    params = {"w": torch.ones(2).half(), "b": torch.ones(2)}
    for name in ("adam", "adamw", "rmsprop", "adagrad", "nadam", "radam"):
        with pytest.warns(UserWarning, match=rf"{name}: .* in float16, in which eps=1e-[0-9]+ is 0, and so is"):
            getattr(ft.optim, name)(0.1).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw(0.1, eps=1e-4).init(params)
        adamw(0.1, state_dtype="fp32").init(params)
        adamw(0.1).init({"w": torch.ones(2).bfloat16()})


def test_adamw_counts_updates_and_not_steps():
    """A skipped step must change neither the count nor the bias correction that depends on it."""
    step = ft.skip_nonfinite()(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), adamw(0.1)))
    state = step.init({"w": torch.ones(2)})
    for scale in (1.0, math.nan, 1.0):
        state, _ = step(state, torch.tensor([scale, 1.0]))
    assert (int(state.step), float(state.opt_state["count"])) == (3, 2.0)


UNDER_OTHER_DEFAULTS = """
import torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
import ftrain as ft
for make in (ft.optim.adamw, ft.optim.nadam, ft.optim.radam, ft.optim.schedule_free_adamw):
    state = make(0.1).init({"w": torch.ones(2, device="cpu")})
    print(*(f"{leaf.dtype} {leaf.device}" for leaf in state.values() if isinstance(leaf, torch.Tensor)), sep="\\n")
optimizer = ft.optim.adjustable(ft.optim.adamw_8bit(0.1, block=2, min_size=1))
step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optimizer)
state = ft.optim.adjust(step.init({"w": torch.ones(2, device="cpu")}), {"lr": 0.5})
state, metrics = step(state, torch.ones(2, device="cpu"))
evaluated = ft.eval_step(lambda params, batch: ((params["w"] * batch).sum(), {"number": 0.1}))
assert ft.evaluate(evaluated, state, [torch.ones(2, device="cpu")])["number"] == 0.1
print(*(f"{leaf.dtype} {leaf.device}" for leaf in ft.tree.leaves(state) if leaf.ndim == 0), sep="\\n")
"""


def test_counts_do_not_depend_on_the_default_dtype_and_device():
    """A count in bfloat16 would silently stop at 256; for one on a GPU, every step would wait."""
    completed = subprocess.run([sys.executable, "-c", UNDER_OTHER_DEFAULTS], capture_output=True, text=True, check=True)
    lines = completed.stdout.splitlines()
    # Of adamw, nadam, radam and schedule_free_adamw; then the step, the factor and the count of the last state.
    assert len(lines) == 1 + 2 + 1 + 4 + 3
    assert set(lines) == {"torch.float32 cpu", "torch.float64 cpu", "torch.int64 cpu"}
