"""Activations that go to the host and come back change no bit, and go once, if they have to go at all.

A CPU is its own host; the copies are then from memory to memory, and everything else is as on a device.
"""

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain.backends import transfers
from ftrain.errors import DeviceError, LossError, OptionError, TraceError
from ftrain.transforms.offload import saved_tensors
from tests.laws.models import make_batch
from tests.laws.registry import ALONE, STACKS
from tests.laws.test_pipelines import assert_equal, build, train
from tests.laws.test_remat import BATCH, Stages, criterion
from tests.laws.test_remat import make_batch as make_stages_batch


def offloaded(**options):
    """The wrapper on a device that is its own host."""
    return dataclasses.replace(ft.offload("activations", **{"min_bytes": 0, **options}), require=None)


@pytest.fixture
def sent(monkeypatch):
    """The sizes in bytes of what is sent to the host."""
    sizes = []
    out = transfers.BlockingCopier.out

    def counting(self, source, target):
        sizes.append(source.nbytes)
        out(self, source, target)

    monkeypatch.setattr(transfers.BlockingCopier, "out", counting)
    return sizes


def label(value):
    return ("outer", "inner")[value] if isinstance(value, bool) else "+".join(value) or "plain"


# A stack takes no order that is not that of one of its wrappers.
@pytest.mark.parametrize(
    ("first", "names"),
    [
        *((first, names) for first in (True, False) for names in ALONE),
        *((False, names) for names in STACKS),
        *(pytest.param(True, names, marks=pytest.mark.exhaustive) for names in STACKS),
    ],
    ids=label,
)
def test_no_bit_changes_beside_other_wrappers(names, first, sent):
    _, plain = build(names)
    if first:
        _, step = build((), offloaded())
        step = ft.compose(step, *build(names)[1].wrappers)
        if {"bf16", "fp16"} & set(names):
            step = dataclasses.replace(plain, wrappers=(offloaded(), *plain.wrappers))
    else:
        _, step = build(names, offloaded())
    expected, _ = train(plain)
    for more in ((), (ft.donated(),)):
        assert_equal(train(ft.compose(step, *more))[0], expected)
    assert sent


REMATS = {
    **{policy: ft.remat(policy) for policy in ("full", "dots", "none")},
    "budget": ft.remat(budget=0.5),
    "nested": ft.remat(blocks=["stages.0", "stages.0.1", "stages.1"]),
}


@pytest.mark.parametrize("name", REMATS)
def test_no_bit_changes_beside_remat(name, sent):
    torch.manual_seed(0)
    loss, remat = ft.from_module(Stages(0.3).double(), criterion), REMATS[name]
    plain = ft.train_step(loss, optim.sgd(0.1))
    for wrappers in ((remat, offloaded()), (offloaded(), remat)):
        step = ft.compose(plain, *wrappers)
        actual, _ = step(step.init(seed=3), make_stages_batch())
        assert_equal(actual, plain(plain.init(seed=3), make_stages_batch())[0])
    assert sent


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("lowering", "backend"),
    [pytest.param("split", "aot_eager", marks=pytest.mark.exhaustive), ("auto", "eager")],
)
def test_a_split_step_computes_the_same(backend, lowering, sent):
    _, plain = build((), ft.compiled(lowering="split", backend=backend), p=0.0, blocks=1)
    _, step = build((), offloaded(), ft.compiled(lowering=lowering, backend=backend), p=0.0, blocks=1)
    assert_equal(train(step)[0], train(plain)[0])
    assert sent
    assert "compiled(split" in repr(step)
    if lowering == "auto":
        assert "activations go to the host between operations" in repr(step)


def test_a_whole_graph_is_refused():
    _, step = build((), offloaded(), ft.compiled(lowering="whole", backend="eager"))
    with pytest.raises(TraceError, match="offload: activations go to the host between operations, and a whole graph"):
        step(step.init(), make_batch(0))


def test_gradients_are_pulled_beside_it(sent):
    _, plain = build(("remat", "ema"))
    for order in (1, -1):
        step = ft.compose(plain, *(offloaded(), ft.update_in_backward())[::order])
        assert_equal(train(step)[0], train(plain)[0])
    assert sent


def one_step(loss, params, batch, **options):
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded(**options))
    plain = ft.train_step(loss, optim.sgd(0.1))
    actual, expected = step(step.init(params), batch), plain(plain.init(params), batch)
    assert_equal(actual[0], expected[0])
    return actual


def test_what_is_there_anyway_stays_and_what_goes_goes_once(sent):
    def loss(params, batch):
        hidden = batch["x"] @ params["w"]  # Keeps the batch and the parameter.
        a, b = hidden.chunk(2, -1)  # Views.
        wide = (a * b).exp()  # Keeps both, and then its own result,
        return (wide.t() @ wide + wide.cos().sum()).sum()  # which is kept three times more.

    draw = torch.Generator().manual_seed(0)
    params, batch = {"w": torch.randn(8, 16, generator=draw)}, {"x": torch.randn(32, 8, generator=draw)}
    one_step(loss, params, batch)
    assert sorted(sent) == [4 * 32 * 8, 4 * 32 * 16]
    sent.clear()
    one_step(loss, params, batch, min_bytes=4 * 32 * 16)
    assert sent == [4 * 32 * 16]
    sent.clear()
    one_step(loss, params, batch, min_bytes=4 * 32 * 16 + 1)
    assert not sent


