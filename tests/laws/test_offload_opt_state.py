"""With the state of the optimizer in files, a step gives the same bits, and its state can be saved and resumed."""

import ctypes
import errno
import os
import subprocess
import sys
import types

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.backends import transfers
from ftrain.backends.transfers import is_in_file
from ftrain.errors import BatchError, ComposeError, DeviceError, OptionError, StructureError
from ftrain.optim import offloaded as module
from ftrain.optim.partial_update import by_size
from ftrain.types import Optimizer
from tests.bits import assert_same_bits
from tests.laws.models import make_batch
from tests.laws.optimizer_steps import build as build_optimizer
from tests.laws.optimizer_steps import train as train_optimizer
from tests.laws.optimizers import COMBINED, OPTIMIZERS
from tests.laws.pipelines import build, train

COMPATIBLE = ("bf16", "remat", "accumulate", "clip", "ema", "swa")


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Update the models in several groups; by default they are small enough for a single one."""
    monkeypatch.setattr(module, "_groups", lambda leaves: by_size(leaves, 200))


def offloaded(path, **options):
    """Return the wrapper with the state in files in `path`, leaves of any size included."""
    return ft.offload("opt_state", directory=path, **{"min_bytes": 0, **options})


def vectors(state):
    """Return the leaves of the state of the optimizer that are not scalars, such as its moments."""
    return [leaf for leaf in tree.leaves(state.opt_state) if leaf.ndim]


def in_files(state):
    """Return for each of the `vectors` whether it is in a file."""
    return [is_in_file(leaf) for leaf in vectors(state)]


@pytest.mark.parametrize("name", OPTIMIZERS | COMBINED)
def test_no_bit_changes_with_any_optimizer(name, tmp_path):
    for more in ((), (ft.donated(),)):
        actual = train_optimizer(build_optimizer(name, offloaded(tmp_path), *more), torch.float32)
        assert_same_bits(actual, train_optimizer(build_optimizer(name, *more), torch.float32))
        assert all(is_in_file(leaf) for leaf in vectors(actual) if leaf.numel())
    assert not os.listdir(tmp_path)


MORE = {"": (), "donated": (ft.donated(),), "in backward": (ft.update_in_backward(),)}
PIPELINES = [
    pytest.param(names, more, id=f"{'+'.join(names) or 'plain'}-{label}")
    for names in [(), *((name,) for name in COMPATIBLE), COMPATIBLE]
    for label, more in MORE.items()
    # `update_in_backward` refuses wrappers that need all gradients.
    if label != "in backward" or not {"accumulate", "clip"} & set(names)
]


@pytest.mark.parametrize(("names", "more"), PIPELINES)
def test_no_bit_changes_beside_other_wrappers(names, more, tmp_path):
    _, plain = build(names, *more)
    for wrappers in ((*more, offloaded(tmp_path)), (offloaded(tmp_path), *more)):
        state, _ = train(build(names, *wrappers)[1])
        assert_same_bits(state, train(plain)[0])
        assert all(in_files(state))


@pytest.mark.parametrize(
    ("names", "donate"),
    [
        pytest.param((), False, marks=pytest.mark.exhaustive, id="plain"),
        pytest.param(("bf16", "accumulate", "clip", "ema"), True, id="donated pipeline"),
    ],
)
def test_only_the_loss_is_compiled(names, donate, tmp_path):
    donated = [ft.donated()] if donate else []
    _, plain = build(names, *donated, blocks=1)
    compiled = ft.compiled(backend="eager", donate=donate)
    _, compiled_outside = build(names, offloaded(tmp_path), compiled, blocks=1)
    _, step = build(names, compiled, offloaded(tmp_path), blocks=1)
    options = "split, donate" if donate else "split"
    for text in (repr(step), repr(compiled_outside)):
        assert f"compiled({options})  # the loss alone" in text
    state, _ = train(step)
    assert_same_bits(state, train(plain)[0])
    assert all(in_files(state))
    lowered = step.lower(step.init(), make_batch(0))
    assert (lowered.lowering, lowered.graphs) == ("split", 1)


def test_a_compiled_loss_counts_its_graphs(tmp_path):
    def loss(params, batch):
        return (params["w"] * batch).sum()

    step = ft.compose(
        ft.train_step(loss, optim.adamw(0.1)), offloaded(tmp_path), ft.compiled(backend="eager", max_graphs=1)
    )
    state, _ = step(step.init({"w": torch.ones(4, 1)}), torch.ones(4, 3))
    with pytest.raises(BatchError, match="max_graphs is 1"):
        step(state, torch.ones(4, 2))


def test_a_donated_state_keeps_its_memory(tmp_path):
    _, step = build((), offloaded(tmp_path), ft.donated())
    state = step.init()
    addresses = [leaf.data_ptr() for leaf in vectors(state)]
    state, _ = step(state, make_batch(0))
    assert [leaf.data_ptr() for leaf in vectors(state)] == addresses


def test_a_state_that_is_not_donated_is_unchanged(tmp_path):
    _, step = build((), offloaded(tmp_path))
    state, _ = train(step, 1)
    kept = tree.clone(state)
    new, _ = step(state, make_batch(1))
    assert_same_bits(state, kept)
    assert all(in_files(state))
    assert all(in_files(new))
    assert not {leaf.data_ptr() for leaf in vectors(new)} & {leaf.data_ptr() for leaf in vectors(state)}
    assert_same_bits(step(state, make_batch(1))[0], new)


def test_the_next_step_moves_a_copy_of_a_state_into_files(tmp_path):
    _, step = build((), offloaded(tmp_path), ft.donated())
    state, _ = train(step, 1)
    copy = tree.clone(state)
    assert not any(in_files(copy))
    assert_same_bits(copy, state)
    # The step copies a state that is not in its files, so that this one step needs memory for it.
    new, _ = step(copy, make_batch(1))
    assert all(in_files(new))
    assert_same_bits(new, step(state, make_batch(1))[0])


def test_leaves_smaller_than_min_bytes_stay_in_memory(tmp_path):
    _, step = build((), offloaded(tmp_path, min_bytes=8 * 50))
    placements = {(leaf.nbytes >= 400, is_in_file(leaf)) for leaf in vectors(step.init())}
    assert placements == {(True, True), (False, False)}
    assert not any(in_files(build((), ft.offload("opt_state", directory=tmp_path))[1].init()))


def test_fit_resumes_it_and_checkpoints_hold_it(tmp_path):
    def make():
        return build(("clip",), offloaded(tmp_path / "state"))[1]

    data = [make_batch(index) for index in range(4)]
    whole, _ = ft.fit(make(), make().init(), data, progress=False)
    for steps in (2, 4):
        checkpoints = ft.Checkpoints(tmp_path / "run", every=2)
        state, _ = ft.fit(make(), make().init(), data, steps=steps, checkpoints=checkpoints, progress=False)
    assert_same_bits(state, whole)
    assert all(in_files(state))
    ft.checkpoint.save(tmp_path / "saved", state)
    step = make()
    loaded = ft.checkpoint.load(tmp_path / "saved", like=step.init(seed=1))
    assert_same_bits(loaded, state)
    assert_same_bits(step(loaded, data[0])[0], step(state, data[0])[0])


def test_a_state_of_the_step_without_it_is_accepted(tmp_path):
    _, plain = build(())
    _, step = build((), offloaded(tmp_path))
    state, _ = train(plain, 1)
    new, _ = step(state, make_batch(1))
    assert_same_bits(new, plain(state, make_batch(1))[0])
    assert all(in_files(new))
    other = ft.compose(ft.train_step(plain.base, optim.sgd(0.1)), offloaded(tmp_path))
    with pytest.raises(StructureError, match="opt_state"):
        other(state, make_batch(0))


MEASURE_MEMORY = """
import ctypes, gc, sys
import torch
import ftrain as ft

