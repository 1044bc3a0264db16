"""Evaluation on ranks: each rank computes on its examples, and all get the result of one rank."""

import importlib
import math
import warnings
import weakref

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import BatchError, DataError, RankError
from ftrain.parallel.block_gather import NotGathered
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run

evaluate = importlib.import_module("ftrain.step.evaluate")


def sharded_step(level, **options):
    return models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(), level), **options)


def uneven_batches():
    """Yield batches of 12 and of 5 examples, and of one."""
    yield from models.batches(2)
    yield from models.batches(1, length=5, seed=4)
    yield from models.batches(1, length=1, seed=5)


def evaluated(size, level):
    def rank(_):
        step = sharded_step(level)
        state, _ = step(step.init(seed=5), next(models.batches()))
        own, other = ft.eval_step(step.loss), ft.eval_step(models.step_of(criterion=models.plain_loss).loss)
        first = {name: float(mean) for name, mean in own(state, next(models.batches())).items()}
        averaged = ft.evaluate(own, ft.averaged(state), uneven_batches())
        compiled = ft.evaluate(ft.compiled(backend="eager")(own), state, uneven_batches())
        return first, averaged, ft.evaluate(other, state, uneven_batches()), compiled

    return run(size, rank)


@pytest.mark.parametrize(("size", "level"), [(2, 0), (3, 1), (2, 3), *exhaustive_rows([(2, 2), (4, 3), (16, 3)])])
def test_an_evaluation_on_ranks_equals_one_rank(size, level):
    (reference,) = evaluated(1, 0)
    for results in evaluated(size, level):
        for actual, expected in zip(results, reference, strict=True):
            assert actual == pytest.approx(expected, rel=1e-12)


class WatchedBlock(nn.Module):
    """A block that calls a function with its weight."""

    def __init__(self, note):
        super().__init__()
        self.linear, self._note = nn.Linear(4, 4), note

    def forward(self, x):
        self._note(self.linear.weight)
        return self.linear(x).tanh()


def test_level_3_has_the_parameters_of_a_block_only_while_it_runs():
    def rank(_):
        weights, counts = [], []

        def note(weight):
            weights.append(weakref.ref(weight))
            note_count()

        def note_count():
            counts.append(sum(weight() is not None for weight in weights))

        def criterion(model, x):
            assert isinstance(model[1].linear.weight, NotGathered)
            outputs = model(x)
            note_count()
            return outputs.square().mean()

        loss = ft.from_module(nn.Sequential(*(WatchedBlock(note) for _ in range(3))), criterion)
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), 3))
        eval_step, state = ft.eval_step(step.loss), step.init()
        eval_step(state, torch.ones(6, 4))
        ft.evaluate(eval_step, state, [torch.ones(6, 4)] * 2)
        return counts

    # In each of three blocks its own weight, and none behind them; in three evaluations.
    assert run(2, rank) == [[1, 1, 1, 0] * 3] * 2


def test_level_3_asks_for_the_next_batch_before_it_evaluates_one(monkeypatch):
    """So that the device has work while the host waits for the answer of the other ranks."""
    events, start_count = [], evaluate.start_count

    def recording(ranks, *args):
        if ranks.rank != 0:
            return start_count(ranks, *args)
        events.append("asks")
        read = start_count(ranks, *args)

        def recording_read():
            events.append("reads")
            return read()

        return recording_read

    def rank(number):
        def criterion(model, batch):
            if number == 0:
                events.append("evaluates")
            return models.loss(model, batch)

        step = sharded_step(3, criterion=criterion)
        ft.evaluate(ft.eval_step(step.loss), step.init(), models.batches(2))

    monkeypatch.setattr(evaluate, "start_count", recording)
    run(2, rank)
    assert events == ["asks", "reads", *["asks", "evaluates", "reads"] * 2]


def test_different_numbers_of_batches_are_an_error_at_level_3():
    def rank(number):
        step = sharded_step(3)
        with pytest.raises(BatchError, match="evaluate: 1 of 2 ranks have one more batch: the ranks have different"):
            ft.evaluate(ft.eval_step(step.loss), step.init(), models.batches(2 + number))

    run(2, rank)


@pytest.mark.parametrize(("level", "on_oom"), [(0, "raise"), (1, "raise"), (3, "split")])
@pytest.mark.parametrize(("counts", "lengths"), [((2, 3), (12, 12)), ((2, 2), (12, 10))], ids=["number", "shape"])
def test_later_batches_that_differ_are_an_error_on_every_rank(level, on_oom, counts, lengths):
    """Ranks do not wait for each other here, so each evaluates all of its batches."""

    def rank(number):
        data = [*models.batches(1), *models.batches(counts[number] - 1, lengths[number])]
        step = sharded_step(level)
        with pytest.raises(BatchError, match="evaluate: the ranks have different batches"):
            ft.evaluate(ft.eval_step(step.loss), step.init(), data, on_oom=on_oom)

    run(2, rank)


