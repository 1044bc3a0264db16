"""`fit` trains with any function `(state, batch) -> (state, metrics)`, also one that calls several Steps."""

import dataclasses
import logging

import pytest
import torch

import ftrain as ft
from ftrain.backends import registry
from tests.training.problem import assert_bitwise, batches, make_step


def gan():
    """Return a plain function that calls two Steps, each with parameters of the other, and its initial state."""

    def generated(params, batch):
        return batch["noise"] * params["scale"] + params["shift"]

    def generator_loss(params, batch):
        return -(batch["critic"] * generated(params, batch)).mean()

    def critic_loss(params, batch):
        return (params["critic"] * (batch["fake"] - batch["real"])).mean() + params["critic"].square().sum()

    generator_step = ft.train_step(generator_loss, ft.optim.sgd(0.1))
    critic_step = ft.train_step(critic_loss, ft.optim.adamw(0.1))

    def step(state, batch):
        noise, real = batch
        generator, critic = state
        fake = generated(generator.params, {"noise": noise})
        critic, critic_metrics = critic_step(critic, {"fake": fake, "real": real})
        generator, generator_metrics = generator_step(generator, {"noise": noise, "critic": critic.params["critic"]})
        return (generator, critic), {"generator": generator_metrics["loss"], "critic": critic_metrics["loss"]}

    generator_state = generator_step.init({"scale": torch.ones(()), "shift": torch.zeros(())})
    state = generator_state, critic_step.init({"critic": torch.ones(())})
    return step, state


def gan_batches():
    return [(x[:, 0], x[:, 1] + 3) for x, _ in batches()]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_that_calls_two_steps(compiled, caplog):
    step, state = gan()
    expected, losses = state, []
    for batch in gan_batches():
        expected, metrics = step(expected, batch)
        losses.append(float(metrics["critic"]))
    with caplog.at_level(logging.WARNING, "ftrain"):
        actual, history = ft.fit(
            ft.compiled(backend="eager")(step) if compiled else step, state, gan_batches(), progress=False
        )
    assert history["step"] == [1, 2, 3, 4]
    assert history["critic"] == losses
    generator, critic = actual
    assert int(generator.step) == int(critic.step) == 4
    assert_bitwise(actual, expected)
    # A function that calls Steps is not compiled, which is logged once.
    assert len(caplog.messages) == (1 if compiled else 0)
    assert all("step runs uncompiled" in message for message in caplog.messages)


def test_the_state_of_a_plain_function_is_not_donated():
    step, state = gan()
    copy = ft.tree.clone(state)
    ft.fit(step, state, gan_batches(), progress=False)
    assert_bitwise(state, copy)


def test_a_plain_function_of_tensors_compiles_and_fits():
    def step(state, batch):
        count, mean = state
        x, _ = batch
        new_mean = mean + (x.mean() - mean) / (count + 1)
        return (count + 1, new_mean), {"mean": new_mean}

    state = torch.zeros(()), torch.zeros(())
    plain = ft.fit(step, state, batches(), progress=False)
    compiled = ft.fit(ft.compiled(backend="eager")(step), state, batches(), progress=False)
    assert compiled.history["mean"] == pytest.approx(plain.history["mean"], rel=1e-6)
    torch.testing.assert_close(plain.state[1], torch.cat([x for x, _ in batches()]).mean())
    assert plain.history["step"] == [1, 2, 3, 4]


def test_batches_go_to_the_device_of_a_state_of_several_states(monkeypatch):
    """Not to that of the first tensor: this is the step of a TrainState, which is on the CPU for every device."""
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    ft.backends.register(dataclasses.replace(ft.backends.get("cpu"), name="meta"))
    devices = []

    def step(state, batch):
        devices.append(batch[0].device.type)
        return state, {}

    train_state = make_step().init({"w": torch.ones(3, device="meta")})
    ft.fit(step, (train_state, train_state), batches(1), progress=False)
    assert devices == ["meta"]