def anonymous():
    # Memory that was freed, but is kept by the allocator, must not count.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def step(*wrappers):
    loss = lambda params, batch: sum(leaf.sum() for leaf in params.values()) * batch
    return ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), *wrappers, ft.donated())

params = {str(index): torch.zeros(1 << 22) for index in range(4)}
# The first step of a process starts threads and imports modules, which stay.
step()(step().init(params), torch.ones(()))
for wrappers in ((), (ft.offload("opt_state", directory=sys.argv[1]),)):
    before, measured = anonymous(), step(*wrappers)
    state, _ = measured(measured.init(params), torch.ones(()))
    print((anonymous() - before) / sum(leaf.nbytes for leaf in params.values()))
    del state
"""


def test_on_linux_with_glibc_the_state_is_not_in_memory_outside_of_files(tmp_path):
    """As multiples of the parameters: these and two moments without it, the parameters alone with it.

    Linux counts the memory of a process that is not of a file. It is a new process, where no other test frees memory.
    """
    if not os.path.exists("/proc/self/status") or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this system does not count anonymous memory")
    command = [sys.executable, "-c", MEASURE_MEMORY, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [float(multiple) for multiple in output.split()] == pytest.approx([3, 1], abs=0.5)


# What it refuses


def test_options_out_of_range_are_refused():
    with pytest.raises(OptionError, match=r"offload: what is 'params'; choices are .*opt_state"):
        ft.offload("params")
    for min_bytes in (-1, True):
        with pytest.raises(OptionError, match=r"offload: min_bytes is .*, needs a number in \[0, inf\)"):
            ft.offload("opt_state", min_bytes=min_bytes)
    with pytest.raises(ComposeError, match=r"offload\(opt_state.* already"):
        build((), ft.offload("opt_state"), ft.offload("opt_state"))


def test_a_state_that_is_on_the_host_needs_a_directory():
    _, step = build((), ft.offload("opt_state"))
    with pytest.raises(DeviceError, match=r"offload\(opt_state\): the state is on the host already .*directory="):
        step.init()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"offload: directory='.*file' cannot be written"):
        ft.offload("opt_state", directory=tmp_path / "file")
    with pytest.raises(OptionError, match="offload: directory is 3, needs a path"):
        ft.offload("opt_state", directory=3)


@pytest.mark.parametrize("fails", ["before allocation", "in allocation"])
def test_a_full_disk_raises_with_the_sizes_and_leaves_no_file(fails, tmp_path, monkeypatch):
    step = build((), offloaded(tmp_path))[1]
    if fails == "before allocation":
        monkeypatch.setattr(transfers.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3))
    else:

        def allocate(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(transfers.os, "posix_fallocate", allocate)
    with pytest.raises(
        DeviceError, match=r"offload: .* [KMG]?i?B left, and the next tensor needs .* [KMG]?i?B; free some space"
    ) as error:
        step.init()
    assert ("The system says: [Errno 28] No space left" in str(error.value)) == (fails == "in allocation")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("first", [True, False])
def test_wrappers_that_may_refuse_an_update_are_refused(first, tmp_path):
    for wrapper, message in (
        (ft.skip_nonfinite(), r"skip_nonfinite\(10\) may refuse an update"),
        (ft.with_amp("fp16"), r"with_amp\(fp16\) may refuse an update"),
    ):
        wrappers = (offloaded(tmp_path), wrapper)
        with pytest.raises(ComposeError, match=rf"offload\(opt_state, .*\): {message}.*leave out one of the two"):
            build((), *wrappers[:: 1 if first else -1])


@pytest.mark.parametrize("first", [True, False])
def test_a_whole_graph_is_refused(first, tmp_path):
    for others, left_out in (
        ([ft.compiled(lowering="whole")], "lowering='whole'"),
        ([ft.compiled(), ft.update_in_backward()], "update_in_backward"),
    ):
        wrappers = [*others, offloaded(tmp_path)]
        with pytest.raises(
            ComposeError, match=rf"compiled: no graph can hold the state of adamw.*leave out {left_out}"
        ):
            build((), *wrappers[:: 1 if first else -1])


def test_an_optimizer_that_needs_all_leaves_is_refused(tmp_path):
    homemade = Optimizer(lambda params: (), lambda *args, **kwargs: None, {}, "homemade")
    with pytest.raises(ComposeError, match=r"offload\(opt_state.*\): homemade cannot update some parameters without"):
        offloaded(tmp_path)(ft.train_step(lambda params, batch: params["w"].sum(), homemade))


def test_it_prints_and_anatomy_does_not_count_its_files(tmp_path):
    step = ft.compose(ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.adamw(0.1)), offloaded(tmp_path))
    assert f"update  adamw(constant(0.1)) <- offload(opt_state, {tmp_path})" in repr(step)
    state = ft.donated()(step).init({"w": torch.ones(10_000)})
    for measured, next_state in ((ft.donated()(step), 0), (step, 40_100)):
        report = ft.anatomy(measured, state, torch.ones(()), measure=False)
        assert report.most["parameters"] == 40_000
        assert report.most["optimizer state"] < 100
        assert report.most.get("next state", 0) <= next_state
