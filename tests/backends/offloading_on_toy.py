"""Checks of offloading from the device of `toy.py` to its host; `on_toy.py` runs them.

The device has memory of its own that it counts, and no streams.
"""

import dataclasses
import gc
import tempfile

import torch
from torch import nn

import ftrain as ft
from ftrain import backends
from ftrain.backends.transfers import is_in_file
from tests.backends.training_on_toy import differ

CHECKS = {}
WIDTH, BLOCKS = 64, 3
ALL = ft.remat(), ft.offload("activations")


def check(function):
    CHECKS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def make(*wrappers):
    torch.manual_seed(0)
    loss = ft.from_module(nn.Sequential(*(Block() for _ in range(BLOCKS))), lambda model, x: model(x).square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2, weight_decay=0.1)), *wrappers)


def batches(count=3, rows=32):
    return list(torch.randn(count, rows, WIDTH, generator=torch.Generator().manual_seed(1)).unbind())


def train(device, *wrappers, rows=32):
    step = make(*wrappers)
    state, history = ft.fit(step, step.init(device=device), batches(rows=rows), progress=False)
    return state, history["loss"]


def most(module, *wrappers, rows=32):
    """Bytes on the device at most in a step, beyond those before; the least of three, for threads may free late."""
    step = ft.donated()(make(*wrappers))
    batch = batches(rows=rows)[0].to("toy")
    state, _ = step(step.init(device="toy"), batch)
    peaks = []
    for _ in range(3):
        gc.collect()
        before = module.peak = module.current
        state, _ = step(state, batch)
        peaks.append(module.peak - before)
    return min(peaks)


@check
def activations_change_no_bit(name, module):
    plain = train("toy")
    for more in (
        (),
        (ft.remat(),),
        (ft.with_amp("bf16"),),
        (ft.accumulate(2), ft.clip(1.0)),
        (ft.update_in_backward(),),
    ):
        expected = train("toy", *(each for each in more if each.name != "update_in_backward")) if more else plain
        actual = train("toy", *more, ft.offload("activations", min_bytes=0))
        assert (actual[1], differ(actual[0], expected[0])) == (expected[1], []), more
    return plain[1] == train("cpu")[1]


@check
def activations_leave_the_device(name, module):
    offload = ft.offload("activations")
    plain, some, remat, both = (most(module, *each, rows=1024) for each in ((), (offload,), (ft.remat(),), ALL))
    block = 1024 * WIDTH * 4
    # A block keeps four times its input inside, and a mask and what dropout has made; without remat nothing is left.
    return plain - some > 4 * (BLOCKS - 1) * block and both < remat


@check
def the_state_lives_on_the_host_and_changes_no_bit(name, module):
    plain, losses = train("toy")
    for more in ((), (ft.update_in_backward(),), (ft.ema(0.9), ft.clip(1.0)), (ft.offload("activations"),)):
        expected = train("toy", *more) if more and more[0].name != "update_in_backward" else (plain, losses)
        state, actual = train("toy", *more, ft.offload("opt_state", min_bytes=0))
        assert (actual, differ(state, expected[0])) == (expected[1], []), more
        where = {leaf.device.type for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim}
        assert where == {"cpu"}, where
        assert {leaf.device.type for leaf in ft.tree.leaves(state.params)} == {"toy"}
    return True


@check
def the_state_takes_no_memory_of_the_device(name, module):
    held = []
    for wrappers in ((), (ft.offload("opt_state"),)):
        # What earlier checks have left is not freed meanwhile.
        gc.collect()
        before = module.current
        state = make(*wrappers).init(device="toy")
        held.append(module.current - before)
        weights = sum(leaf.nbytes for leaf in ft.tree.leaves(state.params))
        del state
    return held[0] > 2.9 * weights and held[1] < 1.1 * weights


@check
def the_state_lives_in_files(name, module):
    with tempfile.TemporaryDirectory() as directory:
        plain, losses = train("toy")
        state, actual = train("toy", ft.offload("opt_state", directory=directory, min_bytes=0))
        assert all(is_in_file(leaf) for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim)
    return actual == losses and not differ(state, plain)


@check
def a_state_that_is_not_donated_stays(name, module):
    step = make(ft.offload("opt_state", min_bytes=0))
    state = step.init(device="toy")
    kept, batch = ft.tree.clone(state), batches()[0].to("toy")
    new, _ = step(state, batch)
    return not differ(state, kept) and not differ(step(state, batch)[0], new) and bool(differ(new, kept))


@check
def it_is_saved_and_resumed(name, module):
    with tempfile.TemporaryDirectory() as directory:
        for steps in (2, 3):
            step = make(ft.offload("opt_state", min_bytes=0))
            data = ft.data.loader(ft.data.arrays(torch.cat(batches())), 32, shuffle=False)
            checkpoints = ft.Checkpoints(directory, every=2)
            options = {"steps": steps, "checkpoints": checkpoints, "progress": False}
            state, history = ft.fit(step, step.init(device="toy"), data, **options)
    expected, losses = train("toy")
    where = {leaf.device.type for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim}
    return history["loss"] == losses and not differ(state, expected) and where == {"cpu"}


@check
def it_is_predicted(name, module):
    step = ft.donated()(make(ft.offload("opt_state", min_bytes=0), ft.offload("activations", min_bytes=0)))
    state, batch = step.init(device="toy"), batches()[0].to("toy")
    actual = ft.anatomy(step, state, batch, measure=False)
    return actual.most["optimizer state"] < 0.1 * actual.most["parameters"]


@check
def copies_run_beside_what_is_computed_where_there_are_streams(name, module):
    """The device has none; a stand-in notes who waits for whom, and copies at once."""
    streams = Recorded(module)
    record = backends.get("toy")
    record_stream = torch.Tensor.record_stream
    # The device has no notion of them.
    torch.Tensor.record_stream = lambda self, stream: None
    try:
        backends.register(dataclasses.replace(record, copier=lambda: backends.copying.StreamCopier(streams)))
        expected = train("toy")
        for what in ("activations", "opt_state"):
            streams.log.clear()
            actual = train("toy", ft.offload(what, min_bytes=0))
            assert (actual[1], differ(actual[0], expected[0])) == (expected[1], []), what
            assert set(streams.log) >= {"copy waits for compute", "compute waits for copy"}, set(streams.log)
    finally:
        torch.Tensor.record_stream = record_stream
        backends.register(record)
    return streams.log[-1] == "host waits for copies"


class Recorded:
    """What of the module of a device has to do with streams."""

    def __init__(self, module):
        self.module, self.log = module, []

    def Stream(self):  # noqa: N802
        return Stream(self.log)

    def current_stream(self):
        return Stream(self.log)

    def stream(self, stream):
        return stream


class Stream:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, other):
        self.log.append("copy waits for compute")

    def record_event(self):
        return object()

    def wait_event(self, event):
        self.log.append("compute waits for copy")

    def synchronize(self):
        self.log.append("host waits for copies")
