"""Anatomy: the floating-point operations of a step, by group, are those that torch counts or that a formula gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ftrain as ft
from ftrain import optim
from ftrain.step.flops import CONTRACTION, ELEMENTWISE, MOVEMENT, NORMALISATION, group_of
from tests.profiling.models import BATCH, LENGTH, WIDTH, build


def test_the_flops_of_contractions_equal_those_that_torch_counts():
    step, batch = build("bert", "plain")
    state = step.init()
    with FlopCounterMode(display=False) as counter:
        step(state, batch)
    counts = counter.get_flop_counts()["Global"]
    actual = ft.anatomy(step, state, batch, measure=False).flops["tensor contractions"]
    expected = sum(counts.values())
    # Torch does not count its attention on CPUs: for each head two matmuls, and five in the backward pass.
    matmuls, layers = 2 + 5, 2
    attention = layers * matmuls * 2 * BATCH * LENGTH * LENGTH * WIDTH
    if any("attention" in str(name) for name in counts):
        attention = 0
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
def test_each_operation_belongs_to_one_group(group, names):
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
    """A grouped matmul multiplies each row by the matrix of one expert."""
    rows, width, outputs, experts = 32, 16, 8, 4
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    params = {
        "first": torch.randn(experts, width, width, dtype=dtype),
        "second": torch.randn(experts, width, outputs, dtype=dtype),
    }

    def loss(params, batch):
        hidden = F.grouped_mm(batch, params["first"], offs=ends)
        return F.grouped_mm(hidden, params["second"], offs=ends).square().mean()

    step = ft.train_step(loss, optim.sgd(0.1))
    anatomy = ft.anatomy(step, step.init(params), torch.randn(rows, width, dtype=dtype))
    assert anatomy.flops[CONTRACTION] == 2 * rows * width * (2 * width + 3 * outputs)
    assert 0 <= anatomy.overhead < 6000


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_flops_of_a_convolution_with_groups_by_hand(layer, groups):
    convolution = layer(4, 8, 3, groups=groups, bias=False)
    step = ft.train_step(ft.from_module(convolution, lambda model, batch: model(batch).square().mean()), optim.sgd(0.1))
    images, edge = 2, 8
    positions = images * (edge - 2) ** 2 if layer is nn.Conv2d else images * edge**2
    anatomy = ft.anatomy(step, step.init(), torch.randn(images, 4, edge, edge), measure=False)
    # Each weight once for each position: in the forward pass, and for its gradient. The batch needs none.
    assert anatomy.flops[CONTRACTION] == 2 * 2 * positions * convolution.weight.numel()
