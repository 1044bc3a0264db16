"""A step that runs out of memory at any operation is made again with the batch in pieces, and gives the same update."""

import errno
import math
import re
import signal
import types
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ftrain as ft
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import CheckpointError, ComposeError, ConsumedError, DeviceError, LossError, OptionError
from ftrain.step.microbatch import most_pieces, split_batch
from ftrain.step.step import Step
from ftrain.training.oom_retry import split_step
from ftrain.training.run import Run
from ftrain.transforms.compile import capture as capturing

F64 = torch.float64


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Garbage collection takes longer than a whole run of these tests."""
    monkeypatch.setattr("ftrain.backends.oom.gc", types.SimpleNamespace(collect=int))


class OutOfMemoryAt(TorchDispatchMode):
    """Raises an out-of-memory error before or after the operation with the index `at` of one step, `times` times."""

    def __init__(self, step, at, *, after=False, times=1):
        super().__init__()
        self.step, self.at, self.after, self.left = step, at, after, times
        self.operation_count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fails = self.operation_count == self.at and self.left > 0
        self.operation_count += 1
        if fails and not self.after:
            self._run_out()
        result = func(*args, **(kwargs or {}))
        if fails:
            self._run_out()
        return result

    def _run_out(self):
        self.left -= 1
        raise torch.OutOfMemoryError("out of memory, on purpose")


@contextmanager
def out_of_memory_at(step, at, **options):
    """Let step number `step` run out of memory at its operation `at`; yields the mode, which counts."""
    mode, call = OutOfMemoryAt(step, at, **options), Step.__call__

    def call_with_mode(self, state, batch):
        if int(state.step) != mode.step:
            return call(self, state, batch)
        mode.operation_count = 0
        with mode:
            return call(self, state, batch)

    def without_mode(function):
        def wrapped(*args, **kwargs):
            with _disable_current_modes():
                return function(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", call_with_mode)
        # Operations of a capture are only recorded, and take no memory.
        patch.setattr(capturing, "capture", without_mode(capturing.capture))
        patch.setattr(capturing, "compile_graph", without_mode(capturing.compile_graph))
        yield mode


def loss(params, batch, rng):
    x, y, kept = batch["x"], batch["y"], batch["kept"]
    hidden = torch.tanh(x @ params["w1"])
    if rng is not None:
        hidden = ft.random.dropout(rng, hidden, 0.2)
    errors = (hidden @ params["w2"] - y).square() * kept
    return ft.Mean(errors.sum(), kept.sum()), {"worst": errors.detach().max()}


def loss_without_dropout(params, batch):
    return loss(params, batch, None)


def unweighted_loss(params, batch):
    return (batch["x"] @ params["w1"]).square().mean(), {"mean": batch["y"].mean()}


def params(dtype=F64):
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, 4), "w2": (4,)}
    return {name: torch.randn(shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


def batches(count=3, length=6, dtype=F64):
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(length, 3, generator=draw, dtype=dtype),
            "y": torch.randn(length, generator=draw, dtype=dtype),
            "kept": torch.randint(1, 4, (length,), generator=draw).to(dtype),
            "scale": torch.tensor(1.0),
        }
        for _ in range(count)
    ]


def make(*wrappers, loss=loss, optimizer=None):
    return ft.compose(ft.train_step(loss, optimizer or ft.optim.adamw(0.1)), *wrappers)


def fit(step, data, **options):
    options = {"progress": False, "on_oom": "split", "log_every": 1, **options}
    return ft.fit(step, options.pop("state", None) or step.init(params()), data, **options)


def by_hand(step, data, split_at, split=None):
    state, split = step.init(params()), split or split_step(step, 2)
    for index, batch in enumerate(data):
        state, _ = (split if index >= split_at else step)(state, batch)
    return state


def assert_bitwise(actual, expected):
    assert ft.tree.leaf_names(actual) == ft.tree.leaf_names(expected)
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_close(actual, expected, tolerance=1e-12):
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def splits(history):
    """Return step -> number of pieces, for the steps at which the run was split."""
    return {record["step"]: record["split"] for record in history if "split" in record}


def count_operations(step, index, **options):
    """Return the number of operations of the step with this index."""
    with out_of_memory_at(index, -1) as mode:
        fit(step, batches(index + 1), **options)
    return mode.operation_count


STRIDE = 17
"""Every 17th operation is tried, and the last, with another offset in each case. `make test-all` tries all."""

strides = pytest.mark.parametrize("stride", [STRIDE, pytest.param(1, marks=pytest.mark.exhaustive)])


def every_nth(count, stride, offset=0):
    """Return the indices of every `stride`-th of `count` operations, and of the last."""
    return sorted({*range(offset % stride, count, stride), count - 1})


STACKS = {
    "before": ((), False),
    "after": ((), True),
    "guarded": ((ft.skip_nonfinite(3),), True),
    "accumulate": ((ft.accumulate(3),), False),
    "full": ((ft.accumulate(2), ft.clip(1.0), ft.ema(0.9)), True),
}


@strides
@pytest.mark.parametrize("name", STACKS)
def test_out_of_memory_at_every_operation(name, stride):
    stack, after = STACKS[name]
    # Dropout adds many operations, which the stacks without `accumulate` cover.
    step, data = make(*stack, loss=loss_without_dropout if name in ("accumulate", "full") else loss), batches(2)
    expected = by_hand(step, data, 1)
    for at in every_nth(count_operations(step, 1, donate=False), stride, 2 * list(STACKS).index(name)):
        with out_of_memory_at(1, at, after=after) as mode:
            state, history = fit(step, data, donate=False)
        assert mode.left == 0
        assert_bitwise(state, expected)
        assert splits(history) == {2: 2}
        assert history["step"] == [1, 2]


@strides
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_donated_state_is_kept_or_taken_from_the_checkpoint(after, stride, tmp_path):
    step, data = make(ft.clip(1.0)), batches(2)
    expected = by_hand(step, data, 1)
    overwritten = []
    for at in every_nth(count_operations(step, 1), stride, 2 * after):
        with out_of_memory_at(1, at, after=after):
            try:
                assert_bitwise(fit(step, data).state, expected)
            except DeviceError as caught:
                error = caught
                overwritten.append(at)
                continue
        assert not overwritten, "only the last operations of a step overwrite the state"
    assert re.search(r"(?s)overwrite.*checkpoints=", str(error))
    with pytest.raises(ConsumedError):
        _ = error.result.state.params
    for at in overwritten:
        with out_of_memory_at(1, at, after=after):
            checkpoints = ft.Checkpoints(tmp_path / str(at), every=1, async_=False)
            state, history = fit(step, data, checkpoints=checkpoints)
        assert_bitwise(state, expected)
        assert splits(history) == {2: 2}
        assert history["step"] == [1, 2]


@pytest.mark.parametrize(
    ("optimizer", "more"), [(ft.optim.lion(0.1), ()), (ft.optim.adamw(0.1), (ft.ema(0.9),))], ids=["lion", "ema"]
)
def test_a_guarded_update_without_fused_kernels_overwrites_nothing_before_memory_can_run_out(optimizer, more):
    step, data = make(ft.skip_nonfinite(3), *more, loss=loss_without_dropout, optimizer=optimizer), batches(2)
    expected = by_hand(step, data, 1)
    # The last operations: the new parameters exist already, the new counters do not.
    for at in range(count_operations(step, 1))[-25::2]:
        with out_of_memory_at(1, at, after=True) as mode:
            assert_bitwise(fit(step, data).state, expected)
        assert mode.left == 0


def test_a_retry_from_an_overwritten_state_would_give_a_wrong_update(monkeypatch):
    """Shows that the tests above can fail: without the record of writes some retries start from a changed state."""
    monkeypatch.setattr(
        "ftrain.training.oom_retry._StateWrites.begun", property(lambda self: False, lambda self, value: None)
    )
    step, data = make(), batches(2)
    expected, wrong = by_hand(step, data, 1), 0
    # The last operations write the state.
    for at in range(count_operations(step, 1))[-10:]:
        with out_of_memory_at(1, at, after=True):
            state, _ = fit(step, data)
        pairs = zip(ft.tree.leaves(state), ft.tree.leaves(expected), strict=True)
        wrong += any(not torch.equal(a, b) for a, b in pairs)
    assert wrong


def compiled_once(step, monkeypatch):
    """Return the step in two pieces, and let all runs of a test use it, so that it is compiled once."""
    # A run would pass its own record of writes, which a graph does not use, and so compile a step of its own.
    split = split_step(step, 2)
    monkeypatch.setattr(
        "ftrain.training.oom_retry.split_step", lambda whole, pieces, writes: split if pieces == 2 else whole
    )
    return split


@strides
@pytest.mark.parametrize(
    ("donate", "after"), [(False, False), (False, True), (True, True)], ids=["before", "after", "donated"]
)
def test_out_of_memory_at_every_operation_of_a_compiled_step(donate, after, stride, tmp_path, monkeypatch):
    """The backend "eager" runs the graph operation by operation, so that memory can run out between any two."""
    step, data = make(ft.compiled(lowering="whole", backend="eager"), loss=loss_without_dropout), batches(2)
    split = compiled_once(step.donating if donate else step, monkeypatch)
    expected = [by_hand(step, data, index, None if donate else split) for index in (0, 1)]
    count = count_operations(step, 1, donate=donate)
    # The first step keeps a copy of the state that it overwrites, the second does not, and needs a checkpoint.
    chosen = {index: every_nth(count, stride, 3 * index + after + donate) for index in (0, 1)}
    for index, at in [(index, at) for index, numbers in chosen.items() for at in numbers]:
        checkpoints = ft.Checkpoints(tmp_path / f"{index}-{at}", every=1, async_=False) if donate and index else None
        with out_of_memory_at(index, at, after=after) as mode:
            state, history = fit(step, data, donate=donate, checkpoints=checkpoints)
        assert mode.left == 0
        assert_bitwise(state, expected[index])
        assert splits(history) == {index + 1: 2}


def test_out_of_memory_in_a_step_whose_gradient_and_update_are_two_graphs(tmp_path, monkeypatch):
    step, data = make(ft.compiled(backend="eager", lowering="split"), loss=loss_without_dropout), batches(2)
    split = compiled_once(step, monkeypatch)
    first, second = by_hand(step, data, 0, split), by_hand(step, data, 1, split)
    # The first step fails at its last operation, which writes the state, and the second in the middle, without a copy
    # of its state. The first run of a loss also checks it, with more operations, so the second run is counted.
    count_operations(step, 0)
    count = count_operations(step, 0)
    with out_of_memory_at(0, count - 1, after=True) as mode:
        state, history = fit(step, data)
    assert mode.left == 0
    assert_bitwise(state, first)
    assert splits(history) == {1: 2}
    with out_of_memory_at(1, count // 2, after=True) as mode:
        state, _ = fit(step, data, checkpoints=ft.Checkpoints(tmp_path, every=1))
    assert mode.left == 0
    assert_bitwise(state, second)


class DropoutNet(torch.nn.Module):
    """A net with torch's dropout, which a compiled step draws for each example."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))[:, 0]


