"""`accumulate(n)` where n does not divide the batch: the gradient and the metrics are those of the whole batch."""

import itertools

import pytest
import torch

import ftrain as ft
from ftrain.training.oom_retry import split_step


def plain(params, batch):
    """Return a mean over examples, and metrics that are means over examples too."""
    errors = (torch.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]).square().mean(-1)
    return errors.mean(), {"mae": errors.sqrt().mean(), "worse": (errors > 1).double().mean()}


def counted(params, batch):
    """Return a mean over some elements, a metric that is a mean over elements, and one over examples."""
    errors = (torch.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]).square()
    counts = batch["counts"]
    mean = ft.Mean((errors * counts).sum(), counts.sum())
    return mean, {"elements": ft.Mean(errors.sqrt().sum(), counts.new_tensor(errors.numel())), "mae": errors.mean()}


def data(length):
    generator = torch.Generator().manual_seed(length)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)  # noqa: E731
    counts = torch.randint(0, 2, (length, 2), generator=generator).double()
    return {"x": draw(length, 3), "y": draw(length, 2), "counts": counts}


def params():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)  # noqa: E731
    return {"w1": draw(3, 5), "w2": draw(5, 2)}


def make(loss, *wrappers):
    return ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), *wrappers)


def run(step, lengths):
    """Return the state after a step on a batch of each length, and the metrics of each step."""
    state, history = step.init(params()), []
    for length in lengths:
        state, metrics = step(state, data(length))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


STACKS = {
    "alone": [],
    "clip": [ft.clip(0.1)],
    "clip, ema": [ft.clip(0.1), ft.ema(0.9)],
    "sam": [ft.sam(0.1)],
    "skip_nonfinite": [ft.skip_nonfinite()],
}


@pytest.mark.parametrize(
    ("stack", "compiled"), [*((stack, None) for stack in STACKS), *itertools.product(["clip, ema"], ["whole", "split"])]
)
@pytest.mark.parametrize("loss", [plain, counted])
def test_microbatches_of_unequal_length_are_the_whole_batch(loss, stack, compiled):
    outer = [] if compiled is None else [ft.compiled(backend="aot_eager", lowering=compiled)]
    lengths = (8, 7, 2, 1, 8) if compiled is None else (7, 2)
    expected, expected_metrics = run(make(loss, *STACKS[stack]), lengths)
    actual, metrics = run(make(loss, ft.accumulate(4), *STACKS[stack], *outer), lengths)
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-11, atol=1e-12)
    for of_step, expected_of_step in zip(metrics, expected_metrics, strict=True):
        assert of_step == pytest.approx(expected_of_step, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("loss", [plain, counted])
def test_a_split_for_memory_within_unequal_microbatches_is_the_same_update(loss, pieces):
    """Microbatches of 5 and 4: one is split in equal pieces, the other is not."""
    expected, (expected_metrics,) = run(make(loss), [9])
    actual, (metrics,) = run(split_step(make(loss, ft.accumulate(2)), pieces), [9])
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-11, atol=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-11, abs=1e-12)


def test_clip_within_clips_each_microbatch_and_weighs_it_by_its_examples():
    state, _ = run(ft.compose(ft.train_step(plain, ft.optim.sgd(1.0)), ft.clip(0.1), ft.accumulate(2)), [5])
    batch, sums = data(5), {name: torch.zeros_like(leaf) for name, leaf in params().items()}
    for first, last in itertools.pairwise((0, 3, 5)):
        step = ft.compose(ft.train_step(plain, ft.optim.sgd(1.0)), ft.clip(0.1))
        after, _ = step(step.init(params()), {name: leaf[first:last] for name, leaf in batch.items()})
        for name, leaf in params().items():
            sums[name] += (after.params[name] - leaf) * (last - first) / 5
    expected = {name: leaf + sums[name] for name, leaf in params().items()}
    torch.testing.assert_close(state.params, expected, rtol=1e-11, atol=1e-12)


def test_losses_of_epochs_whose_last_batch_is_short():
    examples = [{name: leaf[index] for name, leaf in data(22).items()} for index in range(22)]
    losses = []
    for wrappers in ([], [ft.accumulate(4)]):
        loader = ft.data.loader(examples, 8, seed=0, drop_last=False)
        step = make(plain, *wrappers)
        losses.append(ft.fit(step, step.init(params()), loader, epochs=2, log_every=1).history["loss"])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
