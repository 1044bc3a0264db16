"""Tests that need a GPU: its kernels, replayed graphs, lack of memory, and that no step waits for the device."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.random.torch_ops import Keyed

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and `make test-gpu`, which shows it"),
    # Torch warns of these when Inductor compiles for a GPU.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning"),
    # torchao calls a deprecated function of torch.
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),
]


@contextmanager
def waiting_is_an_error():
    """Make torch raise an error when the host waits for the device."""
    with warnings.catch_warnings():
        # Torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # The gradient of a bias before a BatchNorm is only rounding errors, which Adam would scale up to full steps.
        self.up, self.norm, self.down = nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(torch.tanh(self.norm(self.up(x))))


def criterion(model, batch, *, rng):
    kept = batch if rng is None else ft.random.dropout(rng, batch, 0.2)
    return (model(kept) ** 2).mean()


def make(*wrappers):
    torch.manual_seed(0)
    optimizer = ft.optim.adamw(ft.schedules.warmup_cosine(1e-2, 3, 30))
    return ft.compose(ft.train_step(ft.from_module(Net(), criterion), optimizer), ft.clip(1.0), ft.ema(0.9), *wrappers)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 8, 16, generator=generator).unbind())


def train(step, data, device="cuda"):
    state, losses = step.init(device=device), []
    for batch in data:
        state, metrics = step(state, batch.to(device))
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


@contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_replayed_run_is_the_same_to_the_bit(tmp_path):
    """The other run compiles its own code: under deterministic algorithms Inductor chooses none by measured speed."""
    with deterministic_algorithms():
        step = make(ft.compiled(donate=True))
        state, losses = train(step, batches(8))
        without_replay = make(ft.compiled(donate=True, replay=False, cache_dir=tmp_path))
        expected_state, expected_losses = train(without_replay, batches(8))
    assert torch.equal(losses, expected_losses)
    assert len(set(losses.tolist())) == 8
    for a, b in zip(tree.leaves(state), tree.leaves(expected_state), strict=True):
        assert torch.equal(a, b)
    assert "replay" in repr(step)
    assert "no replay" not in repr(step)


def test_compiled_agrees_with_eager():
    state, losses = train(make(ft.compiled(donate=True)), batches(8))
    expected_state, expected_losses = train(make(), batches(8))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
    for a, b in zip(tree.leaves(state.params), tree.leaves(expected_state.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def test_compiled_blocks_agree_with_uncompiled_ones():
    def make_deep(*wrappers):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Sequential(*(Layer() for _ in range(3))), nn.Linear(16, 4))
        loss = ft.from_module(net, lambda net, batch: net(batch).square().mean())
        return ft.compose(ft.train_step(loss, ft.optim.adamw(1e-3)), ft.accumulate(2), *wrappers, ft.donated())

    for wrappers in ((), (ft.remat(),)):
        state, losses = train(make_deep(*wrappers, ft.compiled(lowering="blocks")), batches(4))
        expected_state, expected_losses = train(make_deep(*wrappers), batches(4))
        torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
        for a, b in zip(tree.leaves(state.params), tree.leaves(expected_state.params), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "wrappers", [(), (ft.skip_nonfinite(),), (ft.compiled(donate=True),)], ids=["plain", "guarded", "compiled"]
)
def test_nothing_waits_for_the_device_between_two_readings(wrappers):
    """`fit` reads the metrics once, after the last batch, when waiting is allowed again."""
    step = make(*wrappers)
    state = step.init(device="cuda")
    data = [batch.pin_memory() for batch in batches(12)]
    state, _ = step(state, data[0].cuda())
    state, _ = step(state, data[1].cuda())

    def batches_while_waiting_is_an_error():
        with waiting_is_an_error():
            yield from data[2:]

    _, history = ft.fit(step, state, batches_while_waiting_is_an_error(), log_every=100, progress=False, donate=False)
    assert len(history) == 10


def test_fit_keeps_one_copy_of_the_state():
    step = make(ft.compiled())
    state = step.init(device="cuda")
    addresses = [leaf.data_ptr() for leaf in tree.leaves(state.params)]
    state, _ = ft.fit(step, state, batches(5), progress=False)
    assert [leaf.data_ptr() for leaf in tree.leaves(state.params)] == addresses


def make_wide(*wrappers):
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
    state, losses = train(make_wide(ft.with_amp("fp8"), *more), data)
    expected_state, expected_losses = train(make_wide(ft.with_amp("bf16"), *more), data)
    torch.testing.assert_close(losses, expected_losses, rtol=0.1, atol=1e-2)
    assert not torch.equal(state.params["0.weight"], expected_state.params["0.weight"])


def strided_batches(count):
    """Return the same batches, not contiguous in memory."""
    return [torch.cat([batch, batch[:, :1]], 1)[:, :-1] for batch in batches(count)]


def test_a_recording_reads_batches_that_are_not_contiguous():
    step, losses = make(ft.compiled(donate=True)), []
    state = step.init(device="cuda")
    for batch in strided_batches(5):
        device = torch.empty_strided(batch.shape, batch.stride(), device="cuda").copy_(batch)
        state, metrics = step(state, device)
        losses.append(metrics["loss"])
    _, expected = train(make(ft.compiled(donate=True, replay=False)), batches(5))
    # For other strides torch may choose other kernels.
    torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-4, atol=1e-6)


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
    with deterministic_algorithms():
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
        _, expected = train(make(ft.compiled(donate=True, replay=False)), batches(8))
    assert torch.equal(torch.stack(losses), expected)


def test_a_recording_is_made_while_a_loader_pins_memory():
    data = torch.utils.data.DataLoader(torch.stack(batches(64)).flatten(0, 1), 8, num_workers=1, pin_memory=True)
    step = make(ft.compiled(donate=True))
    ft.fit(step, step.init(device="cuda"), data, progress=False)
    assert "replay" in repr(step)
    assert "no replay" not in repr(step)


def test_constants_of_a_loss_are_part_of_a_recording():
    """Without a recording the host waits in each step for their copy to the device."""

    def loss(params, batch):
        own = torch.tensor([0.5, 2.0, 1.0]).to(batch.device)
        own.mul_(2)  # Each step has its own.
        positions = torch.arange(3).to(batch.device)
        filled = torch.empty(3, device=batch.device).fill_(torch.tensor(3))
        total = (batch @ params["w"])[:, torch.tensor([2, 0, 1])] * own + positions * filled
        return (total * torch.tensor(1.5)).square().mean(), {"own": own}

    eager = ft.train_step(loss, ft.optim.sgd(1e-3))
    results = []
    for step in (ft.compose(eager, ft.compiled(donate=True)), eager):
        state, losses = step.init({"w": torch.ones(16, 3)}, device="cuda"), []
        for batch in batches(6):
            state, metrics = step(state, batch.cuda())
            losses.append(metrics["loss"])
            assert metrics["own"].tolist() == [1, 4, 2]
            metrics["own"].zero_()
        results.append(torch.stack(losses))
        assert "replay" in repr(step) or step is eager
        assert "no replay" not in repr(step)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "nadam", "radam", "lamb", "adafactor", "schedule_free_adamw"])
def test_no_optimizer_waits_for_the_device(name):
    optimizer = getattr(ft.optim, name)(1e-2)
    step = ft.compose(ft.train_step(ft.from_module(Net(), criterion), optimizer), ft.clip(1.0), ft.skip_nonfinite())
    state, data = step.init(device="cuda"), [batch.cuda() for batch in batches(4)]
    for batch in data[:2]:
        state, _ = step(state, batch)
    with waiting_is_an_error():
        for batch in data[2:]:
            state, _ = step(state, batch)


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


WRAPPERS = {
    "remat": lambda: ft.remat(blocks=["up", "down"]),
    "accumulate": lambda: ft.accumulate(2),
    "sam": lambda: ft.sam(0.05),
    "skip_nonfinite": ft.skip_nonfinite,
    "skip_spikes": lambda: ft.skip_spikes(4.0),
    "offload activations": lambda: ft.offload("activations"),
    "offload opt_state": lambda: ft.offload("opt_state"),
    "empty_cache": lambda: ft.empty_cache(every=2),
}


@pytest.mark.parametrize("more", [(), (ft.compiled(),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_compute_what_they_compute_on_a_cpu(name, more):
    """Dropout is included: a key gives the same numbers on every device."""
    _, actual = train(make(WRAPPERS[name](), *more), batches(6))
    needs_gpu = name.startswith(("offload", "empty_cache"))
    wrappers = () if needs_gpu else (WRAPPERS[name](),)
    _, expected = train(make(*wrappers), batches(6), "cpu")
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-5)


def test_updates_in_the_backward_pass_are_those_of_a_cpu():
    def step():
        return ft.compose(
            ft.train_step(ft.from_module(Net(), criterion), ft.optim.adamw(1e-2)), ft.update_in_backward()
        )

    torch.manual_seed(0)
    _, actual = train(step(), batches(6))
    torch.manual_seed(0)
    _, expected = train(step(), batches(6), "cpu")
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("more", [(), (ft.compiled(),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_trains_as_float32_does(dtype, more):
    step = make(ft.with_amp(dtype), *more)
    state, actual = train(step, batches(6))
    _, expected = train(make(), batches(6))
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=1e-2)
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32}


@pytest.mark.parametrize("more", [(), (ft.compiled(),)], ids=["eager", "compiled"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, more):
    def run(steps, **options):
        step = make(ft.with_amp("bf16"), *more)
        return ft.fit(step, step.init(device="cuda"), batches(12), steps=steps, progress=False, **options)

    # Otherwise Inductor measures which code is fastest, and may choose other code in the next run.
    with deterministic_algorithms():
        expected, _ = run(12)
        run(6, checkpoints=ft.Checkpoints(tmp_path, every=3))
        actual, history = run(12, checkpoints=ft.Checkpoints(tmp_path, every=3))
    assert int(actual.step) == 12
    assert len(history) == 12
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert a.device == b.device
        assert torch.equal(a, b)


class Tokens(nn.Module):
    """A model with an embedding: in its backward pass many threads add to the same row of the gradient."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 64), nn.Linear(64, 8)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


