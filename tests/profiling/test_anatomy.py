"""Anatomy: the predicted memory equals the memory that torch's profiler measures, or that is computed by hand."""

import dataclasses
import functools
import itertools
import json
import signal
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ftrain as ft
from ftrain import optim, tree
from ftrain._torch import FakeTensorMode, active_modes
from ftrain._torch.fake import uninterrupted
from ftrain.errors import ComposeError, FtrainError, OptionError, StructureError, TraceError
from ftrain.optim import grouping
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.module_path import RunningModule
from ftrain.profiling.step_variants import nbytes
from ftrain.step.core import Eager
from ftrain.step.flops import CONTRACTION, ELEMENTWISE, GROUPS, MOVEMENT, NORMALISATION, group_of
from ftrain.transforms.compile import capture
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.profiling import problem


class Block(nn.Module):
    def __init__(self, width, causal):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.causal = causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    def __init__(self, causal, width=64, words=512):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, causal) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(causal):
    """Return the loss of a small Transformer, and a batch."""
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randint(512, (8, 64), generator=draw)}
    loss = ft.from_module(
        Transformer(causal),
        lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten()),
    )
    return loss, batch


def images():
    """Return the loss of a small convolutional net, and a batch."""

    def stage(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(stage(3, 16), stage(16, 32), nn.Flatten(), nn.Linear(32 * 8 * 8, 10))
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(32, 3, 32, 32, generator=draw), "y": torch.randint(10, (32,), generator=draw)}
    return ft.from_module(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])), batch


MODELS = {"gpt": lambda: words(True), "bert": lambda: words(False), "convnet": images}
WRAPPERS = {
    "plain": (),
    "donated": (ft.donated(),),
    "bf16": (ft.with_amp("bf16"),),
    "fp16": (ft.with_amp("fp16"),),
    "remat": (ft.remat(),),
    "dots": (ft.remat("dots"),),
    "attention": (ft.remat("attention"),),
    "budget": (ft.remat(budget=0.5),),
    "update in backward": (ft.update_in_backward(), ft.donated()),
    "by value": (ft.clip(value=0.01),),
    "clip within": (ft.clip(1.0), ft.accumulate(2)),
    "watched": (ft.with_amp("bf16", watch=True),),
    "accumulate": (ft.accumulate(4),),
    "clip": (ft.clip(1.0),),
    "ema": (ft.ema(),),
    "swa": (ft.swa(),),
    "skip": (ft.skip_nonfinite(),),
    "all": (ft.remat(), ft.with_amp("bf16"), ft.accumulate(2), ft.clip(1.0), ft.ema(), ft.donated()),
    "others": (ft.remat("dots"), ft.clip(value=0.01), ft.skip_nonfinite(), ft.swa()),
}


def build(model, wrapper, optimizer=None, **options):
    loss, batch = MODELS[model]()
    wrappers = WRAPPERS[wrapper]
    if model == "convnet":
        # Its stages are no repeated blocks that `remat` can find by itself.
        remat_options = {"dots": {"policy": "dots"}, "budget": {"budget": 0.5}}.get(wrapper, {})
        remat = ft.remat(**remat_options, blocks=["0", "1"])
        wrappers = [remat if each.name == "remat" else each for each in wrappers]
    step = ft.compose(ft.train_step(loss, optimizer or optim.adamw(1e-3), **options), *wrappers)
    return step, batch


class LivePeak(TorchDispatchMode):
    """Records the most bytes of live tensors in a real run, without the memory that kernels allocate for themselves."""

    def __init__(self, trees):
        super().__init__()
        self.peak, self.live = 0, {}
        self.add(trees)

    def add(self, trees):
        for leaf in tree.leaves(trees):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key)
        self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self.add(returned)
        return returned


def live_peak(step, state, batch):
    """Return the peak of the live tensors of a step that runs eagerly."""
    if step.donate:
        state = tree.clone(state)
    state = dataclasses.replace(state, step=0, rng=None)
    hyper = {name: float(schedule(0)) for name, schedule in step.optimizer.schedules.items()}
    mode = LivePeak((state.params, state.frozen, state.buffers, state.opt_state, state.slots, batch))
    with step.loss.scope(True), mode:
        Eager(step)(state, batch, hyper, (0, 0))
    return mode.peak


CHOSEN = {
    "gpt": {"plain", "fp16", "attention", "budget", "update in backward", "clip within", "watched", "all", "others"},
    "bert": {"remat"},
    "convnet": {"plain", "bf16", "remat"},
}
"""The cases of `make test`: with one model every wrapper, some only within a stack; with the others a few."""


