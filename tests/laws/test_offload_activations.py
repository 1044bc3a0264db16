"""Offloading activations to the host changes no bit, and copies each activation once, or not if it exists anyway.

A CPU is its own host: the copies are from memory to memory, and everything else is as on a device.
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
from tests.bits import assert_same_bits
from tests.laws.models import make_batch
from tests.laws.pipelines import build, train
from tests.laws.registry import ALONE, STACKS
from tests.laws.remat_model import BATCH, Stages, criterion
from tests.laws.remat_model import make_batch as make_stages_batch


def offloaded(**options):
    """Return the wrapper without its check that the device is not the host."""
    return dataclasses.replace(ft.offload("activations", **{"min_bytes": 0, **options}), require=None)


@pytest.fixture
def sent(monkeypatch):
    """The sizes in bytes of the copies to the host, in their order."""
    sizes = []
    out = transfers.BlockingCopier.out

    def recording_out(self, source, target):
        sizes.append(source.nbytes)
        out(self, source, target)

    monkeypatch.setattr(transfers.BlockingCopier, "out", recording_out)
    return sizes


def label(value):
    return ("outer", "inner")[value] if isinstance(value, bool) else "+".join(value) or "plain"


# A stack accepts both orders if each of its wrappers does, so `make test` has one order of the stacks.
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
        assert_same_bits(train(ft.compose(step, *more))[0], expected)
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
        assert_same_bits(actual, plain(plain.init(seed=3), make_stages_batch())[0])
    assert sent


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("lowering", "backend"),
    [pytest.param("split", "aot_eager", marks=pytest.mark.exhaustive), ("auto", "eager")],
)
def test_a_split_step_computes_the_same(backend, lowering, sent):
    _, plain = build((), ft.compiled(lowering="split", backend=backend), p=0.0, blocks=1)
    _, step = build((), offloaded(), ft.compiled(lowering=lowering, backend=backend), p=0.0, blocks=1)
    assert_same_bits(train(step)[0], train(plain)[0])
    assert sent
    assert "compiled(split" in repr(step)
    if lowering == "auto":
        assert "activations go to the host between operations" in repr(step)


def test_a_whole_graph_is_refused():
    _, step = build((), offloaded(), ft.compiled(lowering="whole", backend="eager"))
    with pytest.raises(TraceError, match="offload: activations go to the host between operations, and a whole graph"):
        step(step.init(), make_batch(0))


def test_no_bit_changes_beside_update_in_backward(sent):
    _, plain = build(("remat", "ema"))
    for order in (1, -1):
        step = ft.compose(plain, *(offloaded(), ft.update_in_backward())[::order])
        assert_same_bits(train(step)[0], train(plain)[0])
    assert sent


def one_step(loss, params, batch, **options):
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded(**options))
    plain = ft.train_step(loss, optim.sgd(0.1))
    actual, expected = step(step.init(params), batch), plain(plain.init(params), batch)
    assert_same_bits(actual[0], expected[0])
    return actual


def test_only_new_activations_are_sent_and_each_of_them_once(sent):
    def loss(params, batch):
        hidden = batch["x"] @ params["w"]  # Saves the batch and the parameter, which stay.
        a, b = hidden.chunk(2, -1)  # Views of one storage.
        wide = (a * b).exp()  # The product saves both views, exp saves its result.
        return (wide.t() @ wide + wide.cos().sum()).sum()  # The result is saved three times more.

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


def test_frozen_parameters_are_not_sent(sent):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight.requires_grad = False
    model[0].register_buffer("scale", torch.ones(8, 8))
    loss = ft.from_module(model, lambda m, x: (m[1](m[0](x)) @ m[0].scale).sum())
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded())
    step(step.init(), torch.ones(4, 8))
    # Only the buffer is sent: the module gets a copy of it, which it may write.
    assert sent == [4 * 8 * 8]


def test_the_input_of_a_block_is_sent_if_positional_or_keyword(sent):
    def loss(model, x):
        return (model[1](input=model[0](x * 2)) * 3).sum()

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    step = ft.compose(ft.train_step(ft.from_module(model, loss), optim.sgd(0.1)), ft.remat(), offloaded())
    step(step.init(), torch.ones(4, 8))
    assert sent == [4 * 4 * 8] * 2


def test_strides_dtypes_and_views_come_back_as_they_were(monkeypatch):
    packed_tensors = []
    pack, unpack = saved_tensors.ActivationOffloader.pack, saved_tensors.ActivationOffloader.unpack

    def packing(self, tensor):
        packed = pack(self, tensor)
        packed_tensors.append(
            (packed, tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.clone())
        )
        return packed

    def unpacking(self, packed):
        actual = unpack(self, packed)
        shape, stride, dtype, offset, value = next(rest for first, *rest in packed_tensors if first is packed)
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
    assert len(packed_tensors) > 10


def test_a_new_tensor_in_reused_memory_is_sent_again(sent):
    def loss(params, batch):
        total = 0
        for number in range(50):
            # Each result is gone when the next one is made, most often in the same place.
            total = total + ((params["w"] * number).exp() * batch).sum()
        return total

    one_step(loss, {"w": torch.randn(300) / 100}, torch.randn(300))
    assert len(sent) >= 50


@pytest.mark.parametrize("options", [{}, {"min_bytes": 1 << 20}])
def test_writing_over_a_saved_tensor_raises(options):
    def loss(params, batch):
        x = params["w"].exp()
        y = x * 2
        x.add_(1)
        return (y + x).sum()

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), offloaded(**options))
    with pytest.raises(LossError, match="offload: a tensor that a gradient needs was changed in place"):
        step(step.init({"w": torch.ones(9)}), torch.ones(9))


def test_a_tensor_that_is_written_before_it_is_saved_has_its_new_values(sent):
    def loss(params, batch):
        x = params["w"] * 3
        aside = x * x  # Saves the old values, but its gradient is never computed.
        y = x.view(-1)
        y.mul_(2).exp_()
        return (F.relu(x * batch, inplace=True) * x).sum(), {"aside": aside.detach().sum()}

    one_step(loss, {"w": torch.randn(3, 3)}, torch.randn(3, 3))


def test_host_memory_is_freed_after_the_step(monkeypatch):
    storages = []
    initialise = saved_tensors._HostStorage.__init__

    def recording_init(self, *args):
        initialise(self, *args)
        storages.append(weakref.ref(self))

    monkeypatch.setattr(saved_tensors._HostStorage, "__init__", recording_init)
    _, step = build(("remat",), offloaded())
    train(step, 1)
    assert storages
    assert all(reference() is None for reference in storages)


def test_the_device_holds_few_activations():
    torch.manual_seed(0)
    loss = ft.from_module(Stages(0.0, stages=6, blocks=2), criterion)
    step = ft.train_step(loss, optim.sgd(0.1))
    batch = make_stages_batch(batch=8 * BATCH)
    plain = ft.anatomy(step, step.init(), batch, measure=False)
    report = ft.anatomy(offloaded()(step), step.init(), batch, measure=False)
    assert report.most["activations"] < 0.1 * plain.most["activations"]
    assert report.peak < 0.5 * plain.peak


def test_a_device_that_is_the_host_is_refused():
    _, step = build((), ft.offload("activations"))
    with pytest.raises(DeviceError, match=r"offload\(activations\): the device is the host itself .*ft.remat\(\)"):
        step.init()
    with pytest.raises(DeviceError, match=r"offload\(activations\)"):
        step(build(())[1].init(), make_batch(0))


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"offload: directory=.* is for 'opt_state'; activations go to host memory"):
        ft.offload("activations", directory=tmp_path)
    with pytest.raises(OptionError, match=r"offload: what is 'gradients'; choices are activations, opt_state"):
        ft.offload("gradients")


def test_the_wrapper_prints_in_the_line_of_the_gradient():
    _, step = build(("clip",), offloaded())
    assert "grad    value_and_grad <- clip(norm<=0.05) <- offload(activations)" in repr(step)
    assert tree.leaves(step.init().params)
