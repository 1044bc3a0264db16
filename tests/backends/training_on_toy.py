"""Checks that training on the device of `toy.py` agrees with training on the CPU; `on_toy.py` runs them."""

import contextlib
import dataclasses
import functools
import tempfile
import traceback
import warnings
from contextvars import ContextVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import backends
from ftrain.errors import DeviceError
from ftrain.profiling import doctor, rates
from ftrain.transforms.compile.host_constants import tensors_of

CHECKS = {}
# The checks whose result depends on the vendor's record.
BY_RECORD = (
    "it_has_no_record_until_one_is_registered",
    "it_trains_as_the_cpu_to_the_bit",
    "generators_are_put_back",
    "mixed_precision",
    "tf32_without_tf32_is_an_error",
    "checkpoints_resume_to_the_bit",
    "memory_is_counted",
)


def check(function):
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop, self.down = (
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
        )

    def forward(self, x):
        return self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


def criterion(model, batch, *, rng):
    # Without a key in evaluation.
    kept = batch if rng is None else ft.random.dropout(rng, batch, 0.2)
    return (model(kept).float() ** 2).mean()


def squares(model, batch):
    return model(batch).square().mean()


def make(*wrappers):
    torch.manual_seed(0)
    optimizer = ft.optim.adamw(ft.schedules.warmup_cosine(1e-2, 3, 30), weight_decay=0.1)
    loss_fn = ft.from_module(Net(), criterion)
    return ft.compose(ft.train_step(loss_fn, optimizer), ft.clip(1.0), ft.ema(0.9), ft.skip_nonfinite(), *wrappers)


def batches(count=5):
    return list(torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(1)).unbind())


def train(device, *wrappers):
    step = make(*wrappers)
    state, history = ft.fit(step, step.init(device=device), batches(), progress=False)
    return state, history["loss"]


@functools.cache
def plain(device, pieces=1):
    """Return the state and the losses of a run that several checks read."""
    return train(device, ft.accumulate(pieces)) if pieces > 1 else train(device)


def differ(actual, expected):
    """Return the names of the leaves whose bits differ, or that are on the device meta."""
    pairs = zip(ft.tree.leaf_names(actual), ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True)
    return [name for name, a, b in pairs if not torch.equal(a.cpu(), b.cpu()) or a.device.type == "meta"]


def device_types(state):
    """Return the types of the devices of a state's leaves, except for the step and the key, which are on the host."""
    return {leaf.device.type for leaf in ft.tree.leaves((state.params, state.buffers, state.opt_state, state.slots))}


@check
def it_has_no_record_until_one_is_registered(name, module):
    if name != "toy":
        return name in backends.names()
    message = ""
    try:
        backends.get(name)
    except DeviceError as error:
        message = str(error)
    assert "private_use('toy')" in message
    assert "registered are cpu" in message
    backends.register(backends.private_use(name, fused_optimizers=True))
    return backends.default().name == name and backends.of(torch.device(name, 0)).device.type == name


@check
def it_trains_as_the_cpu_to_the_bit(name, module):
    ours, losses = plain(name, 2)
    theirs, expected = plain("cpu", 2)
    assert device_types(ours) == {name}, device_types(ours)
    return losses == expected and not differ(ours, theirs) and len(set(losses)) == len(losses)


@check
def generators_are_put_back(name, module):
    before = module.get_rng_state(), torch.get_rng_state()
    train(name)
    return torch.equal(module.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])


