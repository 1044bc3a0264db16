"""Recording and replaying a compiled step, on an imaginary device that records a function instead of kernels.

Like a real one it executes nothing while it records, works on the addresses that it saw, and writes
the same outputs in every replay. What it cannot show is whether CUDA records the kernels themselves.
"""

import dataclasses
import functools
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import backends, tree
from ftrain.backends import cpu
from ftrain.errors import OptionError
from ftrain.transforms.compile.cuda_graph import ReplayedGraph, StepRecorder
from tests.bits import assert_same_bits

OUTPUTS = 2
"""The number of scalars that the functions here return: in a step, the loss and the norm of the gradient."""


class RecordingDevice:
    """Counts what it records and replays, or fails to record."""

    def __init__(self):
        self.recorded, self.replayed, self.failed, self.fails = 0, 0, 0, False

    def recorder(self):
        def record(work):
            if self.fails:
                self.failed += 1
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            self.recorded += 1
            # Memory that every replay writes.
            outputs = [torch.zeros(()) for _ in range(OUTPUTS)]

            def replay():
                self.replayed += 1
                for output, result in zip(outputs, work(), strict=True):
                    output.copy_(result)

            return replay, outputs

        return record


@pytest.fixture
def device():
    """A CPU that records and replays."""
    device = RecordingDevice()
    backends.register(dataclasses.replace(cpu.BACKEND, recorder=device.recorder))
    yield device
    backends.register(cpu.BACKEND)


def loss(params, batch, *, rng):
    w = ft.random.dropout(rng, params["w"], 0.5)
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


def make_step(**options):
    return ft.compose(
        ft.train_step(loss, ft.optim.adamw(ft.schedules.linear(0.1, 0.01, 9))),
        ft.clip(1.0),
        ft.compiled(**{"donate": True, "backend": "eager", **options}),
    )


def make_params():
    return {"w": torch.arange(6.0).reshape(3, 2)}


def make_batches(count, rows=4):
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(count, rows, 5, generator=generator)
    return [{"x": rows_of_batch[:, :3], "y": rows_of_batch[:, 3:]} for rows_of_batch in values]


