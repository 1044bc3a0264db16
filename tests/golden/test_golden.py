"""Loss curves that must not change. After an intended change, `python tests/golden/test_golden.py` writes them anew.

Data and initial parameters come from `ftrain.random`, so no curve depends on torch's generators.
"""

import json
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain import random
from ftrain.types import Mean

STEPS = 10
ROWS, INPUTS, HIDDEN, CLASSES = 8, 5, 12, 4
CURVES = Path(__file__).with_name("curves.json")
# Platforms differ in the last bits of exp, tanh and sums, and ten steps add up the differences.
RELATIVE = 1e-12


def uniform(key, *shape):
    """Return float64 multiples of 2**-53 in [-1/2, 1/2), which are exact on every device."""
    return random.uniform(key, shape, dtype=torch.float64) - 0.5


def make_params():
    first, second = random.split(random.key(1))
    return {
        "hidden": {"w": uniform(first, INPUTS, HIDDEN), "b": torch.zeros(HIDDEN, dtype=torch.float64)},
        "head": {"w": uniform(second, HIDDEN, CLASSES), "b": torch.zeros(CLASSES, dtype=torch.float64)},
    }


def make_batches():
    """Return batches of inputs and the labels of a linear teacher, about 30% of them replaced by padding (-100)."""
    batches, teacher = [], uniform(random.key(3), INPUTS, CLASSES)
    for step in range(STEPS):
        first, second = random.split(random.fold_in(random.key(2), step))
        x = 4 * uniform(first, ROWS, INPUTS)
        padding = random.bernoulli(second, 0.3, (ROWS,))
        batches.append({"x": x, "y": torch.where(padding, -100, (x @ teacher).argmax(-1))})
    return batches


def logits(params, x, dropout):
    hidden = dropout(torch.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]))
    return hidden @ params["head"]["w"] + params["head"]["b"]


def loss(params, batch):
    return ft.losses.cross_entropy(logits(params, batch["x"], lambda hidden: hidden), batch["y"])


def dropout_loss(params, batch, rng):
    return ft.losses.cross_entropy(
        logits(params, batch["x"], lambda hidden: random.dropout(rng, hidden, 0.25)), batch["y"], label_smoothing=0.1
    )


def buffer_loss(params, batch, buffers):
    """Return a loss that reads a running mean of its inputs, and the new value of that buffer."""
    mean_loss = loss(params, batch)
    running_mean = 0.9 * buffers["mean"] + 0.1 * batch["x"].mean()
    penalty = mean_loss.weight * running_mean * params["head"]["b"].square().sum()
    return Mean(mean_loss.total + penalty, mean_loss.weight), {}, {"mean": running_mean}


def pipelines():
    """Return name -> (step, arguments of its `init`)."""
    optim, schedules = ft.optim, ft.schedules
    cosine = schedules.warmup_cosine(0.1, warmup=3, total=STEPS)
    initial_buffers = {"buffers": {"mean": torch.zeros((), dtype=torch.float64)}}
    by_layer = {"hidden": optim.sgd(0.5, momentum=0.8), "head": optim.adamw(cosine, weight_decay=0.2)}
    return {
        "sgd": (ft.train_step(loss, optim.sgd(0.5)), {}),
        "nesterov": (ft.train_step(loss, optim.sgd(0.2, momentum=0.9, nesterov=True, weight_decay=0.01)), {}),
        "adamw-schedule-clip": (ft.clip(0.2)(ft.train_step(loss, optim.adamw(cosine, weight_decay=0.1))), {}),
        "accumulate-ema-skip": (
            ft.compose(ft.train_step(loss, optim.adamw(0.05)), ft.accumulate(4), ft.ema(0.9), ft.skip_nonfinite()),
            {},
        ),
        "dropout-accumulate": (ft.accumulate(2)(ft.train_step(dropout_loss, optim.adamw(0.05))), {"seed": 5}),
        "buffers-clip-value": (ft.clip(value=0.01)(ft.train_step(buffer_loss, optim.sgd(0.5))), initial_buffers),
        "partition": (
            ft.train_step(loss, optim.partition(by_layer, lambda name, leaf: name.split(".")[0])),
            {},
        ),
        "frozen": (ft.train_step(loss, optim.sgd(0.5), trainable=["head.*"]), {}),
    }


NAMES = list(pipelines())
MODES = {"eager": (), "donated": (ft.donated(),), "compiled": (ft.compiled(backend="eager"),)}


def curve(name, mode="eager"):
    """Train a pipeline, and return the losses and norms of all steps as hexadecimal floats, which are exact."""
    step, arguments = pipelines()[name]
    step = ft.compose(step, *MODES[mode])
    state = step.init(make_params(), **arguments)
    columns = {"loss": [], "norm": []}
    for batch in make_batches():
        state, metrics = step(state, batch)
        columns["loss"].append(float(metrics["loss"]))
        columns["norm"].append(float(ft.tree.global_norm(state.params)))
        if "grad_norm" in metrics:
            columns.setdefault("grad_norm", []).append(float(metrics["grad_norm"]))
        if "ema" in state.slots:
            columns.setdefault("ema_norm", []).append(float(ft.tree.global_norm(state.slots["ema"])))
    return {column: [value.hex() for value in values] for column, values in columns.items()}


def numbers(column):
    return [float.fromhex(value) for value in column]


def stored():
    return json.loads(CURVES.read_text(encoding="utf-8"))


def test_there_is_one_curve_for_each_pipeline():
    assert sorted(stored()) == sorted(NAMES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_has_its_stored_curve(name, mode):
    actual, expected = curve(name, mode), stored()[name]
    assert sorted(actual) == sorted(expected)
    for column, values in expected.items():
        assert len(values) == STEPS
        assert numbers(actual[column]) == pytest.approx(numbers(values), rel=RELATIVE, abs=0), column


def test_no_two_stored_curves_have_equal_losses():
    """Equal curves would mean that an option of a pipeline had no effect."""
    losses = [tuple(columns["loss"]) for columns in stored().values()]
    assert len(set(losses)) == len(losses)


def test_the_loss_falls_in_every_stored_curve():
    for columns in stored().values():
        losses = numbers(columns["loss"])
        assert sum(losses[-3:]) < sum(losses[:3])


if __name__ == "__main__":
    torch.set_num_threads(1)
    CURVES.write_text(json.dumps({name: curve(name) for name in NAMES}, indent=1) + "\n", encoding="utf-8")
