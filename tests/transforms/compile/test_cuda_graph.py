"""Recording and replaying, on a device that is made up: it records a function instead of kernels.

Like a real one it executes nothing while it records, works on the addresses that it saw, and writes
the same outputs in every replay. What it cannot show is whether CUDA records the kernels themselves.
"""

import dataclasses
import functools
import logging
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import backends, tree
from ftrain.backends import cpu
from ftrain.errors import OptionError
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.cuda_graph import ReplayedGraph, StepRecorder
from ftrain.transforms.compile.host_constants import move_constants
from ftrain.transforms.compile.settings import Compiler, _why_not_recorded


class Device:
    """Counts what it records and replays."""

    def __init__(self, fails=False):
        self.recorded, self.replayed, self.failed, self.fails = 0, 0, 0, fails

    def recorder(self):
        def record(work):
            if self.fails:
                self.failed += 1
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            self.recorded += 1
            outputs = []

            def replay():
                self.replayed += 1
                for kept, new in zip(outputs, work(), strict=True):
                    kept.copy_(new)

            # The shapes of the outputs, as memory that every replay writes.
            outputs.extend(torch.zeros(()) for _ in range(OUTPUTS))
            return replay, outputs

        return record


OUTPUTS = 2


@pytest.fixture
def device():
    made = Device()
    backends.register(dataclasses.replace(cpu.BACKEND, recorder=made.recorder))
    yield made
    backends.register(cpu.BACKEND)


def loss(params, batch, *, rng):
    kept = ft.random.dropout(rng, params["w"], 0.5)
    return ((batch["x"] @ kept - batch["y"]) ** 2).mean()


def make(**options):
    options = {"donate": True, "backend": "eager", **options}
    return ft.compose(
        ft.train_step(loss, ft.optim.adamw(ft.schedules.linear(0.1, 0.01, 9))),
        ft.clip(1.0),
        ft.compiled(**options),
    )


def params():
    return {"w": torch.arange(6.0).reshape(3, 2)}


def batches(count, rows=4):
    generator = torch.Generator().manual_seed(0)
    made = torch.rand(count, rows, 5, generator=generator)
    return [{"x": each[:, :3], "y": each[:, 3:]} for each in made]


def train(step, state, data):
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def same(actual, expected):
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert torch.equal(a, b)


@functools.cache
def not_replayed():
    """Captured once for the tests that compare with it."""
    return make(replay=False)


def plain(data, seed=0):
    return train(not_replayed(), not_replayed().init(params(), seed=seed), data)


def test_a_replayed_run_is_the_same_to_the_bit(device):
    """Random numbers, the schedule, batches and losses that are read at the end included."""
    step = make()
    actual = train(step, step.init(params()), batches(6))
    assert (device.recorded, device.replayed) == (1, 5)
    same(actual, plain(batches(6)))
    assert len(set(actual[1].tolist())) == 6
    assert "replay" in repr(step)


def test_fit_replays(device):
    step = make(donate=False)
    state, history = ft.fit(step, step.init(params()), batches(6), progress=False)
    assert (device.recorded, device.replayed) == (1, 5)
    expected, losses = plain(batches(6))
    same(state, expected)
    assert history["loss"] == losses.tolist()
    assert "compiled(whole, donate, replay)" in repr(step)


def test_a_state_of_one_s_own_keeps_its_memory(device):
    """Two runs with one step: neither writes what belongs to the other."""
    step = make()
    data = batches(6)
    first, second = step.init(params()), step.init(params(), seed=1)
    for batch in data[:3]:
        first, _ = step(first, batch)
    for batch in data[:3]:
        first, _ = step(first, batch)
        second, _ = step(second, batch)
    for batch in data[3:]:
        second, _ = step(second, batch)
    same(second, plain(data, seed=1)[0])
    same(first, plain([*data[:3], *data[:3]])[0])


def test_a_restored_state_is_recorded_in_its_turn(device):
    step = make()
    state, _ = train(step, step.init(params()), batches(3))
    kept = tree.clone(state)
    state, _ = train(step, state, batches(6)[3:])
    again, _ = train(step, kept, batches(6)[3:])
    same(again, state)
    assert device.recorded == 2


def test_batches_of_other_shapes_have_recordings_of_their_own(device):
    step = make()
    data = [*batches(3), *batches(3, rows=2), *batches(3)]
    actual = train(step, step.init(params()), data)
    same(actual, plain(data))
    assert device.recorded == 2


def test_a_step_that_does_not_donate_is_not_replayed(device):
    step = make(donate=False)
    train(step, step.init(params()), batches(4))
    assert device.recorded == device.replayed == 0