def train(step, state, batches):
    """Return the state after a step on each batch, and the losses, which are read at the end."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


@functools.cache
def step_without_replay():
    """Return one step for all tests, so that it is captured once."""
    return make_step(replay=False)


def train_without_replay(batches, seed=0):
    step = step_without_replay()
    return train(step, step.init(make_params(), seed=seed), batches)


def test_a_replayed_run_is_the_same_to_the_bit(device):
    """With random numbers, a schedule and batches that change in every step."""
    step = make_step()
    state, losses = train(step, step.init(make_params()), make_batches(6))
    assert (device.recorded, device.replayed) == (1, 5)
    assert_same_bits((state, losses), train_without_replay(make_batches(6)))
    assert len(set(losses.tolist())) == 6
    assert "replay" in repr(step)


def test_fit_replays(device):
    step = make_step(donate=False)
    state, history = ft.fit(step, step.init(make_params()), make_batches(6), progress=False)
    assert (device.recorded, device.replayed) == (1, 5)
    expected, expected_losses = train_without_replay(make_batches(6))
    assert_same_bits(state, expected)
    assert history["loss"] == expected_losses.tolist()
    assert "compiled(whole, donate, replay)" in repr(step)


def test_two_runs_with_one_step_do_not_write_to_each_other(device):
    step = make_step()
    batches = make_batches(6)
    first, second = step.init(make_params()), step.init(make_params(), seed=1)
    for batch in batches[:3]:
        first, _ = step(first, batch)
    for batch in batches[:3]:
        first, _ = step(first, batch)
        second, _ = step(second, batch)
    for batch in batches[3:]:
        second, _ = step(second, batch)
    assert_same_bits(second, train_without_replay(batches, seed=1)[0])
    assert_same_bits(first, train_without_replay([*batches[:3], *batches[:3]])[0])


def test_a_state_in_other_memory_is_recorded_again(device):
    """As a restored state is."""
    step, batches = make_step(), make_batches(6)
    state, _ = train(step, step.init(make_params()), batches[:3])
    copy = tree.clone(state)
    state, _ = train(step, state, batches[3:])
    continued_copy, _ = train(step, copy, batches[3:])
    assert_same_bits(continued_copy, state)
    assert device.recorded == 2


def test_batches_of_every_shape_have_a_recording_of_their_own(device):
    step = make_step()
    batches = [*make_batches(3), *make_batches(3, rows=2), *make_batches(3)]
    assert_same_bits(train(step, step.init(make_params()), batches), train_without_replay(batches))
    assert device.recorded == 2


def test_a_step_that_does_not_donate_is_not_replayed(device):
    step = make_step(donate=False)
    train(step, step.init(make_params()), make_batches(4))
    assert device.recorded == device.replayed == 0


def test_a_step_that_the_device_cannot_record_runs_unrecorded_and_the_log_says_why(device, caplog):
    device.fails = True
    step = make_step()
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        result = train(step, step.init(make_params()), make_batches(5))
    assert_same_bits(result, train_without_replay(make_batches(5)))
    assert [record.getMessage() for record in caplog.records if record.name == "ftrain"] == [
        "compiled: runs without replay, since the device cannot record it: "
        "operation not permitted when stream is capturing"
    ]
    assert "no replay" in repr(step)


def test_after_a_failure_no_other_batch_shape_is_recorded(device):
    device.fails = True
    step = make_step()
    state, _ = train(step, step.init(make_params()), make_batches(3))
    device.fails = False
    train(step, state, make_batches(4, rows=2))
    assert (device.failed, device.recorded) == (1, 0)
    assert "no replay" in repr(step)


def test_replay_on_a_device_that_cannot_is_an_error():
    step = make_step(replay=True)
    with pytest.raises(OptionError, match=r"replay=True, and cpu cannot record and replay graphs"):
        step(step.init(make_params()), make_batches(1)[0])


# The class `ReplayedGraph` itself


@pytest.mark.parametrize(
    "x",
    [torch.arange(12.0).view(3, 4)[:, :3], torch.arange(9.0).view(3, 3).t(), torch.arange(3.0).expand(3, 3)],
    ids=["cut", "transposed", "expanded"],
)
def test_the_slot_of_an_input_has_the_strides_that_the_graph_was_compiled_for(device, x):
    strides = []

    def run(state, x):
        strides.append(x.stride())
        return x.sum(), state.add_(1)

    graph, state = ReplayedGraph(run, 1, [0], StepRecorder(device.recorder())), torch.zeros(())
    sums = [graph(state, x)[0] for _ in range(4)]
    assert (device.recorded, device.replayed) == (1, 3)
    assert set(strides) == {x.stride()}
    assert sums == [x.sum()] * 4


class CountCopies(TorchDispatchMode):
    """Context that counts the launches of copies."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("copy_", "clone", "_foreach_copy_")
        return func(*args, **(kwargs or {}))


def test_a_replay_copies_inputs_and_outputs_of_one_dtype_and_layout_together():
    floats = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).t(), torch.tensor(3.0).expand(2)
    integers = torch.arange(4), torch.arange(5)
    inputs = [*floats, *integers]
    outputs = [torch.zeros_like(tensor) for tensor in inputs]

    def record(work):
        def replay():
            for output, result in zip(outputs, work()[0], strict=True):
                output.copy_(result)

        return replay, outputs

    graph, state = ReplayedGraph(lambda state, *rest: (rest,), 1, [0], StepRecorder(record)), torch.zeros(())
    for _ in range(2):
        graph(state, *inputs)
    # The values change after the recording, except for those that share memory with others.
    for tensor in (floats[0], *integers):
        tensor += 1
    with CountCopies() as copies:
        results = graph(state, *inputs)
    assert_same_bits(results, inputs)
    # One for the floats and one for the integers, into the slots and out of the outputs; `replay` itself copies, too.
    assert copies.count - len(outputs) == 4


def test_a_state_tensor_on_the_host_may_be_another_tensor_in_every_call(device):
    """As the factors of an adjustable optimizer are: a recording reads and writes memory of the device alone."""

    def run(state, on_host, x):
        return x + state.add_(1), on_host

    graph, state = ReplayedGraph(run, 2, [0], StepRecorder(device.recorder())), torch.zeros(())
    for _ in range(4):
        graph(state, torch.zeros(()), torch.ones(()))
    assert (device.recorded, device.replayed) == (1, 3)
