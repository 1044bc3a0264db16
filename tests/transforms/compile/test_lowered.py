"""`Step.lower` reports the lowering, the graphs, the nodes, the breaks and the peak memory of a compiled step."""

import logging

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

import ftrain as ft
from ftrain.errors import ComposeError, TraceError
from ftrain.transforms.compile.capture import capture
from ftrain.transforms.compile.lowered import count_nodes, peak_bytes
from tests.bits import assert_same_bits

KIB = 1024


def captured(function, *inputs):
    return capture(function, inputs, lambda: None)


def floats_of_kib(count):
    """Return a float32 vector of `count` KiB."""
    return torch.ones(count * KIB // 4)


def test_a_result_lives_until_it_is_read_for_the_last_time():
    def function(x):
        a = x + 1  # 1 KiB
        b = a * 2  # 2 KiB, and a is freed.
        c = b * 3  # 2 KiB, and b is freed.
        return [c]

    graph = captured(function, floats_of_kib(1))
    assert peak_bytes(graph) == 2 * KIB
    assert count_nodes(graph) == {"mul": 2, "add": 1}


def test_a_result_that_is_read_late_is_kept_until_then():
    def function(x):
        early = x + 1
        product = x
        for _ in range(5):
            product = product * 2
        return [product + early]

    assert peak_bytes(captured(function, floats_of_kib(1))) == 3 * KIB


def test_a_view_keeps_its_storage_and_takes_none():
    def function(x):
        first_element = (x + 1)[:1]
        return [(x * 2).sum() + first_element.sum()]

    # Two full results, because the view keeps the first one, and two or three scalars.
    assert 2 * KIB <= peak_bytes(captured(function, floats_of_kib(1))) <= 2 * KIB + 3 * 4


def test_inputs_do_not_count_even_if_written_in_place():
    def function(x):
        x.add_(1)
        return [x.view(2, -1)]

    assert peak_bytes(captured(function, floats_of_kib(64))) == 0


BLOCKS = 4


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def mean_square(model, batch):
    return (model(batch) ** 2).mean()


def reads_a_value(model, batch):
    loss = mean_square(model, batch)
    return loss * 2 if loss.item() > 1e9 else loss


def make_step(*wrappers, criterion=mean_square, blocks=BLOCKS, **options):
    torch.manual_seed(0)
    step = ft.train_step(ft.from_module(Net(blocks), criterion), ft.optim.sgd(0.1))
    return ft.compose(step, *wrappers, ft.compiled(backend="eager", **options))


BATCH = torch.ones(512, 32)


def test_the_whole_step_is_one_graph():
    step = make_step()
    state = step.init()
    lowered = step.lower(state, BATCH)
    assert (lowered.lowering, lowered.graphs, lowered.breaks) == ("whole", 1, ())
    # Each of the two layers of a block has its output and two gradients; the batch needs no gradient.
    assert lowered.nodes["mm"] + lowered.nodes["addmm"] == 3 * 2 * BLOCKS - 1
    # Each block keeps at least an activation of 64 and one of 32 float32 numbers for each of 512 rows.
    assert lowered.peak_bytes > BLOCKS * 512 * (64 + 32) * 4
    assert "1 graph" in repr(lowered)
    assert "MiB" in repr(lowered)


def test_rematerialising_lowers_the_peak():
    plain, rematerialised = make_step(blocks=6), make_step(ft.remat(), blocks=6)
    state = plain.init()
    assert rematerialised.lower(state, BATCH).peak_bytes < plain.lower(state, BATCH).peak_bytes * 0.6


def test_lowering_compiles_and_changes_nothing():
    step = make_step(donate=True)
    state = step.init()
    before = ft.tree.clone(state)
    step.lower(state, BATCH)
    assert "compiled(whole, donate)" in repr(step)
    assert_same_bits(state, before)
    state, _ = step(state, BATCH)
    assert int(state.step) == 1


# Torch's own code gives this warning when it goes on after the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_split_step_reports_where_its_graph_breaks(caplog):
    step = make_step(criterion=reads_a_value)
    state = step.init()
    before = ft.tree.clone(state)
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        lowered = step.lower(state, BATCH)
    assert (lowered.lowering, lowered.peak_bytes) == ("split", None)
    assert lowered.graphs > 2
    (reason,) = lowered.breaks
    assert "item()" in reason
    assert "test_lowered.py" in reason
    assert "break     " in repr(lowered)
    # The log and the printed step say so too.
    assert any("compiled: split" in message and "test_lowered.py" in message for message in caplog.messages)
    assert "compiled(split)  # the value of a tensor is needed" in repr(step)
    assert_same_bits(state, before)


def test_a_graph_break_raises_with_fullgraph_or_a_whole_graph():
    step = make_step(criterion=reads_a_value, lowering="split", fullgraph=True)
    with pytest.raises(TorchDynamoException, match="item"):
        step(step.init(), BATCH)
    step = make_step(criterion=reads_a_value, lowering="whole")
    with pytest.raises(TraceError, match="cannot be captured as one graph"):
        step.lower(step.init(), BATCH)


def test_a_step_that_is_not_compiled_cannot_be_lowered():
    step = ft.train_step(lambda params, batch: params.sum(), ft.optim.sgd(0.1))
    with pytest.raises(ComposeError, match=r"Step\.lower: the step has no graph to report; use ft\.compiled"):
        step.lower(step.init(torch.ones(2)), None)
