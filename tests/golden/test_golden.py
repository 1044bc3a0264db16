"""Loss curves that must not move. `python tests/golden/test_golden.py` rewrites them, for a change that is meant.

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
# Platforms differ in the last bits of exp, tanh and sums, and ten steps carry that on.
RELATIVE = 1e-12


def uniform(key, *shape):
    """Multiples of 2**-53 in [-1/2, 1/2): exact on every device."""
    return random.uniform(key, shape, dtype=torch.float64) - 0.5


def make_params():
    first, second = random.split(random.key(1))
    return {
        "hidden": {"w": uniform(first, INPUTS, HIDDEN), "b": torch.zeros(HIDDEN, dtype=torch.float64)},
        "head": {"w": uniform(second, HIDDEN, CLASSES), "b": torch.zeros(CLASSES, dtype=torch.float64)},
    }


def make_batches():
    """Labels that a linear teacher gives, some of them padding, unevenly over the rows."""
    batches, teacher = [], uniform(random.key(3), INPUTS, CLASSES)
    for step in range(STEPS):
        first, second = random.split(random.fold_in(random.key(2), step))
        x = 4 * uniform(first, ROWS, INPUTS)
        padding = random.bernoulli(second, 0.3, (ROWS,))
        batches.append({"x": x, "y": torch.where(padding, -100, (x @ teacher).argmax(-1))})
    return batches


def logits(params, x, drop):
    hidden = drop(torch.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"]))
    return hidden @ params["head"]["w"] + params["head"]["b"]


def loss(params, batch):
    return ft.losses.cross_entropy(logits(params, batch["x"], lambda hidden: hidden), batch["y"])


def dropped(params, batch, rng):
    return ft.losses.cross_entropy(
        logits(params, batch["x"], lambda hidden: random.dropout(rng, hidden, 0.25)), batch["y"], label_smoothing=0.1
    )


def tracked(params, batch, buffers):
    """A running mean as a buffer, which the loss also reads."""
    total = loss(params, batch)
    seen = 0.9 * buffers["mean"] + 0.1 * batch["x"].mean()
    return (
        Mean(total.total + total.weight * seen * params["head"]["b"].square().sum(), total.weight),
        {},
        {"mean": seen},
    )


def pipelines():
    """Name -> (step, arguments of its `init`)."""
    optim, schedules = ft.optim, ft.schedules
    cosine = schedules.warmup_cosine(0.1, warmup=3, total=STEPS)
    mean = {"buffers": {"mean": torch.zeros((), dtype=torch.float64)}}
    split = {"hidden": optim.sgd(0.5, momentum=0.8), "head": optim.adamw(cosine, weight_decay=0.2)}
    return {
        "sgd": (ft.train_step(loss, optim.sgd(0.5)), {}),
        "nesterov": (ft.train_step(loss, optim.sgd(0.2, momentum=0.9, nesterov=True, weight_decay=0.01)), {}),
        "adamw-schedule-clip": (ft.clip(0.2)(ft.train_step(loss, optim.adamw(cosine, weight_decay=0.1))), {}),
        "accumulate-ema-skip": (
            ft.compose(ft.train_step(loss, optim.adamw(0.05)), ft.accumulate(4), ft.ema(0.9), ft.skip_nonfinite()),
            {},
        ),
        "dropout-accumulate": (ft.accumulate(2)(ft.train_step(dropped, optim.adamw(0.05))), {"seed": 5}),
        "buffers-clip-value": (ft.clip(value=0.01)(ft.train_step(tracked, optim.sgd(0.5))), mean),
        "partition": (
            ft.train_step(loss, optim.partition(split, lambda name, leaf: name.split(".")[0])),
            {},
        ),
        "frozen": (ft.train_step(loss, optim.sgd(0.5), trainable=["head.*"]), {}),
    }


NAMES = list(pipelines())
WAYS = {"eager": (), "donated": (ft.donated(),), "compiled": (ft.compiled(backend="eager"),)}


def curve(name, way="eager"):
    """The losses, and what else shows where a run has come to, as exact numbers."""
    step, arguments = pipelines()[name]
    step = ft.compose(step, *WAYS[way])
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


def test_every_pipeline_has_a_curve():
    assert sorted(stored()) == sorted(NAMES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_curve(name, way):
    actual, wanted = curve(name, way), stored()[name]
    assert sorted(actual) == sorted(wanted)
    for column, values in wanted.items():
        assert len(values) == STEPS
        assert numbers(actual[column]) == pytest.approx(numbers(values), rel=RELATIVE, abs=0), column


def test_curves_differ():
    """A pipeline whose curve is another one's shows nothing."""
    losses = [tuple(columns["loss"]) for columns in stored().values()]
    assert len(set(losses)) == len(losses)


def test_training_trains():
    for columns in stored().values():
        losses = numbers(columns["loss"])
        assert sum(losses[-3:]) < sum(losses[:3])


if __name__ == "__main__":
    torch.set_num_threads(1)
    CURVES.write_text(json.dumps({name: curve(name) for name in NAMES}, indent=1) + "\n", encoding="utf-8")
