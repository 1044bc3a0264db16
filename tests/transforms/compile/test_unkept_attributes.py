"""Attributes of a module that its forward sets, which a compiled step does not keep: the log names them once."""

import pytest
import torch
from torch import nn

import ftrain as ft


class Recurrent(nn.Module):
    """Carries its hidden state from step to step, in a buffer or in an attribute."""

    def __init__(self, *, in_buffer):
        super().__init__()
        self.cell = nn.RNN(2, 3, batch_first=True)
        if in_buffer:
            self.register_buffer("hidden", torch.zeros(1, 4, 3))
        else:
            self.hidden = None

    def forward(self, x):
        output, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return output.square().mean()


@pytest.mark.parametrize(("in_buffer", "wrappers"), [(True, ()), (False, ()), (False, (ft.accumulate(2),))])
def test_the_log_names_an_attribute_once_and_no_buffer(in_buffer, wrappers, caplog):
    loss_fn = ft.from_module(Recurrent(in_buffer=in_buffer), lambda model, batch: model(batch))
    step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), *wrappers, ft.compiled(backend="eager"))
    state = step.init()
    for length in (5, 5, 6):
        state, _ = step(state, torch.ones(4, length, 2))
    lines = [record.getMessage() for record in caplog.records if "the loss sets hidden" in record.getMessage()]
    assert len(lines) == (0 if in_buffer else 1)


def test_the_log_names_a_number(caplog):
    class CountingCalls(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    loss_fn = ft.from_module(CountingCalls(2, 1), lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), ft.compiled(backend="eager"))
    step(step.init(), torch.ones(4, 2))
    assert "the loss sets calls" in caplog.text