class Noisy(nn.Module):
    """Draws from the generator of its device."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.up(x)) * torch.empty_like(x).bernoulli_(0.5)


@check
def recomputed_blocks_draw_the_same_numbers(name, module):
    actual = []
    for wrappers in (
        (),
        (ft.remat(),),
        (ft.remat("dots"),),
        (ft.with_amp("bf16", watch=True),),
        (ft.with_amp("bf16"),),
    ):
        torch.manual_seed(0)
        # A check of torch's checkpoint reads positional inputs only.
        loss_fn = ft.from_module(
            nn.ModuleList(nn.Sequential(Noisy()) for _ in range(2)),
            lambda model, x: model[1](input=model[0](input=x)).float().square().mean(),
        )
        step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), *wrappers)
        actual.append(ft.fit(step, step.init(device=name), batches(), progress=False).state.params)
    plain, full, dots, watched, narrow = actual
    return not differ(full, plain) and not differ(dots, plain) and not differ(watched, narrow)


class Reads(TorchDispatchMode):
    """Records the lines of code that read a value of a tensor of the device."""

    def __init__(self, name):
        super().__init__()
        self.name, self.lines = name, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default and args[0].device.type == self.name:
            self.lines += [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[-3:-1]]
        return function(*args, **(kwargs or {}))


@check
def no_eager_step_reads_a_value(name, module):
    """It would wait for the device."""
    names = ("adamw", "nadam", "radam", "lamb", "lion", "rmsprop", "adagrad", "adafactor", "schedule_free_adamw")
    optimizers = {label: getattr(ft.optim, label)(1e-2) for label in names}
    optimizers["bf16"] = ft.optim.adamw(1e-2, state_dtype="bf16")
    optimizers["slow"] = ft.optim.lookahead(ft.optim.sgd(1e-2, momentum=0.9))
    params = {label: torch.ones(16, 16, device=name) for label in optimizers}

    def loss(params, batch):
        return sum((batch @ leaf).square().mean() for leaf in params.values())

    step = ft.train_step(loss, ft.optim.partition(optimizers, lambda label, leaf: label))
    reads = [lines_that_read(name, step, step.init(params))]
    for wrappers in STACKS:
        step = ft.compose(ft.train_step(ft.from_module(Net(), criterion), ft.optim.adamw(1e-2)), *wrappers)
        reads.append(lines_that_read(name, step, step.init(device=name)))
    return not any(reads) or str(reads)


def lines_that_read(name, step, state):
    """Return the lines that read a value in the second step; the first one checks more."""
    first, second = (batch.to(name) for batch in batches(2))
    state, _ = step(state, first)
    with Reads(name) as reads:
        step(state, second)
    return reads.lines


STACKS = (
    (ft.clip(1.0), ft.ema(0.9), ft.swa(), ft.skip_nonfinite()),
    (ft.accumulate(2), ft.skip_spikes()),
    (ft.with_amp("fp16"), ft.clip(value=0.1)),
    (ft.with_amp("bf16", watch=True), ft.sam()),
    (ft.remat(blocks=["up", "down"]), ft.update_in_backward()),
)


@check
def the_backward_pass_sees_the_context_of_the_step(name, module):
    """Autograd would run it in another thread. Backward passes need it, as that of `sync_batch_norm` with `remat`."""
    values, variable = [], ContextVar("variable", default=False)

    class ReadsVariable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            values.append(variable.get())
            return grad

    def loss(params, x):
        return ReadsVariable.apply(params["w"] * x).square().mean()

    for wrappers in ((), (ft.accumulate(2),), (ft.update_in_backward(),)):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
        state, token = step.init({"w": torch.ones(16, device=name)}), variable.set(True)
        step(state, batches(1)[0].to(name))
        variable.reset(token)
    return len(values) == 4 and all(values)


@check
def without_fused_kernels_it_has_the_bits_of_the_cpu(name, module):
    fused, host = backends.get(name), backends.get("cpu")
    try:
        for record in (fused, host):
            backends.register(dataclasses.replace(record, fused_optimizers=False))
        ours, losses = train(name)
        theirs, expected = train("cpu")
    finally:
        backends.register(fused)
        backends.register(host)
    return losses == expected and not differ(ours, theirs)


@check
def it_compiles_with_the_compiler_of_its_record(name, module):
    def compiled(device, **options):
        loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()  # noqa: E731
        step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1, momentum=0.9)), ft.compiled(donate=True, **options))
        state = step.init({"w": torch.linspace(-1, 1, 48).reshape(16, 3)}, device=device)
        return ft.fit(step, state, batches(), progress=False)

    ours, history = compiled(name)
    theirs, expected = compiled("cpu", backend="eager")
    return history["loss"] == expected["loss"] and not differ(ours, theirs)


@check
def a_compiled_step_reads_nothing_that_the_loss_makes_on_the_host(name, module):
    """It is made once, and kept on the device, so that no step waits for a copy; a tensor from outside may change."""
    from torch._dynamo import register_backend  # Imported here: it takes a second, and other checks do not need it.

    outside, host_nodes = torch.tensor([1.0, 2.0, 3.0]), []

    @register_backend(name="ftrain_toy_watched")
    def watched(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op in ("get_attr", "call_function")]
        host_nodes.extend(str(node.op) for node in nodes for tensor in tensors_of(node) if tensor.device.type == "cpu")
        return graph.forward

    def loss(params, batch):
        y = batch @ params["w"]
        own = torch.tensor([0.5, 2.0, 1.0]).to(y.device)
        own.mul_(2)  # Each step has its own.
        positions = torch.arange(3).to(y.device, torch.float32)
        mask = torch.ones(3).masked_fill(torch.tensor([True, False, True]), 0.25).to(y.device)
        total = (y[:, torch.tensor([2, 0, 1])] * own + positions) * mask * torch.tensor(1.5)
        return (total * outside.to(y.device)).square().mean()

    def run(device, **options):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1e-4)), ft.compiled(donate=True, **options))
        return ft.fit(step, step.init({"w": torch.ones(16, 3)}, device=device), batches(), progress=False)

    ours, history = run(name, backend="ftrain_toy_watched")
    theirs, expected = run("cpu", backend="eager")
    # A 0-d tensor, which a kernel takes from the host, and its copy. And the tensor from outside.
    assert sorted(host_nodes) == ["call_function", "get_attr", "get_attr"], host_nodes
    return history["loss"] == expected["loss"] and not differ(ours, theirs)


@check
def tensors_that_the_loss_changes_on_the_host_are_made_in_each_compiled_step(name, module):
    """Changed by index, by a view, or in a list: the device gets the last values, as in an eager step."""

    def loss(params, batch):
        table, first, halves, ends = torch.zeros(3, 2), torch.ones(3), torch.ones(3), torch.zeros(4)
        table[:, 0] = torch.arange(3.0)
        first[0] = 4.0
        torch._foreach_mul_([halves[:1], halves[2:]], 0.5)
        read = ends[1:]
        ends.view(2, 2)[1].add_(2.0)
        y = batch @ params["w"]
        y = (y + table.to(y.device)[:, 0]) * halves.to(y.device) + first.to(y.device) * read.to(y.device)
        return y.square().mean()

    def run(device, *wrappers):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1e-3)), *wrappers)
        return ft.fit(step, step.init({"w": torch.ones(16, 3)}, device=device), batches(), progress=False)

    ours, history = run(name, ft.compiled(donate=True, lowering="whole"))
    theirs, expected = run("cpu")
    return near(history["loss"], expected["loss"]) and near(ours.params, theirs.params)


@check
def mixed_precision(name, module):
    for dtype, expected in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        output_dtypes = set()

        def watched(model, batch, output_dtypes=output_dtypes):
            out = model(batch)
            output_dtypes.add(out.dtype)
            return (out.float() ** 2).mean()

        torch.manual_seed(0)
        step = ft.train_step(ft.from_module(Net(), watched), ft.optim.adamw(1e-2))
        step = ft.compose(step, ft.with_amp(dtype))
        state, history = ft.fit(step, step.init(device=name), batches(), progress=False)
        assert output_dtypes == {expected}
        assert {leaf.dtype for leaf in ft.tree.leaves(state.params)} == {torch.float32}
        assert history["loss"][-1] < history["loss"][0] * 0.8
    return True


@check
def tf32_without_tf32_is_an_error(name, module):
    try:
        make(ft.with_amp("tf32")).init(device=name)
    except DeviceError as error:
        return "Toy has no TF32" in str(error)
    return False


@check
def checkpoints_resume_to_the_bit(name, module):
    with tempfile.TemporaryDirectory() as directory:

        def resumed(device, steps):
            step, data = make(), ft.data.loader(ft.data.arrays(torch.cat(batches())), 8, shuffle=False)
            checkpoints = ft.Checkpoints(directory, every=2)
            return ft.fit(step, step.init(device=device), data, steps=steps, checkpoints=checkpoints, progress=False)

        resumed(name, 3)
        state, history = resumed(name, 5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            host, _ = resumed("cpu", 5)
    assert len(history["loss"]) == 5
    assert device_types(state) == {name}
    (warning,) = caught
    assert f"device: {name}, now cpu" in str(warning.message)
    return history["loss"] == plain("cpu")[1] and not differ(state, plain("cpu")[0]) and not differ(state, host)


@check
def evaluation(name, module):
    loss_fn = ft.from_module(Net(), criterion)
    metrics = {}
    for device in (name, "cpu"):
        state, _ = plain(device)
        data = [ft.tree.to(batch, device) for batch in batches()]
        metrics[device] = ft.evaluate(ft.eval_step(loss_fn), state, data)
    return metrics[name] == metrics["cpu"] and metrics[name]["loss"] < plain(name)[1][0]


@contextlib.contextmanager
def without_float64(name, module, *, fused=False):
    """Context in which any operation on a tensor of float64 is an error, as on Apple's GPUs."""
    record = backends.get(name)
    module.float64 = False
    try:
        backends.register(dataclasses.replace(record, fused_optimizers=fused, float64=False))
        yield
    finally:
        module.float64 = True
        backends.register(record)


