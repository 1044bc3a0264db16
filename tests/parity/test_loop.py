"""Fifty steps equal those of a torch training loop written by hand, in float64 where the feature allows it."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import random, tree
from ftrain.transforms.amp import loss_scale as amp
from ftrain.types import Mean

STEPS = 50
F64 = torch.float64
# The absolute part is for parameters that cross zero: a few units in the last place of numbers about 1.
TIGHT = {"rtol": 1e-12, "atol": 1e-14}
# Where sums are taken in another order: the rounding difference of the first step grows in the next_step ones.
REORDERED = {"rtol": 1e-12, "atol": 1e-13}

CLASSES = 3
WAYS = {
    "eager": lambda: (),
    "donated": lambda: (ft.donated(),),
    "compiled": lambda: (ft.compiled(backend="eager"),),
}


class Conv(nn.Module):
    """A small convolutional net with the running statistics of BatchNorm."""

    def __init__(self):
        super().__init__()
        # No bias before the norm: its gradient is 0 but for rounding errors, which AdamW would scale to full steps.
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, stride=2), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).flatten(1))


def make_mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def seeded(make, dtype=F64):
    """Return the module that `make` builds, with the same initial parameters in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype)


def make_batches(model_name, size=8, steps=STEPS, dtype=F64):
    shape = (size, 6) if model_name == "mlp" else (size, 1, 6, 6)
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(shape, generator=draw, dtype=F64).to(dtype),
            "y": torch.randint(CLASSES, (size,), generator=draw),
        }
        for _ in range(steps)
    ]


MODELS = {"mlp": make_mlp, "conv": Conv}
models = pytest.mark.parametrize("model_name", MODELS)