def test_an_evaluation_in_a_narrow_dtype_on_ranks_equals_one_rank():
    def of_floats(model, batch):
        assert model.head.weight.dtype == torch.bfloat16
        return models.loss(model, {name: value.float() for name, value in batch.items()})

    def rank(_):
        step = sharded_step(3, criterion=of_floats)
        return ft.evaluate(ft.eval_step(step.loss), step.init(seed=5), models.batches(2), dtype="bf16")

    (reference,) = run(1, rank)
    for actual in run(2, rank):
        assert actual == pytest.approx(reference, rel=1e-2)


def test_each_rank_computes_on_its_examples():
    lengths = []

    def counting(model, batch):
        lengths.append(len(batch["x"]))
        return models.loss(model, batch)

    def rank(_):
        step = sharded_step(1, criterion=counting)
        ft.evaluate(ft.eval_step(step.loss), step.init(), models.batches(1))

    run(4, rank)
    assert lengths == [3] * 4


def test_only_the_examples_of_a_rank_are_copied_to_its_device(monkeypatch):
    copied_lengths, to = [], ft.tree.to

    def recording(value, device):
        if isinstance(value, dict):
            copied_lengths.append(len(value["x"]))
        return to(value, device)

    monkeypatch.setattr(ft.tree, "to", recording)

    def rank(_):
        step = sharded_step(1)
        ft.evaluate(ft.eval_step(step.loss), step.init(), models.batches(1))

    run(4, rank)
    assert copied_lengths == [3] * 4


def test_a_batch_that_cannot_be_cut_counts_once():
    def loss(params, batch):
        return ft.Mean(params["w"] * batch["x"].mean() * batch["y"].sum(), batch["y"].sum())

    def rank(_):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), 1))
        # Means of 1 with the weight 3, and of 3 with the weight 3.
        data = [{"x": torch.ones(3), "y": torch.ones(3)}, {"x": torch.full((4,), 3.0), "y": torch.tensor([1.0, 2.0])}]
        return ft.evaluate(ft.eval_step(step.loss), step.init({"w": torch.ones(())}), data)["loss"]

    assert run(3, rank) == [2.0] * 3


@pytest.mark.parametrize("criterion", [models.loss, models.plain_loss], ids=["Mean", "plain"])
def test_ranks_that_read_their_rows_alone_evaluate_all_of_them(criterion):
    """Ranks may read parts of a batch, different numbers of batches, or all the same batches."""

    def results(size, parts):
        def rank(number):
            step = models.step_of(ft.sharded(ft.parallel.mesh(), 3, batches="rows"), criterion=criterion)
            state, eval_step = step.init(seed=5), ft.eval_step(step.loss)
            first = {name: float(mean) for name, mean in eval_step(state, parts(number)[0]).items()}
            return first, ft.evaluate(eval_step, state, parts(number))

        return run(size, rank)

    batches = list(uneven_batches())
    thirds = [batches[0:1], batches[1:3], batches[3:4]]
    (reference,) = results(1, lambda number: batches)
    for actual in (*results(3, lambda number: thirds[number]), *results(2, lambda number: batches)):
        assert actual[1] == pytest.approx(reference[1], rel=1e-12)

    def third_of_first(number):
        return [ft.tree.map(lambda leaf: leaf.chunk(3)[number], batches[0])]

    for actual in results(3, third_of_first):
        assert actual[0] == pytest.approx(reference[0], rel=1e-12)


@pytest.mark.parametrize("level", [1, 3])
def test_a_rank_without_a_batch_is_an_error_on_every_rank(level):
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), level, batches="rows"))
        own_error, errors_of_others = (DataError, "at least one on every rank"), (RankError, "rank 1")
        error_class, text = own_error if number else errors_of_others
        with pytest.raises(error_class, match=text):
            ft.evaluate(ft.eval_step(step.loss), step.init(), list(models.batches(1 - number)))

    run(2, rank)


def test_ranks_may_see_metrics_in_another_order_and_some_alone():
    """As when the loss on each domain of the data is a metric of its own."""
    domains = ["cats", "dogs", "cats", "dogs", "owls"]
    data = [{"x": torch.tensor([1.0 + k, 2.0]), "domain": domain} for k, domain in enumerate(domains)]

    def loss(params, batch):
        value = (params["w"] * batch["x"]).mean()
        return value, {batch["domain"]: value}

    def results(size, parts):
        def rank(number):
            sharded = ft.sharded(ft.parallel.mesh(), 0, batches="rows")
            step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), sharded)
            return ft.evaluate(ft.eval_step(step.loss), step.init({"w": torch.ones(2)}), parts[number])

        return run(size, rank)

    (reference,) = results(1, [data])
    for actual in results(2, [data[:2], data[:1:-1]]):
        assert actual == pytest.approx(reference)


@pytest.mark.parametrize("levels", [(0, 3), *exhaustive([(1, 2)])], ids=str)
def test_evaluations_within_fit_at_every_level_equal_those_of_one_rank(levels):
    def history(size, level):
        def rank(_):
            step = sharded_step(level)
            eval_step = ft.eval_step(step.loss)
            evaluate = lambda state: ft.evaluate(eval_step, ft.averaged(state), uneven_batches())  # noqa: E731
            options = {"evaluate_every": 2, "stop": ft.patience("eval_loss", 2), "progress": False}
            return ft.fit(step, step.init(seed=5), models.batches(6), evaluate=evaluate, **options).history["eval_loss"]

        return run(size, rank)

    (reference,) = history(1, 0)
    assert len(reference) == 3
    for level in levels:
        for actual in history(3, level):
            assert actual == pytest.approx(reference, rel=1e-12)