def near(actual, expected, rtol=2e-5, atol=2e-6):
    if isinstance(actual, list):
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a.cpu().double(), b.cpu().double(), rtol=rtol, atol=atol)
    return True


@check
def without_float64_a_double_is_an_error(name, module):
    """Without this, the checks below would prove nothing."""
    with without_float64(name, module):
        for make_double in (lambda: torch.ones(2, device=name).double(), lambda: torch.ones(2).double().to(name)):
            try:
                make_double()
            except TypeError:
                continue
            return False
    return True


@check
def without_float64_it_trains_by_fused_kernels(name, module):
    with without_float64(name, module, fused=True):
        _, losses = train(name, ft.accumulate(2))
    return near(losses, plain("cpu", 2)[1])


OPTIMIZERS = {
    "sgd": lambda lr: ft.optim.sgd(lr, momentum=0.9, dampening=0.5),
    "adam": lambda lr: ft.optim.adam(lr, amsgrad=True, weight_decay=0.1),
    "adamw": ft.optim.adamw,
    "adamw_b1_0": lambda lr: ft.optim.adamw(lr, b1=0.0),
    "adamw_bf16": lambda lr: ft.optim.adamw(lr, state_dtype="bf16"),
    "adamw_8bit": lambda lr: ft.optim.adamw_8bit(lr, min_size=1),
    "adafactor": ft.optim.adafactor,
    "adagrad": lambda lr: ft.optim.adagrad(lr, lr_decay=0.1),
    "lamb": ft.optim.lamb,
    "lion": ft.optim.lion,
    "muon": ft.optim.muon,
    "nadam": ft.optim.nadam,
    "radam": lambda lr: ft.optim.lookahead(ft.optim.radam(lr), k=2),
    "rmsprop": lambda lr: ft.optim.rmsprop(lr, momentum=0.5, centered=True),
}