def test_what_cannot_be_recorded_runs_as_it_is_and_says_why(device, caplog):
    device.fails = True
    step = make()
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        actual = train(step, step.init(params()), batches(5))
    same(actual, plain(batches(5)))
    assert [record.getMessage() for record in caplog.records if record.name == "ftrain"] == [
        "compiled: runs without replay, since the device cannot record it: "
        "operation not permitted when stream is capturing"
    ]
    assert "no replay" in repr(step)


def test_after_a_failure_no_other_batch_shape_is_recorded(device):
    device.fails = True
    step = make()
    state, _ = train(step, step.init(params()), batches(3))
    device.fails = False
    train(step, state, batches(4, rows=2))
    assert (device.failed, device.recorded) == (1, 0)
    assert "no replay" in repr(step)


@pytest.mark.parametrize(
    "batch",
    [torch.arange(12.0).view(3, 4)[:, :3], torch.arange(9.0).view(3, 3).t(), torch.arange(3.0).expand(3, 3)],
    ids=["cut", "transposed", "expanded"],
)
def test_what_is_recorded_reads_inputs_of_the_strides_that_it_was_compiled_for(device, batch):
    strides = []

    def run(state, given):
        strides.append(given.stride())
        return given.sum(), state.add_(1)

    graph, state = ReplayedGraph(run, 1, [0], StepRecorder(device.recorder())), torch.zeros(())
    sums = [graph(state, batch)[0] for _ in range(4)]
    assert (device.recorded, device.replayed) == (1, 3)
    assert set(strides) == {batch.stride()}
    assert [each.item() for each in sums] == 4 * [batch.sum().item()]