def weighted(model, batch):
    error = (model(batch["x"]) - batch["y"]).square() * batch["kept"]
    return ft.Mean(error.sum(), batch["kept"].sum()), {"largest": error.detach().max()}


def unweighted(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


@contextmanager
def captures():
    """Yield a list to which each capture adds the number of nodes of its graph."""
    sizes, capture = [], capturing.capture

    def counted(*args):
        captured = capture(*args)
        sizes.append(len(captured.graph.nodes))
        return captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "capture", counted)
        yield sizes


@pytest.mark.parametrize(
    ("backend", "criterion", "cuts"),
    [
        ("eager", weighted, [(12, 2), (12, 4), (1, 2)]),
        ("eager", unweighted, [(5, 4)]),
        pytest.param("eager", weighted, [(5, 4)], marks=pytest.mark.exhaustive),
        pytest.param("inductor", weighted, [(5, 2)], marks=pytest.mark.exhaustive),
    ],
)
def test_pieces_of_a_compiled_step_are_one_graph_in_a_loop(backend, criterion, cuts):
    torch.manual_seed(0)
    loss = ft.from_module(DropoutNet().double(), criterion)
    wrappers = ft.clip(0.1), ft.ema(0.9), ft.compiled(lowering="whole", backend=backend)
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), *wrappers)
    sizes = {}
    for length, pieces in cuts:
        state, (batch,) = step.init(seed=1), batches(1, length)
        expected, metrics = step(state, batch)
        with captures() as sizes[length, pieces]:
            split = split_step(step, pieces)
            state, actual = split(state, batch)
        assert_close(state, expected)
        assert float(actual["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-12)
        assert_bitwise(split(step.init(seed=1), batch)[0], state)
    # One graph of the gradient for each length of a piece, whatever the number of pieces, and one of the update.
    assert [len(node_counts) for node_counts in sizes.values()] == [
        2 + (length % pieces > 0 and length > 1) for length, pieces in sizes
    ]
    assert max(sizes.get((12, 4), [0])) == max(sizes.get((12, 2), [0]))


@pytest.mark.parametrize("donate", [False, True])
def test_pieces_of_a_compiled_fp16_step(donate):
    """Also within the microbatches of `accumulate`; an overflow in one piece skips the whole update."""
    step = ft.compose(
        ft.train_step(ft.from_module(torch.nn.Linear(3, 1, bias=False), weighted_rows), ft.optim.adamw(0.1)),
        ft.with_amp("fp16"),
        ft.accumulate(2),
        ft.compiled(lowering="whole", backend="eager", donate=donate),
    )
    (batch,) = batches(1, 12, torch.float32)
    # Small gradients: those of a few examples could overflow where the mean of all does not.
    batch |= {name: batch[name] / 10 for name in ("x", "y")}
    state = step.init(seed=1)
    expected, _ = step(ft.tree.clone(state), batch)
    actual, metrics = split_step(step, 3)(state, batch)
    assert not metrics["skipped"]
    assert_close(actual.params, expected.params, 1e-3)
    assert torch.equal(actual.slots["with_amp"]["scale"], expected.slots["with_amp"]["scale"])
    batch["x"][7] = float("inf")
    before = ft.tree.clone(actual.params)
    actual, metrics = split_step(step, 3)(actual, batch)
    assert metrics["skipped"]
    assert_bitwise(actual.params, before)


def weighted_rows(model, batch):
    return weighted(lambda x: model(x)[:, 0], batch)


def test_splitting_a_compiled_step_captures_graphs_of_single_pieces(tmp_path):
    """Only pieces of 2 examples fit; no try captures a graph of all the pieces."""
    step = make(ft.compiled(lowering="whole", backend="eager"), loss=loss_that_fits(2))
    data = batches(3, 16)
    with captures() as sizes:
        state, history = fit(step, data, log_every=1)
    assert splits(history) == {1: 8}
    assert len(sizes) == 2
    assert_close(state, by_hand(make(loss=loss_without_dropout), data, 100))
    fit(step, data, steps=2, checkpoints=ft.Checkpoints(tmp_path, every=1))
    resumed, _ = fit(step, data, steps=3, checkpoints=ft.Checkpoints(tmp_path, every=1))
    assert_bitwise(resumed, state)


# Where torch breaks a graph, it reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_step_that_cannot_be_captured_is_split_uncompiled():
    def data_dependent(params, batch):
        return loss_without_dropout(params, batch) if float(batch["x"].sum()) > -1e9 else None

    step, data = make(ft.compiled(backend="eager"), loss=data_dependent), batches(1)
    state, _ = split_step(step, 2)(step.init(params()), data[0])
    assert_close(state, by_hand(make(loss=loss_without_dropout), data, 0))


# The law of the split


@pytest.mark.parametrize("pieces", [2, 4, 6, 100])
@pytest.mark.parametrize("length", [1, 5, 6])
@pytest.mark.parametrize("loss", [loss_without_dropout, unweighted_loss])
@pytest.mark.parametrize(
    "wrappers", [(), (ft.clip(0.1),), (ft.clip(0.1), ft.accumulate(1)), (ft.accumulate(1), ft.ema(0.9))]
)
def test_a_split_is_the_same_update(pieces, length, loss, wrappers):
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), *wrappers)
    state, (batch,) = step.init(params()), batches(1, length)
    (actual, metrics), (expected, expected_metrics) = split_step(step, pieces)(state, batch), step(state, batch)
    assert_close(actual, expected)
    assert metrics.keys() == expected_metrics.keys()
    names = [name for name in metrics if name != "worst"]
    assert [float(metrics[name]) for name in names] == pytest.approx(
        [float(expected_metrics[name]) for name in names], abs=1e-12
    )