@check
def without_float64_every_formula_is_that_of_the_cpu(name, module):
    """In float32 within rounding, over enough steps that RAdam rectifies; numbers in float64 stay on the host.

    In one step each optimizer has its own two matrices, and a vector, which Muon does not take.
    """
    params, rate = {}, ft.schedules.warmup_cosine(1e-2, 3, 30)
    for label in OPTIMIZERS:
        draw = torch.Generator().manual_seed(0)
        shapes = {"up": (16, 32), "bias": (32,), "down": (32, 16)}
        params[label] = {leaf: torch.randn(shape, generator=draw) / 4 for leaf, shape in shapes.items()}
    del params["muon"]["bias"]

    def loss(params, batch):
        outputs = (torch.tanh(batch @ p["up"] + p.get("bias", 0.0)) @ p["down"] for p in params.values())
        return sum(output.square().mean() for output in outputs)

    def run(device, optimizers):
        optimizer = ft.optim.partition(optimizers, lambda path, leaf: path.split(".")[0])
        step = ft.compose(ft.train_step(loss, ft.optim.adjustable(optimizer)), ft.swa(2))
        start = {label: params[label] for label in optimizers}
        return ft.fit(step, step.init(start, device=device), batches(7), progress=False)[0]

    optimizers = {label: make(rate) for label, make in OPTIMIZERS.items()}
    expected = run("cpu", optimizers)
    with without_float64(name, module):
        actual = run(name, optimizers)
    far = []
    for label in OPTIMIZERS:
        try:
            near(actual.params[label], expected.params[label], rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            far.append((label, str(error)[:300]))
    assert not far, far
    with without_float64(name, module):
        try:
            run(name, {"sgd": ft.optim.schedule_free_adamw(rate)})
        except DeviceError as error:
            return "schedule_free_adamw" in str(error) and "Toy has none" in str(error)
    return False


@check
def without_float64_compiled_steps_get_their_rates(name, module):
    """Three of them, an odd number of float32; and dropout of stock modules, from the key."""

    def run(device, **options):
        torch.manual_seed(0)
        rates = {
            label: ft.optim.sgd(ft.schedules.warmup_cosine(each, 3, 30), momentum=0.9)
            for label, each in (("0", 1e-2), ("2", 3e-3), ("3", 1e-3))
        }
        optimizer = ft.optim.partition(rates, lambda path, leaf: path.split(".")[0])
        # A small model, because compiling takes long.
        model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 16))
        step = ft.train_step(ft.from_module(model, squares), optimizer)
        step = ft.compose(step, ft.compiled(donate=True, **options))
        state, history = ft.fit(step, step.init(device=device), batches(), progress=False)
        assert "whole" in repr(step), repr(step)
        return state, history

    expected, expected_history = run("cpu", backend="eager")
    with without_float64(name, module):
        state, history = run(name)
    rates = [column for column in expected_history[0] if column.startswith("lr") or column.endswith("/lr")]
    assert len(rates) == 3, expected_history[0]
    assert all(history[column] == expected_history[column] for column in rates)
    near(history["loss"], expected_history["loss"])
    return near(state.params, expected.params, rtol=1e-4, atol=1e-5)