def criterion(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def by_hand(model, batches, *, clip=None, make=None, after=None):
    """Train a copy of the model with the usual torch loop, and return the copy and its losses."""
    model = copy.deepcopy(model).train()
    optimizer = (make or adamw)(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = criterion(model, batch)
        loss.backward()
        if clip:
            clip(model.parameters())
        optimizer.step()
        if after:
            after(model)
        losses.append(loss.detach())
    return model, losses


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def run(step, state, batches):
    """Make one step with each batch, and return the last state and the losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return state, losses


def assert_same_model(model, state, tolerance=TIGHT):
    """Assert that the state has the parameters and buffers of the module."""
    torch.testing.assert_close(state.params, {n: p.detach() for n, p in model.named_parameters()}, **tolerance)
    torch.testing.assert_close(state.buffers, dict(model.named_buffers()), **tolerance)


# The tests of the laws compare donated and compiled steps with eager ones; here each is compared with the loop once.
@pytest.mark.parametrize(
    ("model_name", "way"), [("mlp", "eager"), ("conv", "eager"), ("mlp", "donated"), ("conv", "compiled")]
)
def test_a_step_equals_the_loop_by_hand(model_name, way):
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), *WAYS[way]())
    before = copy.deepcopy(model.state_dict())
    state, losses = run(step, step.init(), batches)
    theirs, expected = by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(theirs, state)
    assert int(state.step) == STEPS
    assert expected[-1] != expected[0]
    # The parameters of the step are in its state, so those of the module are unchanged.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@models
def test_sgd_with_param_groups(model_name):
    """Weight decay on matrices only: a parameter group in torch, a decay mask in ftrain."""
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)

    def grouped(params):
        params = list(params)
        matrices = [param for param in params if param.ndim >= 2]
        others = [param for param in params if param.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    optimizer = ft.optim.sgd(0.05, momentum=0.9, weight_decay=0.05, decay_mask=lambda name, leaf: leaf.ndim >= 2)
    step = ft.train_step(ft.from_module(model, criterion), optimizer)
    state, losses = run(step, step.init(), batches)
    theirs, expected = by_hand(model, batches, make=grouped)
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(theirs, state)


CLIPS = {
    "norm": (lambda: ft.clip(0.5), lambda params: nn.utils.clip_grad_norm_(params, 0.5)),
    "value": (lambda: ft.clip(value=0.02), lambda params: nn.utils.clip_grad_value_(params, 0.02)),
    "none": (lambda: ft.clip(math.inf), lambda params: nn.utils.clip_grad_norm_(params, math.inf)),
}


@pytest.mark.parametrize(
    ("model_name", "limit", "way"),
    [
        ("mlp", "norm", "eager"),
        ("mlp", "none", "eager"),
        ("conv", "value", "eager"),
        ("conv", "norm", "donated"),
        ("mlp", "value", "compiled"),
    ],
)
def test_clip_equals_torchs_clipping(model_name, limit, way):
    ours, theirs = CLIPS[limit]
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), ours(), *WAYS[way]())
    state, norms = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        norms.append(float(metrics["grad_norm"]))
    expected = []

    def clip(params):
        params = list(params)
        expected.append(float(nn.utils.get_total_norm([param.grad for param in params])))
        theirs(params)

    reference, _ = by_hand(model, batches, clip=clip)
    assert_same_model(reference, state)
    assert norms == pytest.approx(expected, rel=1e-12)
    # Some gradients are longer than the limit of 0.5 and some shorter, so both cases are tested.
    assert limit == "value" or min(norms) < 0.5 < max(norms)


@pytest.mark.parametrize("limit", CLIPS)
def test_clip_is_bitwise_torchs_in_float32(limit):
    ours, theirs = CLIPS[limit]
    model, batches = seeded(make_mlp, torch.float32), make_batches("mlp", dtype=torch.float32)
    step = ours()(ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)))
    state, _ = run(step, step.init(), batches)

    # The last bit of the norm depends on the order of its addends, and the leaves of a state are sorted by name.
    names = [name for name, _ in model.named_parameters()]

    def clip(params):
        by_name = dict(zip(names, params, strict=True))
        theirs([by_name[name] for name in sorted(names)])

    reference, _ = by_hand(model, batches, clip=clip, make=lambda params: torch.optim.SGD(params, lr=0.1, fused=True))
    assert_same_model(reference, state, {"rtol": 0, "atol": 0})


# Accumulation


def make_tokens(steps=STEPS, rows=8, length=5):
    """Return batches whose rows have 0 to `length` labels that count, so that some microbatches have none."""
    draw = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(steps):
        x = torch.randn(rows, length, 6, generator=draw, dtype=F64)
        y = torch.randint(CLASSES, (rows, length), generator=draw)
        kept = torch.randint(length + 1, (rows, 1), generator=draw)
        kept[:2] = 0
        kept[2] = length
        batches.append({"x": x, "y": torch.where(torch.arange(length) < kept, y, -100)})
    return batches


def token_criterion(model, batch):
    return ft.losses.cross_entropy(model(batch["x"]), batch["y"])


def int_weight_criterion(model, batch):
    """Return the loss of `token_criterion` with an integer weight, as `mask.sum()` gives it."""
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Mean(total, (batch["y"] != -100).sum())


def float32_weight_criterion(model, batch):
    """Return the loss of `token_criterion` with a float32 weight and a float64 total."""
    mean = token_criterion(model, batch)
    return Mean(mean.total, mean.weight.float())


def weighted_by_hand(model, batches):
    """Train a copy of the model with the mean loss per token of the whole batch, and return the copy and its losses."""
    model = copy.deepcopy(model).train()
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        logits, y = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        loss = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum") / (y != -100).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


CRITERIA = {"weight": token_criterion, "count": int_weight_criterion, "narrow": float32_weight_criterion}


@pytest.mark.parametrize("name", CRITERIA)
def test_weighted_loss_without_accumulation(name):
    """The weight of a `Mean` may have any dtype; the gradient is as tolerance as the dtype of the loss."""
    model, batches = seeded(make_mlp), make_tokens()
    step = ft.train_step(ft.from_module(model, CRITERIA[name]), ft.optim.adamw(1e-2))
    state, losses = run(step, step.init(), batches)
    reference, expected = weighted_by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)


@pytest.mark.parametrize(
    ("name", "pieces", "way"),
    [("weight", 2, "compiled"), ("weight", 4, "eager"), ("count", 4, "donated"), ("count", 8, "eager")],
)
def test_accumulation_of_uneven_weights(name, pieces, way):
    model, batches = seeded(make_mlp), make_tokens()
    loss = ft.from_module(model, CRITERIA[name])
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2)), ft.accumulate(pieces), *WAYS[way]())
    state, losses = run(step, step.init(), batches)

    reference, expected = weighted_by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)


def test_accumulation_then_clip_clips_the_whole_gradient():
    model, batches = seeded(make_mlp), make_tokens()
    base = ft.train_step(ft.from_module(model, token_criterion), ft.optim.adamw(1e-2))
    step, full = ft.compose(base, ft.accumulate(4), ft.clip(0.3)), ft.clip(0.3)(base)
    state, _ = run(step, step.init(), batches)
    expected, _ = run(full, full.init(), batches)
    torch.testing.assert_close(state.params, expected.params, **REORDERED)


def test_accumulation_passes_statistics_from_microbatch_to_microbatch():
    """BatchNorm normalises each microbatch by itself, as in the loop by hand."""
    model, batches = seeded(Conv), make_batches("conv")
    step = ft.accumulate(2)(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)))
    state, losses = run(step, step.init(), batches)

    reference = copy.deepcopy(model).train()
    optimizer = adamw(reference.parameters())
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        microbatches = zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True)
        microbatch_losses = [criterion(reference, {"x": x, "y": y}) for x, y in microbatches]
        mean = sum(microbatch_losses) / 2
        mean.backward()
        optimizer.step()
        expected.append(mean.detach())
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)
    assert int(state.buffers["norm.num_batches_tracked"]) == 2 * STEPS


# Averages


@pytest.mark.parametrize(("decay", "way"), [(0.0, "eager"), (0.9, "donated"), (0.999, "compiled")])
def test_ema_equals_the_closed_form_and_averaged_model(decay, way):
    """Equals the closed form d^n p_0 + (1 - d) sum_k d^(n - k) p_k, and torch's `AveragedModel`."""
    model, batches = seeded(make_mlp), make_batches("mlp")
    step = ft.compose(
        ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), ft.ema(decay), *WAYS[way]()
    )
    state = step.init()
    params_by_step = [tree.clone(state.params)]
    for batch in batches:
        state, _ = step(state, batch)
        params_by_step.append(tree.clone(state.params))
    weights = [decay**STEPS] + [(1 - decay) * decay ** (STEPS - k) for k in range(1, STEPS + 1)]
    assert sum(weights) == pytest.approx(1.0)
    closed = {
        name: sum(weight * p[name] for weight, p in zip(weights, params_by_step, strict=True))
        for name in params_by_step[0]
    }
    average = ft.averaged(state).params
    torch.testing.assert_close(average, closed, **REORDERED)

    swa = torch.optim.swa_utils
    theirs = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)
    by_hand(model, batches, after=theirs.update_parameters)
    torch.testing.assert_close(average, {n: p.detach() for n, p in theirs.module.named_parameters()}, **REORDERED)