@pytest.mark.parametrize(
    ("model", "wrapper"),
    [
        pytest.param(model, wrapper, marks=[] if wrapper in CHOSEN[model] else pytest.mark.exhaustive)
        for model, wrapper in itertools.product(MODELS, WRAPPERS)
    ],
)
def test_the_predicted_peak_equals_the_measured_one(model, wrapper):
    step, batch = build(model, wrapper)
    state = step.init()
    before = tree.clone(state)
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.peak == sum(anatomy.at_peak.values())
    assert anatomy.measured_ratio == anatomy.measured / anatomy.peak
    for a, b in zip(tree.leaves(before), tree.leaves(state), strict=True):
        assert torch.equal(a, b)
    if model == "convnet":
        # The memory that kernels of convolutions allocate for themselves differs from one CPU to another.
        assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005)
        assert anatomy.measured > 0.995 * anatomy.peak
    else:
        assert anatomy.measured_ratio == pytest.approx(1, abs=0.05), anatomy


class Residual(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norms = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norms(self.second(F.relu(self.norm(self.first(x))))) + self.short(x))


def upscaled():
    return nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 3, 1, 1))


CONVOLUTIONS = {
    "to a few channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 3, 3, 1, 1)),
        (8, 3, 48, 48),
    ),
    "upscaled": (upscaled, (8, 8, 32, 32)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(16, 64, 5, 1, 2), nn.GELU(), nn.Conv1d(64, 16, 5)), (32, 16, 256)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(4, 16, 3), nn.ReLU(), nn.Conv3d(16, 4, 3)), (4, 4, 16, 16, 16)),
}


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        *((name, "plain") for name in CONVOLUTIONS),
        ("upscaled", "fp16"),
        *exhaustive_rows((name, "fp16") for name in CONVOLUTIONS if name != "upscaled"),
    ],
)
def test_the_memory_of_other_convolutions_is_predicted(name, wrapper):
    make, shape = CONVOLUTIONS[name]
    loss = ft.from_module(make(), lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *WRAPPERS[wrapper])
    state, batch = step.init(), {"x": torch.randn(shape)}
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005), anatomy
    assert anatomy.measured > 0.995 * anatomy.peak
    assert anatomy.overhead == anatomy.measured - anatomy.peak