class Copies(TorchDispatchMode):
    """Context that counts the launches of copies."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("copy_", "clone", "_foreach_copy_")
        return func(*args, **(kwargs or {}))


def test_a_replay_copies_inputs_and_outputs_of_one_kind_together():
    floats = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).t(), torch.tensor(3.0).expand(2)
    given = [*floats, torch.arange(4), torch.arange(5)]
    outputs = [torch.zeros_like(each) for each in given]

    def recorder(work):
        def replay():
            for output, result in zip(outputs, work()[0], strict=True):
                output.copy_(result)

        return replay, outputs

    graph, state = ReplayedGraph(lambda state, *rest: (rest,), 1, [0], StepRecorder(recorder)), torch.zeros(())
    for _ in range(2):
        graph(state, *given)
    for each in (*floats[:1], *given[3:]):
        each += 1
    with Copies() as copies:
        actual = graph(state, *given)
    same(list(actual), given)
    assert copies.count - len(outputs) == 4


def test_a_value_that_the_host_keeps_may_be_another_tensor(device):
    """As the factors of an adjustable optimizer are: a recording reads and writes memory of the device alone."""
    run = lambda state, host, given: (given + state.add_(1), host)  # noqa: E731
    graph, state = ReplayedGraph(run, 2, [0], StepRecorder(device.recorder())), torch.zeros(())
    for _ in range(4):
        graph(state, torch.zeros(()), torch.ones(()))
    assert (device.recorded, device.replayed) == (1, 3)


def test_a_graph_that_reads_a_host_tensor_is_not_recorded():
    """Its value would be recorded, not its address."""

    def captured(*args):
        graph = torch.fx.Graph()
        nodes = [graph.placeholder(f"input{number}") for number, _ in enumerate(args)]
        used = [node for node, is_used in zip(nodes, args, strict=True) if is_used]
        graph.output([graph.call_function(torch.ops.aten.neg.default, (node,)) for node in used])
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    there, host = torch.empty((), device="meta"), torch.zeros(())
    record = dataclasses.replace(cpu.BACKEND, recorder=lambda: None)
    assert _why_not_recorded(captured(True, False), [there, host], record) == ""
    assert "reads a tensor on cpu" in _why_not_recorded(captured(True, True), [there, host], record)


NUMBER, TABLE, ROWS = torch.tensor(2.0), torch.arange(3.0), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x * torch.tensor([1.0, 2.0, 3.0]).to(x.device), ""),
        (lambda x: x * torch.arange(3.0).add(1).to(x.device), ""),
        (lambda x: x * torch.rand(3).to(x.device), r"_to_copy\.default .* on cpu .* one on meta"),
        (lambda x: x * TABLE.to(x.device), "_to_copy.* make what it reads on meta before the step"),
        (lambda x: x.sum().cpu(), r"_to_copy\.default .* on meta .* one on cpu"),
        (lambda x: x[torch.tensor([0, 1])], ""),
        (lambda x: x[ROWS], r"index\.Tensor"),
        (lambda x: x * NUMBER, r"mul\.Tensor"),
        (lambda x: x * torch.tensor(2.0), ""),
        (lambda x: x * torch.full((3,), 2.0, device=x.device), ""),
        (lambda x: torch.topk(x, 2).values, ""),
    ],
    ids=["made", "range", "drawn", "table", "returned", "index", "rows", "closure", "number", "full", "pair"],
)
def test_a_graph_that_copies_between_host_and_device_is_not_recorded(function, why):
    """Nor one that reads a scalar of the host that may change: its value would be recorded. Constants are moved."""
    there = torch.empty(3, device="meta")
    captured = capture.capture(lambda x: [function(x)], [there], lambda: None)
    move_constants(captured, there.device)
    record = dataclasses.replace(cpu.BACKEND, recorder=lambda: None)
    actual = _why_not_recorded(captured, [there], record)
    assert re.search(why, actual) if why else actual == ""


def by_item():
    made = torch.ones(3)
    made[0] = 2.0
    return made


def by_view():
    made = torch.tensor([1.0, 2.0, 3.0])
    made[1:].mul_(2)
    return made


def by_other_view():
    made = torch.zeros(4)
    read, written = made[:3], made.view(2, 2)[0]
    written.copy_(torch.arange(1.0, 3.0))
    return read


def by_list():
    made = torch.ones(3)
    torch._foreach_mul_([made, torch.ones(3)], 2.0)
    return made


def by_view_in_list():
    made = torch.ones(3)
    torch._foreach_mul_([made[:1], made[2:]], 2.0)
    return made


def by_out():
    made = torch.zeros(4)
    torch.add(torch.ones(3), torch.arange(3.0), out=made[:3])
    return made


@pytest.mark.parametrize(
    "make", [by_item, by_view, by_other_view, by_list, by_view_in_list, by_out], ids=lambda f: f.__name__
)
def test_what_is_changed_in_place_on_the_host_is_no_constant(make):
    """Nor is what it is a view of, or what is a view of it; another constant is."""
    there = torch.empty(3, device="meta")
    captured = capture.capture(
        lambda x: [make().sum() * 1, x * make()[:3].to(x.device) * torch.arange(3.0).to(x.device)],
        [there],
        lambda: None,
    )
    move_constants(captured, there.device)
    written, expected = captured(there)[0], make().sum()
    assert torch.equal(written, expected)
    moved = [node for node in captured.graph.nodes if node.op == "get_attr" and "on_device" in str(node.target)]
    assert len(moved) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups_are_recorded_in_bfloat16_alone(dtype):
    """In other dtypes the kernel reads on the host where the groups end."""
    x, weights = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((16, 16), (2, 16, 16)))
    ends = torch.empty(2, dtype=torch.int32, device="meta")
    product = lambda x, weights, ends: [torch.nn.functional.grouped_mm(x, weights, offs=ends)]  # noqa: E731
    captured = capture.capture(product, [x, weights, ends], lambda: None)
    record = dataclasses.replace(cpu.BACKEND, recorder=lambda: None)
    why = _why_not_recorded(captured, [x, weights, ends], record)
    assert ("give it tensors in bfloat16" in why) == (dtype == torch.float32), why


def test_deterministic_algorithms_measure_no_code():
    """On the CPU ftrain asks for them itself, and Inductor measures nothing by default."""
    compiler = Compiler("inductor", {}, True, False, None, None, 8)
    places = [torch.device("meta"), torch.device("cpu")]
    assert not any("deterministic" in compiler.options_for(place) for place in places)
    torch.use_deterministic_algorithms(True)
    try:
        assert compiler.options_for(places[0])["deterministic"] is True
        assert "deterministic" not in compiler.options_for(places[1])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_graph_that_sends_to_other_ranks_is_not_recorded():
    """All ranks would have to record and replay together, and a process group waits for its recordings to be gone."""
    graph = torch.fx.Graph()
    sends = torch.ops._c10d_functional.all_reduce.default
    graph.output((graph.call_function(sends, (graph.placeholder("x"), "sum", "0")),))
    record = dataclasses.replace(cpu.BACKEND, recorder=lambda: None)
    captured = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert "cannot agree" in _why_not_recorded(captured, [torch.zeros(())], record)


def test_replay_where_there_is_none_is_an_error():
    step = make(replay=True)
    with pytest.raises(OptionError, match=r"replay=True, and cpu cannot record and replay graphs"):
        step(step.init(params()), batches(1)[0])