@check
def without_float64_a_split_step_and_mixed_precision_train(name, module):
    torch.manual_seed(0)
    # A small model, because compiling takes long.
    loss_fn = ft.from_module(nn.Linear(16, 16), squares)
    bare = ft.train_step(loss_fn, ft.optim.sgd(ft.schedules.warmup_cosine(1e-2, 3, 30)))
    _, expected = ft.fit(bare, bare.init(), batches(), progress=False)
    split = ft.compose(bare, ft.compiled(lowering="split"))
    with without_float64(name, module):
        _, history = ft.fit(split, split.init(device=name), batches(), progress=False)
    near(history["loss"], expected["loss"])
    for step in (
        make(ft.with_amp("fp16", watch=True), ft.accumulate(2)),
        make(ft.with_amp("bf16"), ft.remat(blocks=["up"])),
    ):
        with without_float64(name, module):
            state, history = ft.fit(step, step.init(device=name), batches(), progress=False)
        near(history["loss"], plain("cpu")[1], rtol=0.3, atol=0.1)
        assert device_types(state) == {name}
    assert history["lr"] == [step.optimizer.schedules["lr"](k) for k in range(5)]
    return True


@check
def without_float64_an_evaluation_is_as_exact(name, module):
    """Of one batch with a large total and many with small ones, which float32 would lose."""

    def loss(params, batch):
        return ft.Mean((params["w"] * batch["x"]).sum(), batch["n"]), {"plain": batch["x"].mean()}

    data = [{"x": torch.full((3,), value), "n": torch.tensor(3.0)} for value in (2.0**24, *[0.3] * 40, 1e-3, -0.77)]
    actual = {}
    for device in ("cpu", name):
        state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(3)}, device=device)
        context = without_float64(name, module) if device == name else contextlib.nullcontext()
        with context:
            actual[device] = ft.evaluate(ft.eval_step(loss), state, data)
            if device == name:
                narrow = ft.evaluate(ft.eval_step(loss), state, data[1:], dtype="bf16", on_oom="split")
    exact = float(torch.stack([batch["x"][0] for batch in data]).double().mean())
    assert abs(narrow["loss"] - 0.27) < 0.01, narrow
    for label in ("loss", "plain"):
        assert abs(actual[name][label] - actual["cpu"][label]) <= 1e-12 * abs(actual["cpu"][label]), actual
    return abs(actual[name]["loss"] - exact) <= 1e-12 * exact