def test_frozen_parameters_and_buffers_stay(sent):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.requires_grad = False
    model[0].register_buffer("scale", torch.ones(8, 8))
    loss = ft.from_module(model, lambda m, x: (m[1](m[0](x)) @ m[0].scale).sum())
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded())
    step(step.init(), torch.ones(4, 8))
    # A buffer is given to the module as a copy, which it may write.
    assert sent == [4 * 8 * 8]


def test_the_input_of_a_block_goes_however_it_is_given(sent):
    def loss(model, x):
        return (model[1](input=model[0](x * 2)) * 3).sum()

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    step = ft.compose(ft.train_step(ft.from_module(model, loss), optim.sgd(0.1)), ft.remat(), offloaded())
    step(step.init(), torch.ones(4, 8))
    assert sent == [4 * 4 * 8] * 2


def test_strides_dtypes_and_views_come_back_as_they_were(monkeypatch):
    seen = []
    pack, unpack = saved_tensors.ActivationOffloader.pack, saved_tensors.ActivationOffloader.unpack

    def packing(self, tensor):
        packed = pack(self, tensor)
        seen.append((packed, tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.clone()))
        return packed

    def unpacking(self, packed):
        actual = unpack(self, packed)
        shape, stride, dtype, offset, value = next(known[1:] for known in seen if known[0] is packed)
        assert (actual.shape, actual.stride(), actual.dtype) == (shape, stride, dtype)
        assert actual.storage_offset() == offset or isinstance(packed, saved_tensors._Resident)
        assert torch.equal(actual, value)
        return actual

    monkeypatch.setattr(saved_tensors.ActivationOffloader, "pack", packing)
    monkeypatch.setattr(saved_tensors.ActivationOffloader, "unpack", unpacking)

    def loss(params, batch):
        x = torch.sin(params["w"] * batch)
        parts = x.t()[1:, ::2] * x.expand(2, 6, 4)[0, :3, :3].t().double()
        narrow = (x[:, 1:].bfloat16() * x[:, 1:].bfloat16()).float()
        waves = torch.complex(x, x * 2).conj() * torch.complex(x, x)
        where = torch.where(x > 0, x * x, x)
        empty = x[:0] * x[:0]
        return sum(part.sum() for part in (parts.float(), narrow, waves.real, where, empty, x[2, 1] * x[1, 2]))

    one_step(loss, {"w": torch.randn(6, 4)}, torch.randn(6, 4))
    assert len(seen) > 10


def test_memory_that_is_used_again_is_not_taken_for_what_it_was(sent):
    def loss(params, batch):
        total = 0
        for number in range(50):
            # Each result is gone when the next one is made, most often in the same place.
            total = total + ((params["w"] * number).exp() * batch).sum()
        return total

    one_step(loss, {"w": torch.randn(300) / 100}, torch.randn(300))
    assert len(sent) >= 50


@pytest.mark.parametrize("options", [{}, {"min_bytes": 1 << 20}])
def test_what_is_written_after_it_was_kept_is_an_error(options):
    def loss(params, batch):
        x = params["w"].exp()
        y = x * 2
        x.add_(1)
        return (y + x).sum()

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded(**options))
    with pytest.raises(LossError, match="offload: a tensor that a gradient needs was changed in place"):
        step(step.init({"w": torch.ones(9)}), torch.ones(9))


def test_what_is_written_before_it_is_kept_is_kept_as_it_is(sent):
    def loss(params, batch):
        x = params["w"] * 3
        aside = x * x  # Keeps what was there, and nobody asks for its gradient.
        y = x.view(-1)
        y.mul_(2).exp_()
        return (F.relu(x * batch, inplace=True) * x).sum(), {"aside": aside.detach().sum()}

    one_step(loss, {"w": torch.randn(3, 3)}, torch.randn(3, 3))


def test_nothing_of_a_step_stays_behind():
    held = []
    make = saved_tensors._HostStorage.__init__

    def making(self, *args):
        make(self, *args)
        held.append(weakref.ref(self))

    saved_tensors._HostStorage.__init__ = making
    try:
        _, step = build(("remat",), offloaded())
        train(step, 1)
    finally:
        saved_tensors._HostStorage.__init__ = make
    assert held
    assert not [reference for reference in held if reference() is not None]


def test_memory_of_a_device_is_less_by_what_is_sent():
    torch.manual_seed(0)
    loss = ft.from_module(Stages(0.0, stages=6, blocks=2), criterion)
    actual = [
        ft.anatomy(step, step.init(), make_stages_batch(batch=8 * BATCH), measure=False)
        for step in (ft.train_step(loss, optim.sgd(0.1)), offloaded()(ft.train_step(loss, optim.sgd(0.1))))
    ]
    assert actual[1].most["activations"] < 0.1 * actual[0].most["activations"]
    assert actual[1].peak < 0.5 * actual[0].peak


def test_the_host_itself_has_nowhere_to_send_them():
    _, step = build((), ft.offload("activations"))
    with pytest.raises(DeviceError, match=r"offload\(activations\): the device is the host itself .*ft.remat\(\)"):
        step.init()
    with pytest.raises(DeviceError, match=r"offload\(activations\)"):
        step(build(())[1].init(), make_batch(0))


def test_what_it_refuses(tmp_path):
    with pytest.raises(OptionError, match=r"offload: directory=.* is for 'opt_state'; activations go to host memory"):
        ft.offload("activations", directory=tmp_path)
    with pytest.raises(OptionError, match=r"offload: what is 'gradients'; choices are activations, opt_state"):
        ft.offload("gradients")


def test_it_prints():
    _, step = build(("clip",), offloaded())
    assert "grad    value_and_grad <- clip(norm<=0.05) <- offload(activations)" in repr(step)
    assert tree.leaves(step.init().params)
