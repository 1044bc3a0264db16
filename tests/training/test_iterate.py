"""`ft.iterate` yields the state, the batch and the metrics of each step."""

import weakref

import torch

import ftrain as ft
from tests.training.problem import assert_bitwise, batches, make_step, params, train_by_hand


def test_iterate_yields_after_each_step():
    step, data = make_step(), batches(3)
    records = list(ft.iterate(step, step.init(params()), data, steps=5))
    expected, losses = train_by_hand(step, [*data, *data[:2]])
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [float(record.metrics["loss"]) for record in records] == losses
    assert_bitwise(records[-1].state, expected)
    assert torch.equal(records[3].batch[0], data[0][0])


def test_iterate_does_not_donate_a_state():
    step = make_step()
    records = list(ft.iterate(step, step.init(params()), batches()))
    # All states are still there, and can be read.
    assert [int(record.state.step) for record in records] == [1, 2, 3, 4]
    assert len({float(record.state.params["w"].norm()) for record in records}) == 4


def test_a_loop_may_break_and_go_on_with_the_donated_state():
    step = ft.donated(make_step())
    for record in ft.iterate(step, step.init(params()), batches(), epochs=10):
        if record.step == 6:
            break
    steps = [following.step for following in ft.iterate(step, record.state, batches(), steps=7)]
    assert steps == [7]


def test_iterate_continues_in_the_middle_of_a_pass():
    def make_loader():
        x, y = (torch.cat(column) for column in zip(*batches(6), strict=True))
        return ft.data.loader(ft.data.arrays((x, y)), 4, seed=1)

    step, loader = make_step(), make_loader()
    for record in ft.iterate(step, step.init(params()), loader):
        if record.step == 2:
            break
    *_, last = ft.iterate(step, record.state, loader)
    expected, _ = train_by_hand(step, make_loader())
    assert last.step == 6
    assert_bitwise(last.state, expected)


def test_a_state_that_was_replaced_is_freed():
    step = make_step()
    records = ft.iterate(step, step.init(params()), batches(), steps=2)
    record = next(records)
    replaced = weakref.ref(record.state.params["w"])
    records.send(ft.tree.clone(record.state))
    del record
    assert replaced() is None