@pytest.mark.parametrize("loss", [loss_without_dropout, unweighted_loss])
def test_pieces_of_unequal_length_need_no_second_gradient(loss):
    step = ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True)
    state = step.init({**params(), "w1": params()["w1"].repeat(1000, 1)})
    most = []
    for length in (6, 5):
        (batch,) = batches(1, length)
        batch["x"] = batch["x"].repeat(1, 1000)
        most.append(ft.anatomy(split_step(step, 2), state, batch, measure=False).most["gradients"])
    assert most[1] == pytest.approx(most[0], abs=100)  # A second gradient would take 96,000 bytes more.


def test_clip_within_accumulate_clips_the_microbatches_and_not_the_pieces():
    """The pieces of a microbatch are added up before it is clipped."""
    step = ft.compose(ft.train_step(loss_without_dropout, ft.optim.sgd(0.1)), ft.clip(0.1), ft.accumulate(2))
    state, (batch,) = step.init(params()), batches(1)
    assert_close(split_step(step, 3)(state, batch)[0], step(state, batch)[0])
    finer = ft.compose(ft.train_step(loss_without_dropout, ft.optim.sgd(0.1)), ft.clip(0.1), ft.accumulate(6))
    assert not torch.allclose(finer(state, batch)[0].params["w1"], step(state, batch)[0].params["w1"], rtol=1e-6)


