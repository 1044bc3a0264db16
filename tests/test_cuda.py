"""What only a GPU can show: replay with real kernels, and that nothing waits for the device."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.random.torch_ops import Keyed

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, and `make test-gpu`, which shows it"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # A bias before a BatchNorm has no gradient but rounding errors, which Adam would make full steps of.
        self.up, self.norm, self.down = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def criterion(model, batch, *, rng):
    kept = ft.random.dropout(rng, batch, 0.2)
    return (model(kept) ** 2).mean()


def make(*wrappers):
    torch.manual_seed(0)
    optimizer = ft.optim.adamw(ft.schedules.warmup_cosine(1e-2, 3, 30))
    return ft.compose(ft.train_step(ft.from_module(Net(), criterion), optimizer), ft.clip(1.0), ft.ema(0.9), *wrappers)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 8, 16, generator=generator).unbind())


def train(step, data):
    state, losses = step.init(device="cuda"), []
    for batch in data:
        state, metrics = step(state, batch.cuda())
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def test_a_replayed_run_is_the_same_to_the_bit():
    step = make(ft.compiled(donate=True))
    found, losses = train(step, batches(8))
    needed, wanted = train(make(ft.compiled(donate=True, replay=False)), batches(8))
    assert torch.equal(losses, wanted)
    assert len(set(losses.tolist())) == 8
    for a, b in zip(tree.leaves(found), tree.leaves(needed), strict=True):
        assert torch.equal(a, b)
    assert "replay" in repr(step)
    assert "no replay" not in repr(step)


def test_compiled_agrees_with_eager():
    found, losses = train(make(ft.compiled(donate=True)), batches(8))
    needed, wanted = train(make(), batches(8))
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(tree.leaves(found.params), tree.leaves(needed.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "wrappers", [(), (ft.skip_nonfinite(),), (ft.compiled(donate=True),)], ids=["plain", "guarded", "compiled"]
)
def test_nothing_waits_for_the_device_between_two_readings(wrappers):
    """Torch raises at a synchronisation; the one reading is at the end, after the mode is off."""
    step = make(*wrappers)
    state = step.init(device="cuda")
    data = [batch.pin_memory() for batch in batches(12)]
    state, _ = step(state, data[0].cuda())
    state, _ = step(state, data[1].cuda())

    def watched():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield from data[2:]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    _, history = ft.fit(step, state, watched(), log_every=100, progress=False, donate=False)
    assert len(history) == 10


def test_fit_keeps_one_copy_of_the_state():
    step = make(ft.compiled())
    state = step.init(device="cuda")
    addresses = [leaf.data_ptr() for leaf in tree.leaves(state.params)]
    state, _ = ft.fit(step, state, batches(5), progress=False)
    assert [leaf.data_ptr() for leaf in tree.leaves(state.params)] == addresses


def wide(*wrappers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 16))
    loss = ft.from_module(model, lambda model, batch: (model(batch).float() ** 2).mean())
    return ft.compose(ft.train_step(loss, ft.optim.adamw(1e-3)), *wrappers)


@pytest.mark.skipif(
    not torch.cuda.is_available() or not ft.backends.get("cuda").float8(),
    reason="needs a GPU that multiplies in float8 (compute capability 8.9 or MI300)",
)
@pytest.mark.parametrize("more", [(), (ft.compiled(donate=True),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("rows", [64, 50])
def test_float8_trains_as_bf16_does(rows, more):
    pytest.importorskip("torchao")
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(rows, 256, generator=generator) for _ in range(8)]
    found, losses = train(wide(ft.with_amp("fp8"), *more), data)
    needed, wanted = train(wide(ft.with_amp("bf16"), *more), data)
    torch.testing.assert_close(losses, wanted, rtol=0.1, atol=1e-2)
    assert not torch.equal(found.params["0.weight"], needed.params["0.weight"])


def cut(count):
    """Batches that are not contiguous."""
    return [torch.cat([batch, batch[:, :1]], 1)[:, :-1] for batch in batches(count)]


def test_a_recording_reads_batches_of_the_strides_that_they_have():
    step, losses = make(ft.compiled(donate=True)), []
    state = step.init(device="cuda")
    for batch in cut(5):
        device = torch.empty_strided(batch.shape, batch.stride(), device="cuda").copy_(batch)
        state, metrics = step(state, device)
        losses.append(metrics["loss"])
    _, wanted = train(make(ft.compiled(donate=True, replay=False)), batches(5))
    # The kernels for such strides may be others.
    torch.testing.assert_close(torch.stack(losses), wanted, rtol=1e-4, atol=1e-6)


def test_a_state_that_is_restored_is_recorded_again():
    step = make(ft.compiled(donate=True))
    state, _ = train(step, batches(4))
    kept = tree.clone(state)
    for data in (batches(8)[4:], batches(8)[4:]):
        for batch in data:
            state, _ = step(state, batch.cuda())
        again, state = state, tree.clone(kept)
    for batch in batches(8)[4:]:
        state, _ = step(state, batch.cuda())
    for a, b in zip(tree.leaves(again), tree.leaves(state), strict=True):
        assert torch.equal(a, b)


def test_two_steps_have_recordings_that_do_not_disturb_each_other():
    """The first one is dropped while the other replays."""
    first = make(ft.compiled(donate=True))
    train(first, batches(4))
    second = make(ft.compiled(donate=True))
    state = second.init(device="cuda")
    losses = []
    for number, batch in enumerate(batches(8)):
        if number == 4:
            del first
            torch.cuda.empty_cache()
        state, metrics = second(state, batch.cuda())
        losses.append(metrics["loss"])
    _, wanted = train(make(ft.compiled(donate=True, replay=False)), batches(8))
    assert torch.equal(torch.stack(losses), wanted)


def test_a_recording_is_made_while_a_loader_pins_memory():
    data = torch.utils.data.DataLoader(torch.stack(batches(64)).flatten(0, 1), 8, num_workers=1, pin_memory=True)
    step = make(ft.compiled(donate=True))
    ft.fit(step, step.init(device="cuda"), data, progress=False)
    assert "replay" in repr(step)
    assert "no replay" not in repr(step)


@pytest.mark.parametrize("name", ["adamw", "nadam", "radam", "lamb", "adafactor", "schedule_free_adamw"])
def test_no_optimizer_waits_for_the_device(name):
    optimizer = getattr(ft.optim, name)(1e-2)
    step = ft.compose(ft.train_step(ft.from_module(Net(), criterion), optimizer), ft.clip(1.0), ft.skip_nonfinite())
    state, data = step.init(device="cuda"), [batch.cuda() for batch in batches(4)]
    for batch in data[:2]:
        state, _ = step(state, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[2:]:
            state, _ = step(state, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_and_recurrent_nets_with_dropout_draw_from_a_key(dtype):
    """Their fused kernels would draw from the generator of the device."""
    x, net = torch.randn(4, 2, 64, 64, device="cuda", dtype=dtype), nn.LSTM(64, 64, 2, dropout=0.5)
    net.to("cuda", dtype)

    def run():
        with Keyed(ft.random.key(0)) as stream:
            attended = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
            recurred = net(x[:, 0])[0]
            grads = torch.autograd.grad(recurred.sum(), list(net.parameters()))
        return stream.offset, attended, recurred, *grads

    for a, b in zip(run(), run(), strict=True):
        torch.testing.assert_close(a, b)
    assert run()[0] == 2
