"""What `fit` warns of when it continues from a checkpoint."""

import warnings

import pytest
import torch

import ftrain as ft


def loss(params, batch):
    return (batch @ params["w"]).square().mean()


def run(directory, steps, optimizer, *wrappers):
    step = ft.compose(ft.train_step(loss, optimizer), *wrappers)
    state, data = step.init({"w": torch.ones(2)}), [torch.ones(4, 2)] * 8
    checkpoints = ft.Checkpoints(directory, every=1)
    return ft.fit(step, state, data, steps=steps, checkpoints=checkpoints, progress=False)


def test_another_pipeline_is_named_once(tmp_path):
    rate = ft.schedules.cosine(1e-2, 8)
    run(tmp_path, 2, ft.optim.adamw(rate), ft.clip(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, 3, ft.optim.adamw(rate), ft.clip(1.0), ft.donated())
        run(tmp_path, 4, ft.optim.adamw(rate), ft.clip(1.0), ft.compiled(backend="eager"))
    with pytest.warns(UserWarning, match="another pipeline has saved") as caught:
        run(tmp_path, 5, ft.optim.lamb(lambda step: 1e-3), ft.clip(1.0), ft.sam(0.1))
    (message,) = [str(each.message) for each in caught]
    assert [line[2:5] for line in message.splitlines()[1:]] == ["- a", "+ l", "+ s"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, 6, ft.optim.lamb(lambda step: 1e-3), ft.clip(1.0), ft.sam(0.1))