@pytest.mark.parametrize("loss", [loss, unweighted_loss])
def test_equal_pieces_have_the_bits_of_accumulate(loss):
    make = lambda *wrappers: ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), *wrappers)  # noqa: E731
    state, (batch,) = make().init(params()), batches(1)
    assert_bitwise(split_step(make(), 3)(state, batch)[0], make(ft.accumulate(3))(state, batch)[0])


def test_split_batch_loses_no_example():
    (batch,) = batches(1, 7)
    for pieces in range(1, 9):
        parts = split_batch(batch, pieces)
        assert len(parts) == min(pieces, 7)
        for name in ("x", "y", "kept"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        assert all(part["scale"] is batch["scale"] for part in parts)
    assert most_pieces({"x": torch.zeros(3), "y": torch.zeros(4)}) == most_pieces({"n": 3}) == 1
    assert most_pieces(torch.zeros(0, 2)) == 1


# The run


def loss_that_fits(examples):
    """Return a loss that runs out of memory with more than `examples` examples."""

    def loss(params, batch):
        if len(batch["x"]) > examples:
            raise torch.OutOfMemoryError("out of memory: too many examples")
        return loss_without_dropout(params, batch)

    return loss


def test_a_run_splits_until_the_pieces_fit_and_says_so_once(capsys):
    step, data = make(loss=loss_that_fits(2)), [*batches(), *batches(1, 1)]
    state, history = fit(step, data, progress=True)
    assert_close(state, by_hand(make(loss=loss_without_dropout), data, 100))
    assert splits(history) == {1: 4}
    output = capsys.readouterr()
    assert (output.out + output.err).count("out of memory") == 1


def test_a_later_batch_that_is_larger_splits_further():
    step, data = make(loss=loss_that_fits(3)), [*batches(2, 4), *batches(2, 12), *batches(1, 5)]
    state, history = fit(step, data)
    assert splits(history) == {1: 2, 3: 4}
    assert_close(state, by_hand(make(loss=loss_without_dropout), data, 100))


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_keeps_its_split(tmp_path, every):
    tried = []

    def counted(params, batch):
        tried.append(len(batch["x"]))
        return loss_that_fits(3)(params, batch)

    step, data = make(loss=counted), batches(4)
    expected, _ = fit(step, data, steps=4)
    fit(step, data, steps=2, checkpoints=ft.Checkpoints(tmp_path, every=every))
    tried.clear()
    state, history = fit(step, data, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=every))
    assert_bitwise(state, expected)
    assert tried == [3] * 4, "nothing that did not fit was tried again"
    assert splits(history) == {1: 2}
    assert history["step"] == [1, 2, 3, 4]