@pytest.mark.parametrize("more", [(), (ft.compiled(),)], ids=["eager", "compiled"])
def test_deterministic_algorithms_give_the_same_bits(more):
    def run():
        torch.manual_seed(0)
        loss = ft.from_module(Tokens(), lambda model, tokens: ft.losses.cross_entropy(model(tokens), tokens))
        step = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2)), *more)
        return train(step, torch.randint(8, (6, 64, 128), generator=torch.Generator().manual_seed(1)).unbind())

    with deterministic_algorithms():
        state, losses = run()
        other_state, other_losses = run()
    assert torch.equal(losses, other_losses)
    for a, b in zip(tree.leaves(state), tree.leaves(other_state), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 4])
def test_parameters_of_one_element_are_part_of_one_graph(width):
    """Inductor fuses what computes the norm into the update of such a parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.PReLU(), nn.Linear(width, 1))
    loss = ft.from_module(model, lambda model, batch: (model(batch) - 1).square().mean())
    eager = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2)), ft.clip(0.1))
    step = ft.compiled(donate=True, lowering="whole")(eager)
    data = [torch.randn(8, 1) for _ in range(5)]
    _, actual = train(step, data)
    _, expected = train(eager, data)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_many_parameters_are_part_of_one_graph():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(60)])

        def forward(self, x):
            return sum((x * part).tanh().sum() for part in self.parts)

    torch.manual_seed(0)
    loss = ft.from_module(Many(), lambda model, batch: model(batch).square())
    eager = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2)), ft.clip(0.1))
    data = [torch.randn(3) for _ in range(4)]
    _, actual = train(ft.compiled(donate=True, lowering="whole")(eager), data)
    _, expected = train(eager, data)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classes", [1000, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_of_a_linear_layer_is_that_of_its_logits(dtype, classes):
    """With 16-bit inputs the matmuls add its gradients in float32; 1001 classes are padded."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64, device="cuda", dtype=dtype), torch.randn(classes, 64, device="cuda")
    inputs, labels = (hidden.requires_grad_(), weight.requires_grad_()), torch.randint(classes, (300,), device="cuda")
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        actual = ft.losses.linear_cross_entropy(hidden, weight, labels, chunk=128, label_smoothing=0.1).total
    logits = hidden.double() @ weight.to(dtype).double().T
    expected = nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    rtol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=0)
    for a, b in zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert (a.double() - b.double()).norm() < rtol * b.double().norm()