@pytest.mark.parametrize("wrapper", ["plain", "remat", *exhaustive(["fp16", "bf16", "accumulate"])])
def test_the_memory_of_residual_convolutions_is_predicted(wrapper):
    body = nn.Sequential(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    loss = ft.from_module(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    wrappers = [ft.remat(blocks=["1.0", "1.1", "1.2"])] if wrapper == "remat" else WRAPPERS[wrapper]
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *wrappers)
    state, batch = step.init(), {"x": torch.randn(8, 3, 32, 32), "y": torch.randint(10, (8,))}
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.peak == pytest.approx(live_peak(step, state, batch), rel=0.005), anatomy
    assert anatomy.measured > 0.995 * anatomy.peak


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("model", "wrappers", "options"),
    [
        pytest.param("small", (), {"lowering": "split"}, marks=pytest.mark.exhaustive),
        pytest.param("gpt", (ft.remat(),), {"lowering": "whole", "donate": True}, marks=pytest.mark.exhaustive),
        pytest.param("gpt", (), {"lowering": "split"}, marks=pytest.mark.exhaustive),
        pytest.param("bert", (ft.with_amp("bf16"),), {"lowering": "whole"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_step_takes_at_most_the_predicted_memory(model, wrappers, options):
    if model == "small":
        step, batch = problem.make(*wrappers, width=64), problem.batch(512, 64)
    else:
        loss, batch = MODELS[model]()
        step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *wrappers)
    step = ft.compiled(**options)(step)
    anatomy = ft.anatomy(step, step.init(), batch)
    assert anatomy.compiled
    assert anatomy.at_rest.total() < anatomy.measured
    assert anatomy.measured <= anatomy.peak, anatomy
    assert anatomy.measured_ratio == anatomy.measured / anatomy.peak


def test_the_measured_ratio_of_a_compiled_step_by_hand():
    """The one compiled kernel holds the parameters, the batch and the new parameters, and no activations."""
    size = 100_000
    step = ft.train_step(lambda params, batch: (params["w"] * batch).cos().exp().sum(), optim.sgd(0.1))
    state, batch = step.init({"w": torch.randn(size)}), torch.randn(size)
    eager, compiled = (ft.anatomy(each, state, batch) for each in (step, ft.compiled(lowering="whole")(step)))
    assert compiled.peak == eager.peak
    assert compiled.measured == pytest.approx(3 * 4 * size, abs=4096)
    assert compiled.measured_ratio == pytest.approx(3 * 4 * size / eager.peak, rel=0.01)
    assert compiled.measured_ratio < 0.7
    assert compiled.overhead is None
    assert (eager.compiled, compiled.compiled) == (False, True)
    text = repr(compiled)
    assert "predicted as if the step ran eagerly; compiled, it usually takes less; " in text
    assert f"measured ({compiled.measured_ratio:.1%} of it)" in text
    assert "The times are of operations that run outside of compiled kernels" in text
    assert "beyond" not in text
    numbers = compiled.as_dict()
    assert (numbers["compiled"], numbers["measured_ratio"]) == (True, compiled.measured_ratio)


OPTIONS = {}, {"lowering": "split"}, {"lowering": "whole", "donate": True}
COMPILED = {("gpt", "bf16"): OPTIONS, ("bert", "accumulate"): (), ("convnet", "remat"): ()}
"""`make test` runs each way to compile with one model, and `make test-all` with the other models too."""


@pytest.mark.parametrize(
    ("model", "wrapper", "options"),
    [
        pytest.param(*case, options, marks=[] if options in chosen else pytest.mark.exhaustive)
        for case, chosen in COMPILED.items()
        for options in OPTIONS
    ],
    ids=str,
)
def test_a_compiled_step_is_predicted_as_the_eager_one_without_compilation(model, wrapper, options, monkeypatch):
    step, batch = build(model, wrapper)
    compiled = ft.compiled(**options)(step)
    eager = ft.donated()(step) if options.get("donate") else step

    def never(*args, **kwargs):
        raise AssertionError("compiles")

    monkeypatch.setattr(torch, "compile", never)
    monkeypatch.setattr(capture, "capture", never)
    expected, actual = (ft.anatomy(each, each.init(), batch, measure=False) for each in (eager, compiled))
    assert actual.compiled
    assert not expected.compiled
    assert actual.measured_ratio is None
    assert {**actual.as_dict(), "compiled": False} == expected.as_dict()
    assert "predicted as if the step ran eagerly; compiled, it usually takes less\n" in repr(actual)


def test_a_constant_that_the_loss_holds_is_not_counted():
    """The measurement exceeds the prediction only by the state of torch's generator, which a step saves."""
    table = torch.randn(1000, 64)
    step = ft.train_step(lambda params, batch: (table.T @ params["w"]).cos().sum() * batch, optim.sgd(0.1))
    anatomy = ft.anatomy(step, step.init({"w": torch.randn(1000)}), torch.ones(()))
    assert anatomy.measured - anatomy.peak == torch.default_generator.get_state().nbytes < table.nbytes / 10


def test_the_memory_of_linear_layers_by_hand():
    model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Tanh(), nn.Linear(200, 50, bias=False))
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    step = ft.train_step(loss, optim.adamw(1e-3))
    anatomy = ft.anatomy(step, step.init(), {"x": torch.randn(32, 100)}, measure=False)
    weights = 100 * 200 + 200 * 50
    assert anatomy.params == weights
    assert anatomy.bytes_per_parameter == pytest.approx(
        {"parameters": 4, "optimizer state": 8, "gradients": 4}, rel=1e-3
    )
    assert anatomy.at_peak["batch"] == 4 * 32 * 100
    # The outputs of the tanh and of the last layer, which the backward pass needs; the first input is the batch.
    assert anatomy.most["activations"] == pytest.approx(4 * 32 * (200 + 50), abs=16)
    # The first layer computes no gradient of its input.
    assert anatomy.flops["tensor contractions"] == 2 * 32 * (2 * 100 * 200 + 3 * 200 * 50)
    assert anatomy.measured is None
    assert anatomy.overhead is None


def test_the_flops_of_contractions_equal_those_that_torch_counts():
    step, batch = build("bert", "plain")
    state = step.init()
    with FlopCounterMode(display=False) as counter:
        step(state, batch)
    counts = counter.get_flop_counts()["Global"]
    actual = ft.anatomy(step, state, batch, measure=False).flops["tensor contractions"]
    expected = sum(counts.values())
    # Torch does not count its attention on CPUs: for each head two matmuls, and five in the backward pass.
    attention = 0 if any("attention" in str(name) for name in counts) else 2 * 7 * 2 * 8 * 64 * 64 * 64
    assert actual == expected + attention


@pytest.mark.parametrize(
    ("group", "names"),
    {
        CONTRACTION: "mm baddbmm mv dot matmul linear _scaled_mm einsum bilinear conv2d convolution_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward mkldnn_rnn_layer _addmm_activation",
        NORMALISATION: "native_layer_norm_backward _log_softmax nll_loss_forward linalg_vector_norm norm var_mean sum "
        "_foreach_norm native_batch_norm argmin",
        ELEMENTWISE: "lgamma digamma polygamma cummax upsample_bilinear2d upsample_linear1d_backward hamming_window "
        "_fused_adamw_ gelu add normal_ bernoulli_ max_pool2d_with_indices",
        MOVEMENT: "_to_copy index_put scatter_ roll flip new_full embedding cat sort repeat_interleave",
    }.items(),
)
def test_the_groups_of_operations(group, names):
    assert {name: group_of(name) for name in names.split()} == dict.fromkeys(names.split(), group)


def test_products_of_vectors_are_counted():
    step = ft.train_step(lambda params, batch: (batch @ params["w"]) @ (batch @ params["w"]), optim.sgd(0.1))
    anatomy = ft.anatomy(step, step.init({"w": torch.ones(30)}), torch.ones(20, 30), measure=False)
    # Two products of a matrix and a vector and their gradients; one of two vectors, whose gradient is no contraction.
    assert anatomy.flops[CONTRACTION] == 2 * (4 * 20 * 30 + 20)


def test_the_flops_of_a_recurrent_layer_by_hand():
    layers = nn.LSTM(12, 16, 2, bidirectional=True)
    step = ft.train_step(ft.from_module(layers, lambda model, batch: model(batch)[0].square().mean()), optim.sgd(0.1))
    positions = 5 * 3
    weights = sum(param.numel() for param in layers.parameters() if param.ndim == 2)
    anatomy = ft.anatomy(step, step.init(), torch.randn(5, 3, 12), measure=False)
    # The kernel always computes the gradient of its input too.
    assert anatomy.flops[CONTRACTION] == 3 * 2 * positions * weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_flops_of_a_grouped_matmul_in_each_dtype(dtype):
    """It multiplies each row by the matrix of one expert."""
    rows, width, outputs, experts = 32, 16, 8, 4
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    first = nn.Parameter(torch.randn(experts, width, width, dtype=dtype))
    second = nn.Parameter(torch.randn(experts, width, outputs, dtype=dtype))

    def loss(params, batch):
        hidden = F.grouped_mm(batch, params["first"], offs=ends)
        return F.grouped_mm(hidden, params["second"], offs=ends).square().mean()

    step = ft.train_step(loss, optim.sgd(0.1))
    anatomy = ft.anatomy(step, step.init({"first": first, "second": second}), torch.randn(rows, width, dtype=dtype))
    assert anatomy.flops[CONTRACTION] == 2 * rows * width * (2 * width + 3 * outputs)
    assert 0 <= anatomy.overhead < 6000


def test_the_known_bytes_per_parameter():
    """16 for float32 AdamW, 18 in mixed precision, 4 + 4 for SGD, and 2 + 4 + 2 for AdamW in bfloat16."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    batch = torch.randn(4, 128)

    def bytes_of(optimizer, *wrappers, dtype=torch.float32):
        loss = ft.from_module(model.to(dtype), lambda model, batch: model(batch).float().square().mean())
        step = ft.compose(ft.train_step(loss, optimizer), *wrappers)
        return sum(ft.anatomy(step, step.init(), batch.to(dtype), measure=False).bytes_per_parameter.values())

    assert bytes_of(optim.adamw(1e-3)) == pytest.approx(16, rel=1e-3)
    assert bytes_of(optim.adamw(1e-3), ft.with_amp("bf16")) == pytest.approx(18, rel=1e-3)
    assert bytes_of(optim.sgd(1e-3)) == pytest.approx(8, rel=1e-3)
    assert bytes_of(optim.adamw(1e-3), dtype=torch.bfloat16) == pytest.approx(8, rel=1e-3)


def test_remat_keeps_only_the_inputs_of_blocks():
    plain = ft.anatomy(*with_state(*build("gpt", "plain")), measure=False)
    rematerialised = ft.anatomy(*with_state(*build("gpt", "remat")), measure=False)
    input_bytes = 8 * 64 * 64 * 4
    for number in range(2):
        assert plain.activations[f"blocks.{number}"] > 8 * input_bytes
    assert rematerialised.most["activations"] < plain.most["activations"] / 2
    assert rematerialised.flops["tensor contractions"] > plain.flops["tensor contractions"]


def test_the_update_after_a_recomputed_block_belongs_to_no_module():
    step, batch = build("gpt", "remat")
    step = ft.accumulate(2)(step)
    allocations = ft.anatomy(step, step.init(), batch, measure=False).timeline.allocations
    assert {allocation.module for allocation in allocations if allocation.phase == "update"} == {""}


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(64, 512).requires_grad_(False), nn.Linear(64, 512)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),)], ids=["whole", "in microbatches"])
def test_tensors_that_a_loss_computes_under_no_grad_are_no_gradients(wrappers):
    step = ft.train_step(ft.from_module(Distilled(), lambda model, batch: model(batch)), optim.sgd(0.1))
    step = ft.compose(step, *wrappers)
    anatomy = ft.anatomy(step, step.init(), torch.randn(256, 64), measure=False)
    assert anatomy.bytes_per_parameter["gradients"] == pytest.approx(4, rel=0.01)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_takes_the_memory_of_its_values_and_indices(layout):
    edges, inputs = getattr(torch.eye(1000), layout)(), torch.randn(1000, 4)
    loss = ft.from_module(nn.Linear(4, 4), lambda model, batch: (batch["edges"] @ model(batch["x"])).square().mean())
    step, batch = ft.train_step(loss, optim.sgd(0.1)), {"edges": edges, "x": inputs}
    anatomy = ft.anatomy(step, step.init(), batch, measure=False)
    indices = 8 * (2 * 1000 if edges.layout == torch.sparse_coo else 1001 + 1000)
    assert anatomy.at_rest["batch"] == nbytes(batch) == inputs.nbytes + 4 * 1000 + indices


def test_a_nested_tensor_cannot_be_predicted():
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    loss = ft.from_module(nn.Linear(4, 4), lambda model, batch: model(batch).values().square().mean())
    step = ft.train_step(loss, optim.sgd(0.1))
    with pytest.raises(TraceError, match=r"^hints: runs the step on fake tensors, and a nested tensor has none"):
        ft.hints(step, step.init(), rows)


def with_state(step, batch):
    return step, step.init(), batch


def test_frozen_parameters_have_no_gradient_and_no_state():
    step, batch = build("gpt", "plain", trainable=["head.*"])
    anatomy = ft.anatomy(step, step.init(), batch, measure=False)
    head = 512 * 64 * 4
    assert anatomy.most["parameters"] == head
    assert anatomy.most["gradients"] == pytest.approx(head, abs=64)
    assert anatomy.most["optimizer state"] == pytest.approx(2 * head, abs=64)
    assert anatomy.most["frozen parameters"] > head


def test_a_state_in_files_takes_no_memory_whether_it_exists_or_is_planned(tmp_path):
    step, batch = problem.make(ft.donated(), width=64), problem.batch(8, 64)
    plain = ft.anatomy(step, step.init(), batch, measure=False)
    for min_bytes in (1, 2**15):
        offloaded = ft.offload("opt_state", directory=tmp_path, min_bytes=min_bytes)(step)
        in_files, planned, outlined = (
            ft.anatomy(offloaded, state, batch, measure=False)
            for state in (offloaded.init(), None, Original(step, step.init()).outline(offloaded))
        )
        assert in_files.at_peak == planned.at_peak == outlined.at_peak
        moments = [leaf.nbytes for leaf in tree.leaves(step.init().opt_state)]
        assert in_files.at_rest["optimizer state"] == pytest.approx(sum(m for m in moments if m < min_bytes), abs=16)
        # The count, of 4 bytes, always stays in memory.
        assert plain.at_rest.total() - in_files.at_rest.total() == sum(m for m in moments if m >= max(min_bytes, 5))


def test_the_files_of_a_new_state_take_no_memory(tmp_path):
    """Without donation there are two states, and so two sets of files."""
    size = 100_000
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.adamw(1e-3))
    step = ft.compose(step, ft.offload("opt_state", directory=tmp_path))
    anatomy = ft.anatomy(step, step.init({"w": torch.ones(size)}), torch.ones(size))
    assert anatomy.measured_ratio == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "optimizer", [optim.sgd(0.1), optim.adam(0.1), optim.adagrad(0.1)], ids=lambda optimizer: optimizer.text
)
def test_the_prediction_of_a_fused_update_allocates_nothing(optimizer):
    with torch.device("meta"):
        model = nn.Linear(100_000, 1_000_000, bias=False)
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    anatomy = ft.anatomy(ft.train_step(loss, optimizer), None, torch.empty(4, 100_000, device="meta"))
    assert anatomy.most["parameters"] == 4 * 10**11


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(donate=True),)], ids=["eager", "compiled"])
def test_a_model_larger_than_the_memory_of_the_machine_is_predicted(wrappers):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(10)))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *wrappers)
    anatomy = ft.anatomy(step, None, torch.empty(64, 100_000, device="meta"))
    assert anatomy.params == 10**11
    assert anatomy.most["optimizer state"] == pytest.approx(8e11, rel=1e-6)
    assert anatomy.most["gradients"] == pytest.approx(4e11, rel=1e-6)
    assert anatomy.measured is None
    assert all(leaf.is_meta for leaf in model.parameters())


def test_a_loss_and_an_optimizer_that_draw_random_numbers():
    def loss(params, batch, rng):
        return ft.random.dropout(rng, params["w"], 0.5).sum() * batch

    step = ft.train_step(loss, optim.chain(optim.noise(0.1), optim.sgd(0.1)))
    state = step.init({"w": torch.randn(1000)})
    anatomy = ft.anatomy(step, state, torch.ones(()))
    assert anatomy.most["parameters"] == 4000


def test_the_table_and_the_picture(tmp_path):
    step, batch = problem.make(ft.with_amp("bf16"), width=64), problem.batch(1024, 64)
    anatomy = ft.anatomy(step, step.init(), batch)
    text = repr(anatomy)
    for expected in (
        "MiB at the peak, predicted;",
        "measured (",
        "  copies in another dtype",
        "    1  ",
        "bytes per parameter:",
        "FLOP/step",
        "  tensor contractions",
    ):
        assert expected in text
    assert text.count(" ms ") == len(GROUPS)
    assert "The times are of" not in text
    assert f"measured beyond that {anatomy.overhead / 2**20:>18,.1f} MiB  what the framework" in text
    predicted = ft.anatomy(step, step.init(), batch, measure=False)
    assert " ms " not in repr(predicted)
    assert "beyond" not in repr(predicted)
    numbers = json.loads(json.dumps(anatomy.as_dict()))
    assert (numbers["peak"], numbers["measured"]) == (anatomy.peak, anatomy.measured)
    assert numbers["overhead"] == anatomy.measured - anatomy.peak
    assert sum(numbers["at_peak"].values()) == anatomy.peak
    assert numbers["seconds"].keys() == numbers["flops"].keys()
    assert predicted.as_dict()["measured"] is predicted.as_dict()["seconds"] is None
    for name in ("a.png", "a.svg"):
        anatomy.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(OptionError, match=r"plot: path is .*a\.pdf'; it must end in \.png or \.svg"):
        anatomy.plot(tmp_path / "a.pdf")


def test_a_picture_without_matplotlib(monkeypatch):
    step, batch = problem.make(), problem.batch(4)
    anatomy = ft.anatomy(step, step.init(), batch, measure=False)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(FtrainError, match="plot: needs matplotlib"):
        anatomy.plot()


def test_anatomy_refuses_other_steps_and_states():
    step, batch = problem.make(), problem.batch(4)
    with pytest.raises(ComposeError, match="anatomy: the step is function; needs a Step"):
        ft.anatomy(lambda state, batch: (state, {}), step.init(), batch)
    pure = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"anatomy: loss has no module; pass a state"):
        ft.anatomy(pure, None, batch)
    with pytest.raises(StructureError):
        ft.anatomy(step, pure.init({"w": torch.ones(1)}), batch)


class WithCache(nn.Module):
    """Makes a table in its first run, and keeps it in an attribute, a list or a dict."""

    def __init__(self, place):
        super().__init__()
        self.inner, self.place = nn.Linear(4, 4), place
        self.table, self.tables_list, self.tables_dict = None, [], {}

    def forward(self, x):
        tables = {"attribute": self.table, "list": self.tables_list, "dict": self.tables_dict}[self.place]
        table = tables if self.place == "attribute" else next(iter(tables), None)
        if table is None:
            table = torch.arange(4.0).cos()
            if self.place == "list":
                self.tables_list.append(table)
            elif self.place == "dict":
                self.tables_dict[table] = table
            else:
                self.table = table
        return self.inner(x) * table


RUNS = {
    "predicted": lambda step, state, batch: ft.anatomy(step, state, batch, measure=False),
    "without a state": lambda step, state, batch: ft.anatomy(step, None, batch),
    "predicted with remat": lambda step, state, batch: ft.anatomy(ft.remat()(step), state, batch, measure=False),
    "seen by hints": record_calls,
    "budget": lambda step, state, batch: ft.remat(budget=0.5)(step)(state, batch),
    "captured": lambda step, state, batch: ft.compiled(backend="eager")(ft.remat()(step))(state, batch),
}
PLACES = ["attribute", "list", "dict"]


@pytest.mark.parametrize(
    ("run", "place"),
    [
        # `make test` runs each place with one way to run, and each way to run with one place.
        pytest.param(
            run,
            place,
            marks=[] if run == "predicted" or place == "list" else pytest.mark.exhaustive,
        )
        for run in RUNS
        for place in PLACES
    ],
)
def test_no_fake_tensor_stays_in_the_model(run, place):
    """The next real run would compute with it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(WithCache(place)) for _ in range(2)))
    step = ft.train_step(ft.from_module(model, lambda model, batch: model(batch).square().mean()), optim.sgd(0.1))
    state, batch = step.init(), torch.ones(2, 4)
    RUNS[run](step, state, batch)
    new, metrics = step(state, batch)
    assert {type(leaf) for leaf in tree.leaves((new, metrics))} <= {torch.Tensor, float}
    assert {type(module.table) for module in model.modules() if isinstance(module, WithCache)} <= {
        type(None),
        torch.Tensor,
    }