def test_a_metric_of_the_name_of_the_pieces_is_an_error_before_a_run_resumes_with_it():
    def named(params, batch):
        return loss_without_dropout(params, batch)[0], {"split": torch.tensor(2)}

    with pytest.raises(LossError, match="fit: a metric is called 'split'"):
        fit(make(loss=named), batches())
    assert fit(make(loss=named), batches(), on_oom="raise").history["split"] == [2, 2, 2]


def test_a_signal_ends_the_run_before_a_step_is_tried_again(tmp_path):
    tried = []

    def short(params, batch):
        tried.append(len(batch["x"]))
        if len(tried) == 3:
            signal.raise_signal(signal.SIGTERM)
        if len(tried) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return loss_without_dropout(params, batch)

    checkpoints = ft.Checkpoints(tmp_path, every=9)
    with pytest.raises(SystemExit) as caught:
        fit(make(loss=short), batches(), checkpoints=checkpoints)
    assert caught.value.code == 143
    assert tried == [6, 6, 3], "the second try of the second step was its last"
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize(("every", "keep"), [(2, 9), (3, 1), (7, 1)])
def test_a_replay_makes_steps_in_as_many_pieces(tmp_path, every, keep):
    """Also from a checkpoint that was saved before the split, and from the beginning."""
    step, data, states = make(), batches(7), [make().init(params())]
    checkpoints = ft.Checkpoints(tmp_path, every=every, keep=keep)
    with out_of_memory_at(4, 5), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after_step", recording_after_step(states))
        _, history = fit(step, data, checkpoints=checkpoints)
    assert splits(history) == {5: 2}
    for at in range(1, 8):
        actual, batch = ft.replay(step, states[0], data, checkpoints, at=at)
        assert_bitwise(actual, states[at - 1])
        assert_bitwise(batch, data[at - 1])
    # Without the pieces the rounding differs, so that the comparison above can fail.
    with pytest.raises(AssertionError):
        assert_bitwise(by_hand(step, data, 7), states[7])