class Failing:
    """Batches; rank 1 cannot read the second one, or if `first`, any."""

    def __init__(self, rank, first):
        self.fails, self.first = rank == 1, first

    def __iter__(self):
        if self.fails and self.first:
            raise DataError("no more")
        return self.batches()

    def batches(self):
        yield next(models.batches())
        if self.fails:
            raise DataError("no more")


@pytest.mark.parametrize("first", [False, True])
def test_data_that_fails_on_one_rank_is_an_error_on_all(first):
    def rank(number):
        step = sharded_step(3)
        with pytest.raises((DataError, RankError)) as caught:
            ft.evaluate(ft.eval_step(step.loss), step.init(), Failing(number, first))
        return str(caught.value)

    text_of_others = "evaluate: rank 1 failed, so all ranks stop; its own error says why"
    assert run(3, rank) == [text_of_others, "no more", text_of_others]


@pytest.mark.parametrize("place", ["inner", "blocks.0.norm", "blocks.1.out", "head"])
def test_a_loss_that_fails_on_one_rank_fails_on_all(place):
    """Before the blocks of level 3, within one of them, and after the last one."""

    def rank(number):
        step = sharded_step(3)
        eval_step, state = ft.eval_step(step.loss), step.init()
        part = step.loss.module.get_submodule(place)
        forward, calls = part.forward, []

        def failing(x):
            calls.append(x)
            if number == 1 and len(calls) == 2:
                raise ArithmeticError("on purpose")
            return forward(x)

        part.forward = failing
        with pytest.raises((ArithmeticError, RankError)) as caught:
            ft.evaluate(eval_step, state, models.batches(3))
        del part.forward
        again = ft.evaluate(eval_step, state, models.batches(1))
        return type(caught.value), len(calls), again["loss"]

    reference, *others = run(3, rank)
    assert others[0] == (ArithmeticError, *reference[1:])
    # The third batch is evaluated before the others know that the second one has failed.
    assert others[1] == reference == (RankError, 3, pytest.approx(reference[2]))


def test_different_batches_on_ranks_are_an_error_that_names_the_sampler():
    def rank(number):
        step = sharded_step(0)
        with pytest.raises(BatchError, match=r"evaluate: the ranks have different batches; .*DistributedSampler"):
            ft.evaluate(ft.eval_step(step.loss), step.init(), models.batches(seed=number))

    run(2, rank)


def test_one_rank_splits_its_examples_when_memory_runs_out():
    lengths = []

    def scarce(number):
        def loss(model, batch):
            if number == 1:
                lengths.append(len(batch["x"]))
                if len(batch["x"]) > 2:
                    raise torch.OutOfMemoryError("out of memory, on purpose")
            return models.loss(model, batch)

        return loss

    def rank(number):
        step = sharded_step(3, criterion=scarce(number))
        return ft.evaluate(ft.eval_step(step.loss), step.init(seed=5), models.batches(2), on_oom="split")

    (reference,) = run(1, rank)
    for actual in run(2, rank):
        assert actual == pytest.approx(reference, rel=1e-12)
    assert lengths == [6, 3, *[2, 2, 1, 1] * 2]


def test_a_divided_state_fills_a_module():
    def rank(_):
        step = sharded_step(3)
        state, _ = step(step.init(seed=5), next(models.batches()))
        module = ft.to_module(models.Model().double(), state)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}, ft.parallel.whole(state.params)

    for tensors, params in run(3, rank):
        assert all(torch.equal(tensors[name].detach(), leaf) for name, leaf in params.items())


@pytest.mark.parametrize("level", [0, 3])
def test_the_first_rank_warns_of_an_evaluation_in_which_nothing_counts(level):
    def loss(params, batch):
        return ft.Mean((params["w"] * batch).sum() * 0, batch.sum() * 0)

    def rank(_):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level))
        return ft.evaluate(ft.eval_step(step.loss), step.init({"w": torch.ones(())}), [torch.ones(4)])["loss"]

    with pytest.warns(UserWarning, match="evaluate: the mean of loss is NaN") as caught:
        assert all(math.isnan(actual) for actual in run(2, rank))
    assert len(caught) == 1


@pytest.mark.parametrize(("batches", "count"), [("whole", 1), ("rows", 2)], ids=["of all ranks", "of each rank"])
def test_leaves_of_a_batch_that_do_not_match_are_warned_of_once_for_each_batch(batches, count):
    def loss(params, batch):
        return (params["w"] * batch["x"]).mean() + batch["y"].mean()

    def rank(_):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), batches=batches))
        state = step.init({"w": torch.ones(())})
        return ft.eval_step(step.loss)(state, {"x": torch.ones(4), "y": torch.ones(2)})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(2, rank)
    assert [("rows and" in str(warning.message)) for warning in caught] == [True] * count
