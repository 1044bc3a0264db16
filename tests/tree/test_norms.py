"""`global_norm` and `all_finite`: values that are huge, tiny or not finite, narrow dtypes, and empty trees."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ftrain import tree
from tests.tree.strategies import F64, FLOATS, tensors, trees


@given(trees(tensors()))
def test_global_norm_equals_torch(values):
    norm, leaves = tree.global_norm(values), tree.leaves(values)
    exact = math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))
    assert norm.shape == ()
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assume(leaves)
    torch.testing.assert_close(norm.double(), torch.nn.utils.get_total_norm(leaves).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_global_norm_has_the_bits_of_torchs(dtype):
    leaves = [torch.randn(shape, dtype=dtype) for shape in [(), (7,), (5, 9), (0, 3), (2, 3, 4)]]
    leaves += [torch.randn(6, 4, dtype=dtype).t(), torch.randn((), dtype=dtype).expand(9)]
    assert torch.equal(tree.global_norm(leaves), torch.nn.utils.get_total_norm(leaves))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([3e150, 4e150], F64, 5e150),
        ([3e18, 4e18], torch.float32, 5e18),
        ([3e-160, 4e-160], F64, 5e-160),
        # The squares overflow, as in torch: `clip` then multiplies by 1 / infinity, so that the update is 0.
        ([1e200, 1e200], F64, math.inf),
        ([1e30, 1e30], torch.float32, math.inf),
    ],
)
def test_global_norm_of_huge_and_tiny_values(values, dtype, expected):
    leaves = [torch.tensor([value], dtype=dtype) for value in values]
    norm = tree.global_norm(leaves)
    # The squares of 3e-160 are subnormal numbers, which have few digits.
    assert float(norm) == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(norm, torch.nn.utils.get_total_norm(leaves))


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x,
        lambda x: x.view(1 << 12, -1).t(),
        lambda x: x.view(1 << 12, -1)[:, 1:],
        lambda x: x.bfloat16(),
        lambda x: x.view(torch.complex64),
    ],
)
def test_global_norm_of_millions_of_elements_is_exact(arrange):
    # torch's norm of a float32 tensor on a CPU is 0.07% too small here, and 4% for 2**28 elements.
    leaf = arrange(torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)))
    exact = math.sqrt(float(leaf.abs().double().square().sum()))
    assert float(tree.global_norm([leaf, torch.ones(3)])) == pytest.approx(math.sqrt(exact**2 + 3), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_global_norm_sums_half_precision_in_float32(dtype):
    # 300 ** 2 overflows in float16, and bfloat16 cannot represent 257.
    norm = tree.global_norm({"big": torch.full((4,), 300.0, dtype=dtype), "ones": torch.ones(257, dtype=dtype)})
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(math.sqrt(4 * 300**2 + 257), rel=1e-6)


def test_global_norm_of_several_dtypes_is_taken_in_the_widest():
    norm = tree.global_norm([torch.tensor(3.0, dtype=torch.float16), torch.tensor(4e100, dtype=F64)])
    assert norm.dtype == F64
    assert float(norm) == pytest.approx(4e100, rel=1e-12)


@pytest.mark.parametrize("empty", [{}, None, [], {"a": torch.zeros(0)}, [torch.zeros(0, 3), torch.zeros(3, 0)]])
def test_norms_of_trees_without_elements(empty):
    assert torch.equal(tree.global_norm(empty), torch.tensor(0.0))
    assert torch.equal(tree.all_finite(empty), torch.tensor(True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_global_norm_of_values_that_are_not_finite(bad):
    norm = tree.global_norm([torch.ones(3), torch.tensor([1.0, bad])])
    assert float(norm) == pytest.approx(abs(bad), nan_ok=True)


HUGE = {F64: 1.7e308, torch.float32: 3.4e38, torch.bfloat16: 3.3e38, torch.float16: 65504.0}


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_near_the_largest_of_their_dtype_are_finite(dtype):
    leaves = [torch.full((1000,), sign * HUGE[dtype], dtype=dtype) for sign in (1, -1)]
    assert torch.isfinite(leaves[0]).all()
    assert torch.equal(tree.all_finite(leaves), torch.tensor(True))
    mixed = [*leaves, torch.ones(3), torch.ones((), dtype=F64), torch.zeros(0)]
    assert torch.equal(tree.all_finite(mixed), torch.tensor(True))


@given(st.data())
def test_all_finite_is_false_for_one_bad_element_anywhere(data):
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    assume(any(sizes))
    leaves = [torch.full((size,), 3.0, dtype=data.draw(st.sampled_from(FLOATS))) for size in sizes]
    assert torch.equal(tree.all_finite(leaves), torch.tensor(True))
    leaf = data.draw(st.sampled_from([leaf for leaf in leaves if len(leaf)]))
    leaf[data.draw(st.integers(0, len(leaf) - 1))] = bad
    assert torch.equal(tree.all_finite(leaves), torch.tensor(False))


def test_all_finite_is_false_for_nan_and_infinity_in_any_order():
    # A maximum of NaN and infinity depends on their order.
    assert not tree.all_finite([torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, -math.inf])])
    assert not tree.all_finite([torch.tensor([1.0, math.nan, 2.0])])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_norms_of_complex_leaves_take_in_the_imaginary_part(dtype):
    leaves = [torch.tensor([0.0 + 3.0j], dtype=dtype).conj(), torch.tensor([4.0])]
    assert float(tree.global_norm(leaves)) == pytest.approx(5.0)
    assert tree.global_norm(leaves).dtype == (F64 if dtype == torch.complex128 else torch.float32)
    assert tree.all_finite(leaves)
    assert not tree.all_finite([torch.tensor([complex(1.0, math.nan)], dtype=dtype)])


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_norms_of_sparse_leaves(layout):
    leaves = [torch.tensor([[0.0, 3.0], [0.0, 0.0]]).to_sparse(layout=layout), torch.tensor([4.0])]
    assert float(tree.global_norm(leaves)) == 5.0
    assert tree.all_finite(leaves)
    assert not tree.all_finite([torch.tensor([[0.0, math.inf]]).to_sparse(layout=layout)])


def test_the_norm_of_a_sparse_leaf_with_repeated_indices():
    repeated = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True)
    assert float(tree.global_norm([repeated])) == 3.0
