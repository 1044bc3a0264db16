"""Under `Keyed`, fused kernels that would draw random numbers themselves are off or refused."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ftrain import _torch, random
from ftrain.errors import TraceError
from ftrain.random import torch_ops
from ftrain.random.torch_ops import Keyed
from ftrain.random.unfused import Unfused
from ftrain.transforms.remat.checkpoint import recomputed
from tests.random.draws import assert_same_bits


def attend(x, rate):
    return F.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=rate)


fused_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_attention = torch.ops.aten._scaled_dot_product_flash_attention.default


def test_attention_without_dropout_has_the_bits_of_the_fused_kernel():
    x = torch.linspace(-1, 1, 32).reshape(1, 1, 4, 8)
    expected = attend(x, 0.0)
    with Keyed(random.key(0)) as keyed:
        assert_same_bits(attend(x, 0.0), expected)
        assert_same_bits(fused_attention_on_cpu(x, x, x)[0], expected)
    assert keyed.offset == 0


def test_attention_with_dropout_draws_from_the_key():
    with Keyed(random.key(0)) as keyed:
        attend(torch.ones(1, 1, 4, 8), 0.5)
    assert keyed.offset == 1


@pytest.mark.parametrize(
    ("operation", "message"),
    [(fused_attention_on_cpu, "sdpa_kernel"), (fused_attention, "_scaled_dot_product_flash_attention")],
)
def test_a_call_of_a_fused_kernel_with_dropout_is_refused(operation, message):
    x = torch.ones(1, 1, 4, 8)
    with Keyed(random.key(0)), pytest.raises(TraceError, match=message):
        operation(x, x, x, dropout_p=0.1)


class EnabledKernels(_torch.TorchDispatchMode):
    """Records at each operation whether the fused kernels of GPUs that draw random numbers are enabled."""

    def __init__(self):
        super().__init__()
        self.records = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        of_attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
        self.records.add((*of_attention, cudnn.enabled))
        return func(*args, **(kwargs or {}))


ALL_ON, ALL_OFF = (True,) * 4, (False,) * 4


def attention(rate, device):
    return functools.partial(attend, rate=rate)


def multi_head_attention(rate, device):
    model = nn.MultiheadAttention(8, 2, rate, device=device)
    return lambda x: model(x, x, x, need_weights=False)


def lstm(rate, device):
    return nn.LSTM(8, 8, 2, dropout=rate, device=device)


def packed_gru(rate, device):
    model = nn.GRU(8, 8, 2, dropout=rate, device=device)
    return lambda x: model(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 4, 2])))


@pytest.mark.parametrize(
    "make_model", [attention, multi_head_attention, lstm, packed_gru], ids=lambda function: function.__name__
)
def test_fused_kernels_with_dropout_are_off_except_on_the_host(make_model):
    def kernels_of(rate, device):
        model = make_model(rate, device)
        with Keyed(random.key(0)) as keyed, EnabledKernels() as kernels:
            model(torch.ones(4, 3, 8, device=device))
        assert keyed.offset == (rate > 0)
        return kernels.records

    assert ALL_OFF in kernels_of(0.5, "meta")
    assert kernels_of(0.0, "meta") == kernels_of(0.5, "cpu") == {ALL_ON}


def test_fused_kernels_with_dropout_are_off_in_a_recomputation():
    def recompute(offset, x):
        with torch_ops.current().rewound(offset), kernels:
            return attend(x, 0.5)

    x, kernels = torch.ones(1, 1, 4, 8, device="meta", requires_grad=True), EnabledKernels()
    with Keyed(random.key(0)) as keyed:
        y = recomputed(lambda x: attend(x, 0.5), functools.partial(recompute, keyed.offset), (x,), {})
        torch.autograd.grad(y.sum(), x)
    assert ALL_OFF in kernels.records


def test_two_unfused_modes_work_in_inference_mode():
    with Keyed(random.key(2)), torch.inference_mode(), Unfused(), Unfused():
        assert attend(torch.ones(1, 1, 4, 8, device="meta"), 0.5).is_meta
