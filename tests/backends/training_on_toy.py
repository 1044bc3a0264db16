"""Checks that training on the device of `toy.py` agrees with training on the CPU; `on_toy.py` runs them."""

import dataclasses
import tempfile
import traceback
import warnings
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import backends
from ftrain.errors import DeviceError
from ftrain.profiling import doctor, rates
from tests.backends.toy_problem import (
    Net,
    assert_bitwise,
    batches,
    check_adder,
    criterion,
    device_types,
    make,
    plain_run,
    train,
)

CHECKS = {}
check = check_adder(CHECKS)
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


@check
def it_has_no_record_until_one_is_registered(name, module):
    if name != "toy":
        assert name in backends.names()
        return
    with pytest.raises(DeviceError, match=r"registered are cpu.*private_use\('toy'\)"):
        backends.get(name)
    backends.register(backends.private_use(name, fused_optimizers=True))
    assert backends.default().name == name
    assert backends.of(torch.device(name, 0)).device.type == name


@check
def it_trains_as_the_cpu_to_the_bit(name, module):
    ours, losses = plain_run(name, 2)
    theirs, expected = plain_run("cpu", 2)
    assert device_types(ours) == {name}, device_types(ours)
    assert losses == expected
    assert len(set(losses)) == len(losses)
    assert_bitwise(ours, theirs)


@check
def generators_are_put_back(name, module):
    of_device, of_host = module.get_rng_state(), torch.get_rng_state()
    train(name)
    assert torch.equal(module.get_rng_state(), of_device)
    assert torch.equal(torch.get_rng_state(), of_host)


class Noisy(nn.Module):
    """Draws from the generator of its device."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.up(x)) * torch.empty_like(x).bernoulli_(0.5)


@check
def recomputed_blocks_draw_the_same_numbers(name, module):
    def trained(*wrappers):
        torch.manual_seed(0)
        # A check of torch's checkpoint reads positional inputs only.
        loss_fn = ft.from_module(
            nn.ModuleList(nn.Sequential(Noisy()) for _ in range(2)),
            lambda model, x: model[1](input=model[0](input=x)).float().square().mean(),
        )
        step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), *wrappers)
        return ft.fit(step, step.init(device=name), batches(), progress=False).state.params

    plain = trained()
    assert_bitwise(trained(ft.remat()), plain)
    assert_bitwise(trained(ft.remat("dots")), plain)
    assert_bitwise(trained(ft.with_amp("bf16", watch=True)), trained(ft.with_amp("bf16")))


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
    assert lines_that_read(name, step, step.init(params)) == []
    for wrappers in STACKS:
        step = ft.compose(ft.train_step(ft.from_module(Net(), criterion), ft.optim.adamw(1e-2)), *wrappers)
        assert lines_that_read(name, step, step.init(device=name)) == []


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
    # One backward pass of each step, and two of that with two microbatches.
    assert values == [True] * 4


@check
def without_fused_kernels_it_has_the_bits_of_the_cpu(name, module):
    records = backends.get(name), backends.get("cpu")
    try:
        for record in records:
            backends.register(dataclasses.replace(record, fused_optimizers=False))
        ours, losses = train(name)
        theirs, expected = train("cpu")
    finally:
        for record in records:
            backends.register(record)
    assert losses == expected
    assert_bitwise(ours, theirs)


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


@check
def tf32_without_tf32_is_an_error(name, module):
    with pytest.raises(DeviceError, match="Toy has no TF32"):
        make(ft.with_amp("tf32")).init(device=name)


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
    expected, losses = plain_run("cpu")
    assert history["loss"] == losses
    assert_bitwise(state, expected)
    assert_bitwise(state, host)


@check
def evaluation(name, module):
    loss_fn = ft.from_module(Net(), criterion)
    metrics = {}
    for device in (name, "cpu"):
        state, _ = plain_run(device)
        data = [ft.tree.to(batch, device) for batch in batches()]
        metrics[device] = ft.evaluate(ft.eval_step(loss_fn), state, data)
    _, losses = plain_run(name)
    assert metrics[name] == metrics["cpu"]
    assert metrics[name]["loss"] < losses[0]


@check
def memory_is_counted(name, module):
    before = backends.get(name).memory()
    block = torch.ones(2**16, device=name)
    during = backends.get(name).memory()
    del block
    after = backends.get(name).memory()
    # The block has 2**16 numbers of float32.
    assert during.current == before.current + 2**18
    assert after.current == before.current
    assert during.peak == after.peak >= during.current


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
            assert_bitwise(state.params, expected.params)
    finally:
        backends.register(record)


@check
def the_doctor_examines_it(name, module):
    rates.SMALLEST_EDGE = rates.LARGEST_EDGE = 64
    doctor.COPY_BYTES = 1 << 12
    report = "\n".join(doctor.report([name]))
    assert "fails" not in report
    assert f"\n{name}\n  device         Toy\n  autocast       bfloat16 (native), float16 (native)\n" in report