def test_a_step_is_predicted_under_anomaly_detection():
    step, batch = problem.make(), problem.batch(4)
    with torch.autograd.set_detect_anomaly(True):
        assert ft.anatomy(step, step.init(), batch, measure=False).peak > 0
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("starts_before", [True, False])
def test_a_module_that_another_thread_runs_is_not_tracked(starts_before):
    """Torch calls the global module hooks in all threads."""
    inside, finish, errors = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def forward(self):
            inside.set()
            finish.wait(60)

    def run():
        try:
            model[0]()
        except Exception as error:
            errors.append(error)

    model = nn.Sequential(Waiting())
    model[0].register_forward_hook(lambda *arguments: None)  # With it, torch looks for global hooks later.
    thread, running = threading.Thread(target=run), RunningModule(model)
    if starts_before:
        thread.start()
        inside.wait(60)
    with running.tracked():
        if not starts_before:
            thread.start()
            inside.wait(60)
        assert running.name == ""
        finish.set()
        thread.join()
    assert not errors


def test_a_profiler_that_already_runs_is_not_stopped():
    step, batch = problem.make(), problem.batch(4)
    state = step.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        with pytest.raises(OptionError, match=r"^anatomy, ladder, tune: .* torch's profiler, and it runs already"):
            ft.anatomy(step, state, batch)
        ft.anatomy(step, state, batch, measure=False)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
