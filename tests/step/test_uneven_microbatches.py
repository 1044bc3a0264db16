"""`accumulate(n)` where n does not divide the batch: the gradient and the metrics are those of the whole batch."""

import pytest
import torch

import ftrain as ft
from ftrain.training.oom_retry import split_step


def mean_over_examples(params, batch):
    """Return a mean over examples, and metrics that are means over examples too."""
    errors = (torch.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]).square().mean(-1)
    return errors.mean(), {"rmse": errors.sqrt().mean(), "share_above_1": (errors > 1).double().mean()}


def mean_over_elements(params, batch):
    """Return a mean over some elements, a metric that is a mean over all elements, and one over examples."""
    errors = (torch.tanh(batch["x"] @ params["w1"]) @ params["w2"] - batch["y"]).square()
    counts = batch["counts"]
    loss = ft.Mean((errors * counts).sum(), counts.sum())
    mae = ft.Mean(errors.sqrt().sum(), counts.new_tensor(errors.numel()))
    return loss, {"mae": mae, "mse": errors.mean()}


def floats(*shape, generator):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def make_batch(length):
    generator = torch.Generator().manual_seed(length)
    counts = torch.randint(0, 2, (length, 2), generator=generator).double()
    return {"x": floats(length, 3, generator=generator), "y": floats(length, 2, generator=generator), "counts": counts}


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {"w1": floats(3, 5, generator=generator), "w2": floats(5, 2, generator=generator)}


def make_step(loss, *wrappers):
    return ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), *wrappers)


def train(step, lengths):
    """Return the state after a step on a batch of each length, and the metrics of each step."""
    state, history = step.init(make_params()), []
    for length in lengths:
        state, metrics = step(state, make_batch(length))
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
    ("stack", "lowering"), [*((stack, None) for stack in STACKS), ("clip, ema", "whole"), ("clip, ema", "split")]
)
@pytest.mark.parametrize("loss", [mean_over_examples, mean_over_elements])
def test_microbatches_of_unequal_length_are_the_whole_batch(loss, stack, lowering):
    compiled = [] if lowering is None else [ft.compiled(backend="aot_eager", lowering=lowering)]
    lengths = (8, 7, 2, 1, 8) if lowering is None else (7, 2)
    expected, expected_history = train(make_step(loss, *STACKS[stack]), lengths)
    state, history = train(make_step(loss, ft.accumulate(4), *STACKS[stack], *compiled), lengths)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-11, atol=1e-12)
    for metrics, expected_metrics in zip(history, expected_history, strict=True):
        assert metrics == pytest.approx(expected_metrics, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("pieces", [2, 3])
@pytest.mark.parametrize("loss", [mean_over_examples, mean_over_elements])
def test_unequal_microbatches_that_are_split_for_memory_are_the_whole_batch(loss, pieces):
    """Microbatches of 5 and 4 examples: neither 2 nor 3 divides both."""
    expected, (expected_metrics,) = train(make_step(loss), [9])
    state, (metrics,) = train(split_step(make_step(loss, ft.accumulate(2)), pieces), [9])
    torch.testing.assert_close(state.params, expected.params, rtol=1e-11, atol=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-11, abs=1e-12)


def test_clip_inside_of_accumulate_clips_each_microbatch_and_weights_it_by_its_examples():
    clipped = ft.compose(ft.train_step(mean_over_examples, ft.optim.sgd(1.0)), ft.clip(0.1))
    state, _ = train(ft.accumulate(2)(clipped), [5])
    batch, params = make_batch(5), make_params()
    expected = make_params()
    for start, stop in ((0, 3), (3, 5)):
        microbatch = {name: leaf[start:stop] for name, leaf in batch.items()}
        new, _ = clipped(clipped.init(params), microbatch)
        for name, leaf in params.items():
            expected[name] += (new.params[name] - leaf) * (stop - start) / 5
    torch.testing.assert_close(state.params, expected, rtol=1e-11, atol=1e-12)


def test_accumulate_changes_no_loss_of_epochs_whose_last_batch_is_short():
    def losses(*wrappers):
        examples = [{name: leaf[index] for name, leaf in make_batch(22).items()} for index in range(22)]
        loader = ft.data.loader(examples, 8, seed=0, drop_last=False)
        step = make_step(mean_over_examples, *wrappers)
        return ft.fit(step, step.init(make_params()), loader, epochs=2, log_every=1).history["loss"]

    expected = losses()
    assert len(expected) == 6
    assert losses(ft.accumulate(4)) == pytest.approx(expected, rel=1e-10)
