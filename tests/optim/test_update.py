"""The laws of an update: pure, the same bits when donated, and the same for other memory layouts or earlier calls."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain import tree
from ftrain.errors import LossError, StructureError
from ftrain.optim import adam, rmsprop, sgd
from tests.laws.optimizers import OPTIMIZERS
from tests.optim.families import F64, FAMILIES, elements, families, rates

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)

# A few examples suffice, because the families share most of their code.
few_examples = settings(max_examples=8)


def with_reversed_strides(leaf):
    """Return a copy whose axes are in the opposite order in memory."""
    order = tuple(reversed(range(leaf.ndim)))
    return leaf.permute(order).contiguous().permute(order)


@st.composite
def problems(draw):
    """Draw parameters, and gradients in various memory layouts."""
    draw_from = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([F64, torch.float32]))
    params, grads = {}, {}
    for index, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=4))):
        layout = draw(st.sampled_from(["same", "transposed", "expanded"]))
        params[f"p{index}"] = torch.randn(shape, generator=draw_from, dtype=dtype)
        grad = torch.randn(shape, generator=draw_from, dtype=dtype)
        if layout == "transposed":
            grad = with_reversed_strides(grad)
        elif layout == "expanded":
            grad = torch.randn((), generator=draw_from, dtype=dtype).expand(shape)
        grads[f"p{index}"] = grad
    return params, grads


@families
@few_examples
@given(problems())
def test_an_update_is_pure_and_a_donated_one_reuses_memory(family, problem):
    params, grads = problem
    optimizer = FAMILIES[family](weight_decay=0.1)
    opt_state = optimizer.init(params)
    inputs_before, grads_before = elements((params, opt_state, grads)), elements(grads)
    expected = optimizer.update(grads, opt_state, params, rates(optimizer))
    assert elements((params, opt_state, grads)) == inputs_before
    assert tree.signature(expected) == tree.signature((params, opt_state))

    donated_params, donated_opt_state = tree.clone((params, opt_state))
    addresses = [leaf.data_ptr() for leaf in tree.leaves((donated_params, donated_opt_state))]
    actual = optimizer.update(grads, donated_opt_state, donated_params, rates(optimizer), donate=True)
    assert elements(actual) == elements(expected)
    assert [leaf.data_ptr() for leaf in tree.leaves(actual)] == addresses
    assert elements(grads) == grads_before


@families
@few_examples
@given(problems())
def test_a_tensor_as_rate_gives_the_same_update(family, problem):
    params, grads = problem
    optimizer = FAMILIES[family](weight_decay=0.1)
    opt_state = optimizer.init(params)
    expected = optimizer.update(grads, opt_state, params, rates(optimizer))
    actual = optimizer.update(grads, opt_state, params, rates(optimizer, tensors=True))
    assert tree.signature(actual) == tree.signature(expected)
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        tolerance = {"rtol": 1e-12, "atol": 1e-14} if b.dtype == F64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(a, b, **tolerance)


@families
def test_without_donation_the_new_state_shares_no_memory_with_the_old_one(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.ones(3), "empty": torch.zeros(0)}
    opt_state = optimizer.init(params)
    grads = tree.clone(params)
    addresses = {leaf.data_ptr() for leaf in tree.leaves((params, opt_state)) if leaf.numel()}
    for hyper in (rates(optimizer), rates(optimizer, tensors=True)):
        updated = optimizer.update(grads, opt_state, params, hyper)
        assert addresses.isdisjoint(leaf.data_ptr() for leaf in tree.leaves(updated) if leaf.numel())


@pytest.mark.parametrize("tensors", [False, True])
@families
def test_a_rate_of_zero_moves_nothing(family, tensors):
    optimizer = FAMILIES[family](weight_decay=0.1)
    params = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    zero = torch.tensor(0.0, dtype=F64) if tensors else 0.0
    hyper = rates(optimizer) | dict.fromkeys(optimizer.schedules, zero)
    moved, _ = optimizer.update(tree.map(torch.ones_like, params), optimizer.init(params), params, hyper)
    assert elements(moved) == elements(params)


@families
def test_a_zero_gradient_moves_nothing(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    moved, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params, rates(optimizer))
    assert elements(moved) == elements(params)


@pytest.mark.parametrize("not_finite", [math.nan, math.inf])
@pytest.mark.parametrize("family", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_makes_the_parameters_not_finite(family, not_finite):
    """Even if the update is a sign: torch's sign of NaN is 0, and the parameters would silently stay as they are."""
    optimizer, params = OPTIMIZERS[family](), {"w": torch.ones(4, 4)}
    state = optimizer.init(params)
    for gradient in (not_finite, not_finite, 1.0):
        params, state = optimizer.update({"w": torch.full((4, 4), gradient)}, state, params, rates(optimizer))
    assert not params["w"].isfinite().any()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "partition"])
