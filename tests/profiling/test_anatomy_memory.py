"""Anatomy: what the memory of a step is for, compared with sizes that are computed by hand."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain.optim import grouping
from ftrain.profiling.comparison import Original
from ftrain.profiling.step_variants import nbytes
from tests.exhaustive import exhaustive
from tests.profiling import problem
from tests.profiling.models import BATCH, LENGTH, VOCABULARY, WIDTH, build


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
    def predict(wrappers):
        step, batch = build("gpt", wrappers)
        return ft.anatomy(step, step.init(), batch, measure=False)

    plain, rematerialised = predict("plain"), predict("remat")
    input_bytes = 4 * BATCH * LENGTH * WIDTH
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


def test_frozen_parameters_have_no_gradient_and_no_state():
    step, batch = build("gpt", "plain", trainable=["head.*"])
    anatomy = ft.anatomy(step, step.init(), batch, measure=False)
    head = 4 * VOCABULARY * WIDTH
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
        sizes = [leaf.nbytes for leaf in tree.leaves(step.init().opt_state)]
        in_memory = sum(size for size in sizes if size < min_bytes)
        assert in_files.at_rest["optimizer state"] == pytest.approx(in_memory, abs=16)
        # The count, of 4 bytes, always stays in memory.
        moved = sum(size for size in sizes if size >= max(min_bytes, 5))
        assert plain.at_rest.total() - in_files.at_rest.total() == moved


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


def test_a_step_whose_loss_and_optimizer_draw_random_numbers_is_predicted_and_measured():
    def loss(params, batch, rng):
        return ft.random.dropout(rng, params["w"], 0.5).sum() * batch

    step = ft.train_step(loss, optim.chain(optim.noise(0.1), optim.sgd(0.1)))
    anatomy = ft.anatomy(step, step.init({"w": torch.randn(1000)}), torch.ones(()))
    assert anatomy.most["parameters"] == 4 * 1000
    assert anatomy.measured > 0


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
    microbatch = tree.map(lambda leaf: leaf[: BATCH // 4], batch)
    expected = ft.anatomy(step, step.init(), microbatch, measure=False)
    actual = ft.anatomy(ft.accumulate(4)(step), step.init(), batch, measure=False)
    assert actual.most["activations"] == pytest.approx(expected.most["activations"], rel=0.01)


@pytest.mark.parametrize(
    "make_optimizer", [optim.adamw_8bit, *exhaustive([functools.partial(optim.adamw, state_dtype="bf16")])]
)
def test_the_number_of_predicted_operations_is_limited_for_narrow_optimizer_states(make_optimizer, monkeypatch):
    monkeypatch.setattr(grouping, "BLOCK", 2048)

    def predict(max_vectors):
        monkeypatch.setattr(grouping, "PREDICTED_VECTORS", max_vectors)
        # A new optimizer each time, because one remembers how it updates parameters of these shapes.
        step = ft.train_step(lambda params, batch: (batch @ params).square().mean(), make_optimizer(1e-3))
        return ft.anatomy(step, step.init(torch.ones(128, 256)), torch.ones(2, 128), measure=False)

    many, few = predict(10**9), predict(2)
    assert len(few.timeline.operations) < len(many.timeline.operations) / 3
    assert few.at_rest == many.at_rest
    assert few.most["gradients"] == many.most["gradients"]