@pytest.mark.parametrize("way", ["donated", "compiled"])
def test_training_on_from_the_average(way):
    """In `ft.averaged(state)` parameters and averages are the same tensors: a donated step must update them once."""
    model, batches = seeded(make_mlp), make_batches("mlp", steps=4)
    plain = ft.ema(0.9)(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)))
    donating = ft.donated(plain) if way == "donated" else ft.compiled(backend="eager", donate=True)(plain)
    trained, _ = run(plain, plain.init(), batches[:2])
    expected, _ = run(plain, ft.averaged(trained), batches[2:])
    actual, _ = run(donating, ft.averaged(tree.clone(trained)), batches[2:])
    torch.testing.assert_close(actual.params, expected.params, **TIGHT)
    torch.testing.assert_close(actual.slots, expected.slots, **TIGHT)


# Mixed precision


def autocast_by_hand(model, batches, dtype, *, make, scaler=None):
    """Train a copy of the model under autocast, and return the copy, its losses and a trace of the scaler.

    The trace has (scale, growth tracker, parameters) after each step, and is empty without a scaler.
    """
    model = copy.deepcopy(model).train()
    optimizer = make(model.parameters())
    losses, trace = [], []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = criterion(model, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
            trace.append((scaler.get_scale(), scaler._get_growth_tracker(), params))
        losses.append(loss.detach())
    return model, losses, trace


def sgd(params, *, fused=False):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=fused)