@pytest.mark.parametrize(
    ("run", "number"),
    [
        (functools.partial(ft.anatomy, measure=False), 0),
        (functools.partial(ft.anatomy, measure=False), 10),
        (record_calls, 10),
        (lambda step, state, batch: ft.compose(step, ft.remat(budget=0.5))(state, batch), 1),
        (lambda step, state, batch: ft.compose(step, ft.compiled(backend="eager"))(state, batch), 1),
    ],
    ids=["anatomy begins", "anatomy", "hints", "budget", "compiled"],
)
def test_an_interrupt_within_a_mode_of_torch_leaves_no_mode_active(run, number, where, monkeypatch):
    """Torch enters its fake tensor mode again for many operations, and an error there may abort the process."""
    step, batch = problem.make(), problem.batch(4)
    state, method = step.init(), getattr(FakeTensorMode, where)
    calls = itertools.count()
    events = []

    def interrupted(mode, *error):
        returned = method(mode, *error) if where == "__enter__" else None
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
            events.append("continued")
        return returned if where == "__enter__" else method(mode, *error)

    with monkeypatch.context() as patched:
        patched.setattr(FakeTensorMode, where, interrupted)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                run(step, state, batch)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.signal(signal.SIGINT, handler)
    assert events == ["continued"]
    assert not active_modes()
    assert not torch._C._only_lift_cpu_tensors()
    step(state, batch)


