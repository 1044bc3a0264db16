"""Parameters that train from the middle of a run on: as after `add_param_group` of torch."""

import copy
from dataclasses import replace

import torch

import ftrain as ft
from tests.parity.fifty_steps import TIGHT
from tests.parity.loop_by_hand import assert_same_model, criterion, make_batches, make_mlp, run, seeded


def test_the_moments_of_the_head_go_on_when_the_rest_is_unfrozen():
    model, batches = seeded(make_mlp), make_batches("mlp", steps=20)
    theirs = copy.deepcopy(model)
    head, rest = [*theirs[4].parameters()], [*theirs[:4].parameters()]
    adamw = torch.optim.AdamW(head, lr=1e-2, weight_decay=0.0)
    expected = []
    for index, batch in enumerate(batches):
        if index == 10:
            adamw.add_param_group({"params": rest, "lr": 1e-3})
        theirs.zero_grad()
        loss = criterion(theirs, batch)
        loss.backward()
        adamw.step()
        expected.append(loss.detach())

    loss_fn, parts, names = ft.from_module(model, criterion), {"head": ft.optim.adamw(1e-2)}, {"head": ["4.*"]}
    first = ft.train_step(loss_fn, ft.optim.partition(parts, names), trainable=["4.*"])
    state, losses = run(first, first.init(), batches[:10])
    parts["rest"] = ft.optim.adamw(1e-3)
    second = ft.train_step(loss_fn, ft.optim.partition(parts, names))
    ft.to_module(model, state)
    new = second.init()
    new = replace(new, step=state.step, opt_state={**new.opt_state, **state.opt_state})
    state, more = run(second, new, batches[10:])
    torch.testing.assert_close([*losses, *more], expected, **TIGHT)
    assert_same_model(theirs, state)