@check
def without_float64_draws_are_those_of_the_cpu_within_rounding(name, module):
    key = ft.random.key(3)
    draws = {
        "normal": lambda key: ft.random.normal(key, (1001,)),
        "exponential": lambda key: ft.random.exponential(key, (1001,)),
        "uniform": lambda key: ft.random.uniform(key, (1001,), low=-2.0, high=3.0),
        "unit": lambda key: ft.random.uniform(key, (1001,)),
        "half": lambda key: ft.random.normal(key, (11,), dtype=torch.bfloat16).float(),
        "bernoulli": lambda key: ft.random.bernoulli(key, 0.3, (1001,)).float(),
        "permutation": lambda key: ft.random.permutation(key, 100).float(),
        "dropout": lambda key: ft.random.dropout(key, torch.ones(33, device=key.device), 0.3),
    }
    same = set()
    for label, draw in draws.items():
        expected = draw(key)
        with without_float64(name, module):
            actual = draw(key.to(name))
        near(actual, expected, rtol=1e-5, atol=2e-6)
        assert label != "uniform" or float(actual.max()) < 3.0 <= float(actual.max()) + 0.01
        same |= {label} if torch.equal(actual.cpu(), expected) else set()
    return same >= {"unit", "bernoulli", "permutation", "dropout"}


@check
def memory_is_counted(name, module):
    before = backends.get(name).memory()
    block = torch.ones(2**16, device=name)
    during = backends.get(name).memory()
    del block
    after = backends.get(name).memory()
    return during.current == before.current + 2**18 <= during.peak == after.peak and after.current == before.current


@check
def its_cache_is_emptied_every_few_steps(name, module):
    """By the number of the step, eager, compiled and resumed; the results are the same to the bit."""
    record, emptied = backends.get(name), []
    loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()  # noqa: E731
    backends.register(dataclasses.replace(record, empty_cache=lambda: emptied.append(len(seen))))
    try:
        for wrappers in ((), (ft.compiled(donate=True),)):
            step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), ft.empty_cache(2), *wrappers)
            seen, data = [], [*batches(), *batches(2)]
            emptied.clear()
            with tempfile.TemporaryDirectory() as directory:
                for steps in (3, 7):
                    state, _ = ft.fit(
                        step,
                        step.init({"w": torch.ones(16, 3)}, device=name),
                        data,
                        steps=steps,
                        checkpoints=ft.Checkpoints(directory, every=1),
                        loggers=[seen.append],
                        log_every=1,
                        progress=False,
                    )
            # The cache is emptied before the record of the step is logged.
            assert emptied == [1, 3, 5], emptied
            without = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), *wrappers)
            expected, _ = ft.fit(without, without.init({"w": torch.ones(16, 3)}, device=name), data, progress=False)
            assert not differ(state.params, expected.params)
    finally:
        backends.register(record)
    return True


@check
def the_doctor_examines_it(name, module):
    rates.SMALLEST_EDGE = rates.LARGEST_EDGE = 64
    doctor.COPY_BYTES = 1 << 12
    report = "\n".join(doctor.report([name]))
    assert "fails" not in report
    return f"\n{name}\n  device         Toy\n  autocast       bfloat16 (native), float16 (native)\n" in report