def recording_after_step(states):
    """Return `Run.after_step` with an addition: it appends a copy of each state to `states`."""
    after_step = Run.after_step

    def after_step_and_record(self, record, steps):
        states.append(ft.tree.clone(record.state))
        return after_step(self, record, steps)

    return after_step_and_record


def test_a_reload_takes_back_history_log_and_position(tmp_path):
    def data():
        return ft.data.loader(ft.data.arrays(batches(1, 24)[0] | {"scale": torch.ones(24)}), 6, seed=3)

    step = make()
    expected = fit(step, data(), steps=7, checkpoints=ft.Checkpoints(tmp_path / "a", every=2), on_oom="raise")[0]
    with out_of_memory_at(5, count_operations(step, 1) - 1) as mode:
        actual, history = fit(
            step,
            data(),
            steps=7,
            log_every=3,
            checkpoints=ft.Checkpoints(tmp_path / "b", every=2),
            loggers=[ft.loggers.jsonl(tmp_path / "log")],
        )
    assert mode.left == 0
    # The run was continued from the checkpoint of step 4.
    assert splits(history) == {5: 2}
    assert history["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert history["seconds"] == sorted(history["seconds"])
    assert len((tmp_path / "log").read_text().splitlines()) == 7
    assert actual.step == expected.step


def test_a_reload_needs_data_that_can_be_iterated_again(tmp_path):
    step = make()
    with (
        out_of_memory_at(1, count_operations(step, 1) - 1),
        pytest.raises(DeviceError, match="can be iterated only once"),
    ):
        fit(step, iter(batches()), checkpoints=ft.Checkpoints(tmp_path, every=1))


def test_a_reload_from_damaged_checkpoints_is_an_error(tmp_path):
    class Damaging:
        def __iter__(self):
            for index, batch in enumerate(batches()):
                for file in tmp_path.rglob("*.safetensors") if index else ():
                    file.write_bytes(b"")
                yield batch

    step = make()
    checkpoints = ft.Checkpoints(tmp_path, every=1, async_=False)
    with out_of_memory_at(1, count_operations(step, 1) - 1) as mode, pytest.raises(CheckpointError) as caught:
        fit(step, Damaging(), checkpoints=checkpoints)
    assert mode.left == 0
    with pytest.raises(ConsumedError):
        _ = caught.value.result.state.params


def test_a_single_example_that_does_not_fit_is_an_error():
    with pytest.raises(DeviceError, match="one example at a time") as caught:
        fit(make(loss=loss_that_fits(0)), batches())
    assert is_out_of_memory(caught.value.__cause__)
    text = r"(?s)optimizer state.*What would need less.*ft\.optim\.adamw_8bit"
    # So many parameters that the state takes most of the memory, and the report proposes smaller optimizer state.
    wide = {"w1": torch.randn(3, 1 << 20, dtype=F64), "w2": torch.randn(1 << 20, dtype=F64)}
    step = make(loss=loss_without_dropout)
    with out_of_memory_at(0, 3, times=100), pytest.raises(DeviceError, match=text) as caught:
        fit(step, batches(), state=step.init(wide))
    assert int(caught.value.result.state.step) == 0


def test_a_batch_that_cannot_be_split_is_an_error():
    def uneven(params, batch):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(DeviceError, match="cannot be split"):
        fit(make(loss=uneven), [{"x": torch.zeros(3), "y": torch.zeros(4)}])


def test_other_errors_are_raised_unchanged():
    def wrong(params, batch):
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="multiplied"):
        fit(make(loss=wrong), batches())
    with pytest.raises(torch.OutOfMemoryError):
        fit(make(loss=loss_that_fits(2)), batches(), on_oom="raise")
    with pytest.raises(OptionError, match="on_oom"):
        fit(make(), batches(), on_oom="skip")
    with pytest.raises(ComposeError, match="needs a Step"):
        fit(lambda state, batch: (state, {}), batches(), state=make().init(params()))


