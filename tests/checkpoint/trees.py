"""Tensors of random bits in every dtype, and comparisons of trees to the bit."""

import torch

import ftrain as ft

DTYPES = [
    *[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    *[torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bool],
]


def bits(tensor):
    """Return the bytes of the elements, in the order of the axes, whatever the strides are."""
    return tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def assert_tensors_equal(actual, expected):
    """Assert that two tensors have the same dtype, shape, device and bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.device == expected.device
    assert torch.equal(bits(actual), bits(expected))


def assert_trees_equal(actual, expected):
    """Assert that two trees have the same structure and the same leaves, to the bit."""
    actual_leaves, actual_structure = ft.tree.flatten(actual)
    expected_leaves, expected_structure = ft.tree.flatten(expected)
    assert actual_structure == expected_structure
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert_tensors_equal(a, b)
        else:
            assert type(a) is type(b)
            # As text, because NaN is not equal to itself.
            assert repr(a) == repr(b)


def random_bits(dtype, count=6, seed=0):
    """Return a tensor of random bits, which may be NaN with any payload."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    return torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
