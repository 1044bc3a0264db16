"""Steps that are compiled in several threads at once."""

import threading

import torch
from torch import nn

import ftrain as ft

SECONDS = 0.5
"""How long the first thread gives the second one to begin while it is tracing."""


def train(loss):
    """Compile a step of a linear layer, make two steps, and return their losses."""
    step = ft.compose(
        ft.train_step(ft.from_module(nn.Linear(2, 1), loss), ft.optim.sgd(0.1)), ft.compiled(backend="aot_eager")
    )
    state = step.init()
    losses = []
    for batch in torch.ones(2, 3, 2):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses


def squares(model, batch):
    return model(batch).square().mean()


def test_threads_that_compile_at_once_do_not_disturb_each_other(caplog):
    """Torch's tracing replaces `nn.Module.__call__` for all threads, and expects that no other thread does."""
    original = nn.Module.__call__
    second_traces, first_is_done = threading.Event(), threading.Event()

    def first_loss(model, batch):
        second_traces.wait(SECONDS)
        return squares(model, batch)

    def second_loss(model, batch):
        second_traces.set()
        first_is_done.wait(10 * SECONDS)
        return squares(model, batch)

    def first():
        losses.append(train(first_loss))
        first_is_done.set()

    def second():
        losses.append(train(second_loss))

    train(squares)  # Imports what compiles, which would take longer than `SECONDS`.
    losses = []
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 2
    assert nn.Module.__call__ is original
    messages = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert not [text for text in messages if "split into" in text or "runs eagerly" in text]


def test_a_split_step_runs_while_another_thread_captures():
    is_capturing, has_run = threading.Event(), threading.Event()

    def slow_loss(params, batch):
        is_capturing.set()
        has_run.wait(10 * SECONDS)
        return (params * batch).square().mean()

    def make_step(loss, lowering):
        return ft.compiled(lowering=lowering, backend="aot_eager")(ft.train_step(loss, ft.optim.sgd(0.1)))

    params, batch = torch.ones(2), torch.ones(2)
    split = make_step(lambda params, batch: (params * batch).mean(), "split")
    state, _ = split(split.init(params), batch)
    captured = make_step(slow_loss, "whole")
    thread = threading.Thread(target=lambda: captured(captured.init(params), batch))
    thread.start()
    is_capturing.wait(10 * SECONDS)
    try:
        _, metrics = split(state, batch)
    finally:
        has_run.set()
        thread.join()
    torch.testing.assert_close(metrics["loss"], torch.tensor(0.95))
