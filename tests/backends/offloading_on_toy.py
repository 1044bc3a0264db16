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
from tests.backends.toy_problem import assert_bitwise, check_adder, differing_leaves

CHECKS = {}
check = check_adder(CHECKS)
WIDTH, BLOCKS = 64, 3
REMAT_AND_OFFLOAD = ft.remat(), ft.offload("activations")


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


def peak_bytes(module, *wrappers, rows=32):
    """Return by how many bytes a step exceeds the memory before it: the least of three, as a thread may free late."""
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
    plain, plain_losses = train("toy")
    for wrappers in (
        (),
        (ft.remat(),),
        (ft.with_amp("bf16"),),
        (ft.accumulate(2), ft.clip(1.0)),
        (ft.update_in_backward(),),
    ):
        # `update_in_backward` changes no bit either.
        changing = [wrapper for wrapper in wrappers if wrapper.name != "update_in_backward"]
        expected, expected_losses = train("toy", *changing) if changing else (plain, plain_losses)
        state, losses = train("toy", *wrappers, ft.offload("activations", min_bytes=0))
        assert losses == expected_losses, wrappers
        assert_bitwise(state, expected)
    assert plain_losses == train("cpu")[1]


@check
def activations_leave_the_device(name, module):
    offload = ft.offload("activations")
    stacks = (), (offload,), (ft.remat(),), REMAT_AND_OFFLOAD
    plain, offloaded, remat, both = (peak_bytes(module, *wrappers, rows=1024) for wrappers in stacks)
    input_bytes = 1024 * WIDTH * 4
    # A block saves its hidden layer, which has four times the bytes of its input, and the mask and result of dropout.
    assert plain - offloaded > 4 * (BLOCKS - 1) * input_bytes
    assert both < remat


@check
def the_state_stays_on_the_host_and_changes_no_bit(name, module):
    plain = train("toy")
    for wrappers in ((), (ft.update_in_backward(),), (ft.ema(0.9), ft.clip(1.0)), (ft.offload("activations"),)):
        # `update_in_backward` changes no bit either.
        changing = [wrapper for wrapper in wrappers if wrapper.name != "update_in_backward"]
        expected, expected_losses = train("toy", *changing) if changing else plain
        state, losses = train("toy", *wrappers, ft.offload("opt_state", min_bytes=0))
        assert losses == expected_losses, wrappers
        assert_bitwise(state, expected)
        devices = {leaf.device.type for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim}
        assert devices == {"cpu"}, devices
        assert {leaf.device.type for leaf in ft.tree.leaves(state.params)} == {"toy"}


@check
def the_state_takes_no_memory_of_the_device(name, module):
    state_bytes = []
    for wrappers in ((), (ft.offload("opt_state"),)):
        # So that tensors of earlier checks are not freed meanwhile.
        gc.collect()
        before = module.current
        state = make(*wrappers).init(device="toy")
        state_bytes.append(module.current - before)
        param_bytes = sum(leaf.nbytes for leaf in ft.tree.leaves(state.params))
        del state
    # AdamW has two moments for each parameter.
    on_device, offloaded = state_bytes
    assert on_device > 2.9 * param_bytes
    assert offloaded < 1.1 * param_bytes


@check
def the_state_stays_in_files(name, module):
    with tempfile.TemporaryDirectory() as directory:
        expected, expected_losses = train("toy")
        state, losses = train("toy", ft.offload("opt_state", directory=directory, min_bytes=0))
        assert all(is_in_file(leaf) for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim)
    assert losses == expected_losses
    assert_bitwise(state, expected)


@check
def a_state_that_is_not_donated_stays(name, module):
    step = make(ft.offload("opt_state", min_bytes=0))
    state = step.init(device="toy")
    copy, batch = ft.tree.clone(state), batches()[0].to("toy")
    new, _ = step(state, batch)
    assert_bitwise(state, copy)
    assert_bitwise(step(state, batch)[0], new)
    assert differing_leaves(new, copy)


@check
def an_offloaded_state_is_saved_and_resumed(name, module):
    with tempfile.TemporaryDirectory() as directory:
        for steps in (2, 3):
            step = make(ft.offload("opt_state", min_bytes=0))
            data = ft.data.loader(ft.data.arrays(torch.cat(batches())), 32, shuffle=False)
            checkpoints = ft.Checkpoints(directory, every=2)
            options = {"steps": steps, "checkpoints": checkpoints, "progress": False}
            state, history = ft.fit(step, step.init(device="toy"), data, **options)
    expected, losses = train("toy")
    devices = {leaf.device.type for leaf in ft.tree.leaves(state.opt_state) if leaf.ndim}
    assert history["loss"] == losses
    assert_bitwise(state, expected)
    assert devices == {"cpu"}


@check
def anatomy_predicts_the_memory_of_an_offloaded_state(name, module):
    step = ft.donated()(make(ft.offload("opt_state", min_bytes=0), ft.offload("activations", min_bytes=0)))
    state, batch = step.init(device="toy"), batches()[0].to("toy")
    anatomy = ft.anatomy(step, state, batch, measure=False)
    assert anatomy.most["optimizer state"] < 0.1 * anatomy.most["parameters"]


@check
def with_streams_copies_run_while_the_device_computes(name, module):
    """The device has no streams: a stand-in logs which stream waits for which, and copies at once."""
    streams = LoggedStreams(module)
    record = backends.get("toy")
    record_stream = torch.Tensor.record_stream
    # Torch's method needs a stream of the device.
    torch.Tensor.record_stream = lambda self, stream: None
    try:
        backends.register(dataclasses.replace(record, copier=lambda: backends.copying.StreamCopier(streams)))
        expected, expected_losses = train("toy")
        for target in ("activations", "opt_state"):
            streams.log.clear()
            state, losses = train("toy", ft.offload(target, min_bytes=0))
            assert losses == expected_losses, target
            assert_bitwise(state, expected)
            assert set(streams.log) >= {"copy waits for compute", "compute waits for copy"}, set(streams.log)
    finally:
        torch.Tensor.record_stream = record_stream
        backends.register(record)
    assert streams.log[-1] == "host waits for copies"


class LoggedStreams:
    """The functions of a device module that concern streams."""

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