def test_the_third_interrupt_acts_at_once():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts = []

    def interrupt_repeatedly():
        with uninterrupted():
            for number in range(4):
                interrupts.append(number)
                signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_repeatedly()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert interrupts == [0, 1, 2]


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_an_interrupt_while_torch_starts_or_stops_its_profiler_does_not_leave_it_on(where, monkeypatch):
    step, batch = build("gpt", "plain")
    state, start_profiler = step.init(), torch.profiler.profile.__enter__

    def interrupted(profiler, *error):
        if where == "__enter__":
            start_profiler(profiler)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ft.anatomy(step, state, batch)
    assert not torch.autograd._profiler_enabled()
    assert ft.anatomy(step, state, batch).measured_ratio == pytest.approx(1, abs=0.05)


def test_a_step_that_reads_a_value_cannot_be_predicted():
    def loss(params, batch):
        total = (params["w"] * batch).sum()
        return total * 2 if bool(total.detach() > 0) else total

    step = ft.train_step(loss, optim.sgd(0.1))
    for function in (ft.anatomy, ft.hints, ft.tune):
        text = rf"^{function.__name__}: runs the step on fake tensors, which have no values, and loss reads a value \("
        with pytest.raises(TraceError, match=text):
            function(step, step.init({"w": torch.ones(3)}), torch.ones(3))