def test_is_out_of_memory_knows_the_errors_of_the_allocators():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError("Unable to allocate 1.2 GiB"))
    assert is_out_of_memory(RuntimeError("backend='inductor' raised:\nMemoryError: "))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("index out of range"))


def test_release_frees_the_tensors_that_the_traceback_holds():
    references = []

    def failing():
        activation = torch.zeros(10)
        references.append(weakref.ref(activation))
        try:
            raise torch.OutOfMemoryError("out of memory")
        except RuntimeError as error:
            raise RuntimeError("wrapped: out of memory") from error

    try:
        failing()
    except RuntimeError as error:
        release(error, torch.device("cpu"))
        assert references[0]() is None


def test_release_waits_for_copies_to_the_host(monkeypatch):
    waited = []
    copier = types.SimpleNamespace(wait=lambda: waited.append(1))
    monkeypatch.setattr("ftrain.backends.oom.copier_of", lambda device: copier)
    release(RuntimeError("out of memory"), torch.device("cpu"))
    assert waited == [1]


def test_the_tensors_of_a_failed_attempt_are_freed_before_the_next():
    references, alive = [], []

    def loss(params, batch):
        alive.append(sum(reference() is not None for reference in references))
        big = torch.zeros(1234) + params["w1"].sum()
        references.append(weakref.ref(big))
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss_without_dropout(params, batch)[0].total / len(batch["x"]) + 0 * big.sum()

    fit(make(loss=loss), batches(1, 4))
    assert alive == [0] * len(alive)


# Evaluation


@pytest.mark.parametrize("examples", [1, 2, 3, 6])
@pytest.mark.parametrize("loss_type", ["mean", "plain"])
def test_an_evaluation_in_pieces_is_exact(examples, loss_type):
    tried = []

    def limited_loss(params, batch):
        tried.append(len(batch["x"]))
        if tried[-1] > examples:
            raise torch.OutOfMemoryError("out of memory")
        return loss_without_dropout(params, batch)[0] if loss_type == "mean" else unweighted_loss(params, batch)

    unlimited = (lambda *args: loss_without_dropout(*args)[0]) if loss_type == "mean" else unweighted_loss
    state, data = make().init(params()), [*batches(2, 6), *batches(1, 1), *batches(1, 5)]
    expected = ft.evaluate(ft.eval_step(unlimited), state, data)
    actual = ft.evaluate(ft.eval_step(limited_loss), state, data, on_oom="split")
    assert actual == pytest.approx(expected, rel=1e-12)
    failed = [length for length in tried if length > examples]
    assert len(failed) <= math.ceil(math.log2(6)), "what does not fit is not tried again"


def test_an_evaluation_that_may_not_or_cannot_split_is_an_error():
    state = make().init(params())
    for on_oom, examples, error in (("raise", 3, torch.OutOfMemoryError), ("split", 0, DeviceError)):
        with pytest.raises(error):
            ft.evaluate(ft.eval_step(loss_that_fits(examples)), state, batches(), on_oom=on_oom)
    with pytest.raises(OptionError, match="on_oom"):
        ft.evaluate(ft.eval_step(loss_without_dropout), state, batches(), on_oom="skip")


def test_a_split_evaluation_does_not_split_the_training():
    training = []

    def loss(params, batch):
        training.append(len(batch["x"]))
        return loss_without_dropout(params, batch)

    step = make(loss=loss)
    evaluating = ft.eval_step(loss_that_fits(2))
    _, history = fit(
        step,
        batches(),
        evaluate_every=1,
        evaluate=lambda state: ft.evaluate(evaluating, state, batches(), on_oom="split"),
    )
    assert training == [6, 6, 6]
    assert not splits(history)


