"""Trains on the device of `toy.py` and on the CPU, and prints what agrees, as JSON.

Run in a process of its own, for torch has one PrivateUse1 device for a whole process:
``python -m tests.backends.on_toy [name]``. With a name, the device goes by the record of that vendor.
"""

import dataclasses
import functools
import json
import sys
import tempfile
import traceback
import warnings

import torch
from torch import nn

import ftrain as ft
from ftrain import backends, doctor
from ftrain.errors import DeviceError, OptionError

CHECKS = {}
# What differs by vendor; the rest is the same for any device.
BY_RECORD = (
    "it_has_no_record_until_one_is_registered",
    "it_trains_as_the_cpu_to_the_bit",
    "generators_are_put_back",
    "mixed_precision",
    "what_it_lacks_is_an_error",
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
    """What several checks look at."""
    return train(device, ft.accumulate(pieces)) if pieces > 1 else train(device)


def differ(ours, theirs):
    """Names of the leaves that are not the same to the bit, or not where they should be."""
    pairs = zip(ft.tree.leaf_names(ours), ft.tree.leaves(ours), ft.tree.leaves(theirs), strict=True)
    return [name for name, a, b in pairs if not torch.equal(a.cpu(), b.cpu()) or a.device.type == "meta"]


def away(state):
    """Types of the devices that the leaves of a state lie on, aside from what lives on the host anywhere."""
    return {leaf.device.type for leaf in ft.tree.leaves((state.params, state.buffers, state.opt_state, state.slots))}


@check
def it_has_no_record_until_one_is_registered(name, module):
    if name != "toy":
        return name in backends.names()
    try:
        backends.get(name)
    except DeviceError as error:
        said = "private_use('toy')" in str(error) and "registered are cpu" in str(error)
    backends.register(backends.private_use(name, fused_optimizers=True))
    return said and backends.default().name == name and backends.of(torch.device(name, 0)).device.type == name


@check
def it_trains_as_the_cpu_to_the_bit(name, module):
    ours, losses = plain(name, 2)
    theirs, needed = plain("cpu", 2)
    assert away(ours) == {name}, away(ours)
    return losses == needed and not differ(ours, theirs) and len(set(losses)) == len(losses)


@check
def generators_are_put_back(name, module):
    before = module.get_rng_state(), torch.get_rng_state()
    train(name)
    return torch.equal(module.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])


@check
def without_fused_kernels_it_is_the_formula(name, module):
    fused, host = backends.get(name), backends.get("cpu")
    try:
        for record in (fused, host):
            backends.register(dataclasses.replace(record, fused_optimizers=False))
        ours, losses = train(name)
        theirs, needed = train("cpu")
    finally:
        backends.register(fused)
        backends.register(host)
    return losses == needed and not differ(ours, theirs)


@check
def it_compiles_with_the_compiler_of_its_record(name, module):
    def compiled(device, **options):
        loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()  # noqa: E731
        step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1, momentum=0.9)), ft.compiled(donate=True, **options))
        state = step.init({"w": torch.linspace(-1, 1, 48).reshape(16, 3)}, device=device)
        return ft.fit(step, state, batches(), progress=False)

    ours, history = compiled(name)
    theirs, needed = compiled("cpu", backend="aot_eager")
    return history["loss"] == needed["loss"] and not differ(ours, theirs)


@check
def mixed_precision(name, module):
    found = {}
    for dtype, wide in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        seen = set()

        def watched(model, batch, seen=seen):
            out = model(batch)
            seen.add(out.dtype)
            return (out.float() ** 2).mean()

        torch.manual_seed(0)
        step = ft.train_step(ft.from_module(Net(), watched), ft.optim.adamw(1e-2))
        step = ft.compose(step, ft.with_amp(dtype))
        state, history = ft.fit(step, step.init(device=name), batches(), progress=False)
        kept = {leaf.dtype for leaf in ft.tree.leaves(state.params)} == {torch.float32}
        found[dtype] = seen == {wide} and kept and history["loss"][-1] < history["loss"][0] * 0.8
    return all(found.values())


@check
def what_it_lacks_is_an_error(name, module):
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
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            host, _ = resumed("cpu", 5)
    assert len(history["loss"]) == 5
    assert away(state) == {name}
    assert [f"device: {name}, now cpu" in str(each.message) for each in said] == [True]
    return history["loss"] == plain("cpu")[1] and not differ(state, plain("cpu")[0]) and not differ(state, host)


@check
def evaluation(name, module):
    loss_fn = ft.from_module(Net(), criterion)
    found = []
    for device in (name, "cpu"):
        state, _ = plain(device)
        found.append(ft.evaluate(ft.eval_step(loss_fn), state, [ft.tree.to(batch, device) for batch in batches()]))
    return found[0] == found[1] and found[0]["loss"] < plain(name)[1][0]


@check
def without_float64_it_trains_by_fused_kernels(name, module):
    """The formulas count in float64; so do graphs, evaluation, and the optimizers that have no kernel."""
    record = backends.get(name)
    module.float64 = False
    try:
        backends.register(dataclasses.replace(record, fused_optimizers=True, float64=False))
        _, losses = train(name, ft.accumulate(2))
    finally:
        module.float64 = True
        backends.register(record)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain("cpu", 2)[1]), rtol=1e-5, atol=1e-6)
    return True


@check
def memory_is_counted(name, module):
    before = backends.get(name).memory()
    block = torch.ones(2**16, device=name)
    during = backends.get(name).memory()
    del block
    after = backends.get(name).memory()
    return during.current == before.current + 2**18 <= during.peak == after.peak and after.current == before.current


@check
def the_doctor_examines_it(name, module):
    doctor.SMALLEST = doctor.LARGEST = 64
    doctor.COPIED = 1 << 12
    told = "\n".join(doctor.report([name]))
    return "fails" not in told and f"\n{name}\n  device         Toy\n  autocast       bfloat16, float16\n" in told


@check
def a_module_that_lacks_a_function_has_no_record(name, module):
    given, module_type = type(module).manual_seed, type(module)
    try:
        del module_type.manual_seed
        backends.private_use(name)
    except OptionError as error:
        return "manual_seed" in str(error)
    finally:
        module_type.manual_seed = given
    return False


def main(name="toy"):
    if name == "toy":
        from tests.backends import toy

        module = toy.register()
    else:
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        backends.get(name)
        module = torch.get_device_module(name)
        # By the formula on both sides: what is the vendor's own is not known to be the same to the bit.
        backends.register(dataclasses.replace(backends.get("cpu"), fused_optimizers=False))
    found = {}
    for label in CHECKS if name == "toy" else BY_RECORD:
        try:
            found[label] = CHECKS[label](name, module)
        except Exception:  # Told to the test that runs this.
            found[label] = traceback.format_exc()[-1500:]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