def test_a_batch_that_does_not_fit_is_split():
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(512, 512), nn.Tanh())))
    loss = ft.from_module(model, lambda model, batch: ft.losses.mse(model(batch), batch))
    step = ft.train_step(loss, ft.optim.adamw(1e-3))
    state, data = step.init(device="cuda"), [torch.randn(1 << 17, 512) for _ in range(2)]
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.empty_cache()
    # A batch takes 0.27 GB, and the activations of the twelve layers 3.2 GB: more than the 2.5 GB that are left.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5e9) / total)
    try:
        _, history = ft.fit(step, state, data, on_oom="split", progress=False, donate=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert history[0]["split"] > 1
    _, expected = ft.fit(step, state, data, progress=False, donate=False)
    torch.testing.assert_close(torch.tensor(history["loss"]), torch.tensor(expected["loss"]), rtol=1e-4, atol=1e-6)


def test_an_evaluation_gives_what_it_gives_on_a_cpu():
    step = make()
    state, _ = train(step, batches(4))
    host = tree.to(state, "cpu")
    expected = ft.evaluate(ft.eval_step(step.loss), host, batches(4))
    for evaluation in (ft.eval_step(step.loss), ft.compiled()(ft.eval_step(step.loss))):
        assert ft.evaluate(evaluation, state, batches(4)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("more", [(), (ft.compiled(),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_one_rank_connected_by_nccl_computes_what_no_mesh_does(level, more):
    _, actual = train(make(ft.sharded(ft.parallel.mesh(), level=level), *more), batches(4))
    _, expected = train(make(), batches(4))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