def test_an_error_of_a_model_in_a_small_piece_gets_a_note_about_the_split():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def criterion(model, batch):
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return model(batch["x"]).square().mean()

    step = ft.train_step(ft.from_module(net, criterion), ft.optim.sgd(0.1))
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        fit(step, [{"x": torch.randn(8, 3)}, {"x": torch.randn(5, 3)}], state=step.init())
    notes = " ".join(caught.value.__notes__)
    assert "split the batch into pieces of 1 and 2 examples, because memory had run out" in notes


def test_update_in_backward_refuses_to_be_split():
    step = ft.compose(ft.train_step(loss_without_dropout, ft.optim.sgd(0.1)), ft.update_in_backward())
    with pytest.raises(ComposeError, match=r"fit\(on_oom='split'\) needs all gradients at once"):
        fit(step, batches())


def test_an_evaluation_of_a_single_example_that_does_not_fit():
    def too_large(params, batch):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(DeviceError, match=r"evaluate: memory ran out with a single example of too_large; use shorter"):
        ft.evaluate(ft.eval_step(too_large), make().init(params()), batches(), on_oom="split")


# Losses that are no mean over examples


def summed(params, batch):
    return (batch["x"] @ params["w1"]).square().sum()


def contrastive(params, batch):
    rows = torch.nn.functional.normalize(batch["x"] @ params["w1"], dim=-1)
    return torch.nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def token_mean(params, batch):
    kept = batch["kept"]
    return ((batch["x"] @ params["w1"]).square().sum(-1) * kept).sum() / kept.sum()


@pytest.mark.parametrize("loss", [summed, contrastive, token_mean])
def test_a_loss_that_is_no_mean_of_examples_is_warned_of_once(loss):
    def short(params, batch):
        if len(batch["x"]) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return loss(params, batch)

    data = batches(3)
    for batch in data:
        batch["kept"][:2] = torch.tensor([1.0, 3.0])
    step = ft.train_step(short, ft.optim.sgd(0.1), allow_unused=True)
    with pytest.warns(UserWarning, match=r"on_oom='split'\): the loss of two examples.*Return ft\.Mean") as caught:
        fit(step, data)
    assert [warning.filename for warning in caught] == [__file__]
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), ft.accumulate(2))
    state = step.init(params())
    with pytest.warns(UserWarning, match=r"^accumulate: the loss of two examples") as caught:
        # The run is shorter than `log_every`, and must warn nevertheless.
        actual, _ = fit(step, data, state=state, donate=False, on_oom="raise", log_every=10)
    assert [warning.filename for warning in caught] == [__file__]
    for batch in data:
        state, _ = step(state, batch)
    assert_bitwise(actual, state)


@pytest.mark.parametrize("other", [3, 5])
def test_the_first_two_examples_may_be_alike(other):
    (batch,) = batches(1)
    batch["kept"] = torch.ones(6, dtype=F64).index_fill(0, torch.tensor(other), 3.0)
    step = ft.compose(ft.train_step(token_mean, ft.optim.sgd(0.1), allow_unused=True), ft.accumulate(2))
    with pytest.warns(UserWarning, match=r"^accumulate: the loss of two examples"):
        fit(step, [batch], on_oom="raise")


def training_only_loss(params, batch):
    """A loss that cannot be called without gradients, so that it cannot be checked."""
    if not torch.is_grad_enabled():
        raise ValueError("in training only")
    return unweighted_loss(params, batch)[0]


def diffusion_loss(params, batch):
    """A loss that draws a time and noise for each example, also in evaluation, as that of a diffusion model."""
    times = torch.randint(1, 9, (len(batch["x"]), 1))
    return ((batch["x"] + times * torch.randn_like(batch["x"])) @ params["w1"]).square().mean()


@pytest.mark.parametrize("loss", [loss, loss_without_dropout, unweighted_loss, training_only_loss, diffusion_loss])
def test_a_mean_is_not_warned_of(loss):
    """Warnings are errors in the tests. Neither dropout nor a batch of one example causes one."""
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), ft.accumulate(1))
    with out_of_memory_at(0, 3):
        fit(step, batches(2))
    fit(step, batches(1, 1))
    fit(ft.accumulate(2)(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True)), batches(1))