def fused_sgd(params):
    return sgd(params, fused=True)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, fused=True)


OPTIMIZERS = {
    "sgd": (lambda: ft.optim.sgd(0.05, momentum=0.9), fused_sgd),
    "adamw": (lambda: ft.optim.adamw(1e-2), fused_adamw),
}


@pytest.mark.parametrize("family", OPTIMIZERS)
@models
def test_bf16_is_bitwise_the_autocast_loop(model_name, family):
    ours, make = OPTIMIZERS[family]
    model, batches = seeded(MODELS[model_name], torch.float32), make_batches(model_name, dtype=torch.float32)
    step = ft.with_amp("bf16")(ft.train_step(ft.from_module(model, criterion), ours()))
    state, losses = run(step, step.init(), batches)
    reference, expected, _ = autocast_by_hand(model, batches, torch.bfloat16, make=make)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(torch.equal(state.params[name], param.detach()) for name, param in reference.named_parameters())
    assert all(torch.equal(state.buffers[name], buffer) for name, buffer in reference.named_buffers())
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(state.opt_state))
    # The computation was in bfloat16: in float32 the first loss is another one.
    _, float32_losses = by_hand(model, batches, make=make)
    assert not torch.equal(float32_losses[0], expected[0])


GROWTH_INTERVAL = 7


def overflowing(batches, at):
    """Return the batches, with inputs that overflow in float16 at the indices `at`."""
    return [dict(batch, x=batch["x"] * 1e6) if k in at else batch for k, batch in enumerate(batches)]


@pytest.mark.parametrize("family", OPTIMIZERS)
@models
def test_fp16_scales_as_grad_scaler_does(model_name, family, monkeypatch):
    """Scale, growth tracker, skipped steps and parameters are the same, after single overflows and several in a row."""
    monkeypatch.setattr(amp, "GROWTH_INTERVAL", GROWTH_INTERVAL)
    ours, make = OPTIMIZERS[family]
    # Torch's fused SGD takes the infinities of a step that is to be skipped into its momentum.
    make = sgd if family == "sgd" else make
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if family == "sgd" else {"rtol": 0, "atol": 0}
    model = seeded(MODELS[model_name], torch.float32)
    batches = overflowing(make_batches(model_name, dtype=torch.float32), at=(0, 5, 20, 21, 22, 40))
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (
        amp.INITIAL_SCALE,
        amp.GROWTH,
        1 / amp.GROWTH,
    )
    _, expected, trace = autocast_by_hand(model, batches, torch.float16, make=make, scaler=scaler)

    step = ft.with_amp("fp16")(ft.train_step(ft.from_module(model, criterion), ours()))
    state = step.init()
    skipped, scales = [], []
    for k, batch in enumerate(batches):
        before = state
        state, metrics = step(state, batch)
        scale, tracker, params = trace[k]
        slot = state.slots["with_amp"]
        scales.append(scale)
        assert (float(slot["scale"]), int(slot["good"])) == (scale, tracker), f"step {k}"
        torch.testing.assert_close(metrics["loss"], expected[k].float(), **tolerance, equal_nan=True)
        torch.testing.assert_close(state.params, params, **tolerance)
        if metrics["skipped"]:
            skipped.append(k)
            for part in ("params", "opt_state", "buffers"):
                old, new = tree.leaves(getattr(before, part)), tree.leaves(getattr(state, part))
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True)), f"step {k}: {part}"
    # The injected overflows were skipped, and the scale also grew in between.
    assert {0, 5, 20, 21, 22, 40} <= set(skipped)
    assert len(skipped) < STEPS / 2
    assert any(a < b for a, b in itertools.pairwise(scales))
    assert int(state.step) == STEPS
    if family == "adamw":
        assert float(state.opt_state["count"]) == STEPS - len(skipped)