def test_trees_without_leaves_stay_as_they_are(family):
    optimizer = FAMILIES[family]()
    for empty in ({}, {"a": None}, []):
        for hyper in (rates(optimizer), rates(optimizer, tensors=True)):
            moved, _ = optimizer.update(empty, optimizer.init(empty), empty, hyper)
            assert moved == empty


def with_gaps(leaf):
    """Return a copy whose memory is every second column of a wider tensor."""
    wide = torch.zeros(*leaf.shape[:-1], 2 * leaf.shape[-1], dtype=leaf.dtype)
    wide[..., ::2] = leaf
    return wide[..., ::2]


# Each argument has each layout, and is donated with one of them.
@pytest.mark.parametrize(
    ("argument", "layout", "donate"),
    [
        ("params", with_reversed_strides, False),
        ("params", with_gaps, True),
        ("grads", with_reversed_strides, True),
        ("grads", with_gaps, False),
        ("opt_state", with_reversed_strides, False),
        ("opt_state", with_gaps, True),
    ],
)
@pytest.mark.parametrize("family", OPTIMIZERS)
def test_memory_layouts_do_not_change_the_update(family, argument, layout, donate):
    """A parameter and its moments may have different layouts, for instance in a state of another program."""
    optimizer = OPTIMIZERS[family](weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    params, grads = ({"w": torch.randn(3, 4, generator=draw, dtype=F64)} for _ in range(2))
    _, opt_state = optimizer.update(grads, optimizer.init(params), params, rates(optimizer))
    arguments = {"grads": grads, "opt_state": opt_state, "params": params}
    expected = optimizer.update(**arguments, hyper=rates(optimizer))
    copies = tree.clone(arguments)
    copies[argument] = tree.map(lambda leaf: layout(leaf) if leaf.ndim else leaf, copies[argument])
    assert not any(leaf.is_contiguous() for leaf in tree.leaves(copies[argument]) if leaf.squeeze().ndim > 1)
    actual = optimizer.update(**copies, hyper=rates(optimizer), donate=donate)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("family", OPTIMIZERS)
def test_a_donated_update_does_not_write_to_an_expanded_parameter(family):
    """All elements of such a parameter share one place in memory."""
    optimizer = OPTIMIZERS[family]()
    params = {"w": torch.ones(1, dtype=F64).expand(2, 2)}
    grads = {"w": torch.tensor([[1.0, 2.0], [-3.0, 4.0]], dtype=F64)}
    expected = optimizer.update(grads, optimizer.init(params), params, rates(optimizer))
    actual = optimizer.update(grads, optimizer.init(params), params, rates(optimizer), donate=True)
    assert elements(actual) == elements(expected)
    assert elements(params) == elements({"w": torch.ones(2, 2, dtype=F64)})


@families
def test_one_optimizer_updates_trees_of_different_shapes_and_dtypes(family):
    """An optimizer is a pair of pure functions: earlier calls must not change the result."""
    shapes_and_dtypes = [
        {"a": ((2, 2), torch.float32), "b": ((2,), torch.float32)},
        {"a": ((2, 2), F64), "b": ((2,), torch.float32)},
        {"a": ((2,), F64), "b": ((2, 2), torch.float32)},
        {"a": ((2, 2), torch.float32), "b": ((2,), torch.float32)},
    ]
    shared = FAMILIES[family](weight_decay=0.5)
    for spec in shapes_and_dtypes:
        params = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in spec.items()}
        grads = tree.map(lambda leaf: 0.5 * leaf, params)
        fresh = FAMILIES[family](weight_decay=0.5)
        actual = shared.update(grads, shared.init(params), params, rates(shared))
        assert elements(actual) == elements(fresh.update(grads, fresh.init(params), params, rates(fresh)))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_another_structure_are_refused(family):
    optimizer = FAMILIES[family]()
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    grads = {"a": torch.ones(2), "c": torch.ones(2)}
    with pytest.raises(StructureError, match="differ in structure"):
        optimizer.update(grads, optimizer.init(params), params, rates(optimizer))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "partition"])
def test_a_state_of_another_optimizer_is_refused(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.ones(2)}
    for foreign_state in ({"m": params}, None):
        with pytest.raises(StructureError, match="the optimizer state has"):
            optimizer.update(params, foreign_state, params, rates(optimizer))


@pytest.mark.parametrize("requires_grad", ["params", "grads"])
@pytest.mark.parametrize("factory", [sgd, adam, rmsprop])
def test_an_update_that_autograd_would_record_is_refused(factory, requires_grad):
    """For instance in an inner loop within a loss: torch's fused kernels would silently give a gradient of 0."""
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    optimizer = factory(0.1)
    (params if requires_grad == "params" else grads)["w"].requires_grad_()
    with pytest.raises(LossError, match=r"cannot be differentiated.*detach them"):
        optimizer.update(grads, optimizer.init(params), params, {"lr": 0.1})
    with torch.no_grad():
        optimizer.update(grads, optimizer.init(params), params, {"lr": 0.1})