@pytest.mark.parametrize("options", [{}, {"mesh": (1, 2)}])
def test_tune_needs_a_state_for_a_step_without_a_module(options):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"^tune: .* has no module; pass a state: tune\(step, step\.init"):
        ft.tune(step, None, torch.ones(4), memory="1GB", **options)


def test_a_step_with_an_operation_without_a_fake_implementation_cannot_be_predicted():
    library = torch.library.Library("ftrain_test", "FRAGMENT")
    library.define("only_real(Tensor x) -> Tensor")
    library.impl("only_real", torch.clone, "CPU")

    def loss(params, batch):
        return (torch.ops.ftrain_test.only_real(batch) * params["w"]).sum()

    step = ft.train_step(loss, optim.sgd(0.1))
    state = step.init({"w": torch.ones(3)})
    step(state, torch.ones(3))
    with pytest.raises(TraceError, match=r"anatomy: runs the step on fake tensors.* loss fails: .*only_real"):
        ft.anatomy(step, state, torch.ones(3))


@pytest.mark.parametrize(("inner", "sets"), [((), 1), ((ft.clip(1.0),), 2)], ids=["added up", "clipped first"])
def test_accumulation_holds_one_set_of_gradients_unless_each_is_clipped_first(inner, sets):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), *inner, ft.accumulate(4), ft.donated())
    anatomy = ft.anatomy(step, None, torch.empty(4, 1024, device="meta"))
    weights = 4 * 8 * 1024 * 1024
    assert sets * weights < anatomy.most["gradients"] + anatomy.most["temporaries"] < (sets + 0.3) * weights