def test_fp16_scale_is_bounded_as_that_of_grad_scaler(monkeypatch):
    """With small gradients the scale doubles again and again; at infinity every next_step step would be skipped."""
    monkeypatch.setattr(amp, "GROWTH_INTERVAL", 1)
    step = ft.with_amp("fp16")(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1)))
    state = step.init({"w": torch.ones(2)})
    slot = {"scale": torch.tensor(2.0**126), "good": torch.tensor(0)}
    state = dataclasses.replace(state, slots={"with_amp": slot})

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    scales, expected = [], []
    for _ in range(4):
        state, _ = step(state, torch.full((2,), 0.001))
        scales.append(float(state.slots["with_amp"]["scale"]))
        optimizer.zero_grad()
        scaler.scale((weight * 0.001).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert expected == [2.0**127] * 4
    assert scales == expected
    torch.testing.assert_close(state.params["w"], weight.detach())


def test_constants_are_those_of_grad_scaler():
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == amp.GROWTH_INTERVAL
    assert scaler.get_scale() == amp.INITIAL_SCALE


# Dropout


def make_dropout():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, CLASSES))


def keyed_loss(params, batch, rng):
    hidden = random.dropout(rng, torch.relu(batch["x"] @ params["w"]), 0.4)
    return F.cross_entropy(hidden @ params["v"], batch["y"])


def dropout_steps():
    draw = torch.Generator().manual_seed(3)
    params = {
        "w": torch.randn(6, 32, generator=draw, dtype=F64),
        "v": torch.randn(32, CLASSES, generator=draw, dtype=F64),
    }
    module = ft.train_step(ft.from_module(seeded(make_dropout), criterion), ft.optim.adamw(1e-2))
    keyed = ft.train_step(keyed_loss, ft.optim.adamw(1e-2))
    return {"stock": (module, None), "keyed": (keyed, params)}


@pytest.mark.parametrize(
    ("name", "way"), [("stock", "donated"), ("stock", "compiled"), ("keyed", "eager"), ("keyed", "compiled")]
)
def test_dropout_depends_on_the_seed_alone(name, way):
    step, params = dropout_steps()[name]
    step = ft.compose(step, *WAYS[way]())
    batches = make_batches("mlp", steps=10)

    def losses(seed, torch_seed):
        with torch.random.fork_rng():
            torch.manual_seed(torch_seed)
            before = torch.get_rng_state()
            _, actual = run(step, step.init(params, seed=seed), batches)
            assert torch.equal(before, torch.get_rng_state())
        return [float(loss) for loss in actual]

    first = losses(seed=0, torch_seed=1)
    assert first == losses(seed=0, torch_seed=2)
    assert all(a != b for a, b in zip(first, losses(seed=1, torch_seed=1), strict=True))


def test_dropout_differs_from_step_to_step():
    step, _ = dropout_steps()["stock"]
    batch = make_batches("mlp", steps=1)[0]
    state = step.init()
    new, first = step(state, batch)
    _, again = step(state, batch)
    _, next_step = step(dataclasses.replace(state, step=new.step), batch)
    assert torch.equal(first["loss"], again["loss"])
    assert not torch.equal(first["loss"], next_step["loss"])


def test_stock_dropout_by_hand():
    """A loop by hand that seeds torch from the key of each step draws the same dropout masks."""
    model, batches = seeded(make_dropout), make_batches("mlp")
    step = ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2))
    state, losses = run(step, step.init(seed=4), batches)

    reference = copy.deepcopy(model).train()
    optimizer = adamw(reference.parameters())
    expected = []
    with torch.random.fork_rng():
        for k, batch in enumerate(batches):
            torch.manual_seed(random.seed_of(random.key_data(random.fold_in(random.key(4), k))))
            optimizer.zero_grad()
            loss = criterion(reference, batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.detach())
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(reference, state)