def test_the_activations_of_a_microbatch_are_freed_before_the_next_one():
    step, batch = build("gpt", "remat")
    microbatch = tree.map(lambda leaf: leaf[:2], batch)
    one = ft.anatomy(step, step.init(), microbatch, measure=False)
    four = ft.anatomy(ft.accumulate(4)(step), step.init(), batch, measure=False)
    assert one.most["activations"] == pytest.approx(four.most["activations"], rel=0.01)


@pytest.mark.parametrize("make", [optim.adamw_8bit, *exhaustive([functools.partial(optim.adamw, state_dtype="bf16")])])
def test_the_number_of_predicted_operations_is_limited_for_narrow_optimizer_states(make, monkeypatch):
    monkeypatch.setattr(grouping, "BLOCK", 2048)

    def predict(max_vectors):
        monkeypatch.setattr(grouping, "PREDICTED_VECTORS", max_vectors)
        step = ft.train_step(lambda params, batch: (batch @ params).square().mean(), make(1e-3))
        return ft.anatomy(step, step.init(torch.ones(128, 256)), torch.ones(2, 128), measure=False)

    many, few = predict(10**9), predict(2)
    assert len(few.timeline.operations) < len(many.timeline.operations) / 3
    assert few.at_rest == many.at_rest
    assert few.most["gradients"] == many.most["gradients"]
