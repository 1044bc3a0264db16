"""Optimizers: purity, donation, state, weight decay, partitions and options."""

import dataclasses
import functools
import inspect
import math
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, FtrainError, LossError, OptionError, StructureError
from ftrain.optim import (
    adafactor,
    adagrad,
    adam,
    adamw,
    lamb,
    lion,
    muon,
    nadam,
    partition,
    radam,
    rmsprop,
    schedule_free_adamw,
    schedule_free_params,
    sgd,
)
from ftrain.optim.grouping import BLOCK, Planner
from ftrain.optim.structure_cache import StructureCache
from ftrain.tree.name_patterns import everything, matrices
from tests.laws.optimizers import MATRICES_ONLY, OPTIMIZERS

F64 = torch.float64
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
FAMILIES = {
    "sgd": lambda **more: sgd(0.1, **more),
    "momentum": lambda **more: sgd(0.1, momentum=0.9, **more),
    "nesterov": lambda **more: sgd(0.1, momentum=0.9, nesterov=True, **more),
    "adamw": lambda **more: adamw(0.1, **more),
    "partition": lambda **more: partition({"all": adamw(0.1, **more)}, lambda name, leaf: "all"),
}
FAMILIES |= {name: make for name, make in OPTIMIZERS.items() if name not in {*FAMILIES, *MATRICES_ONLY}}
families = pytest.mark.parametrize("family", FAMILIES)
# A few examples suffice, because the families share most of their code.
few = settings(max_examples=8)


def rates(optimizer, *, tensors=False):
    """Return the scheduled values at step 0, as tensors if the update is to be as in a graph, and the key."""
    hyper = {name: schedule(0) for name, schedule in optimizer.schedules.items()}
    if tensors:
        hyper = {name: torch.tensor(value, dtype=F64) for name, value in hyper.items()}
    if optimizer.needs_rng:
        hyper["rng"] = ft.random.key(0)
    return hyper


def bits(values):
    """Return the dtype and the elements of each leaf."""
    return [(leaf.dtype, leaf.tolist()) for leaf in tree.leaves(values)]


def turned(leaf):
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
            grad = turned(grad)
        elif layout == "expanded":
            grad = torch.randn((), generator=draw_from, dtype=dtype).expand(shape)
        grads[f"p{index}"] = grad
    return params, grads


# Purity, donation, and updates by fused kernels and by formulas


@families
@few
@given(problems())
def test_an_update_is_pure_and_a_donated_one_reuses_memory(family, problem):
    params, grads = problem
    optimizer = FAMILIES[family](weight_decay=0.1)
    opt_state = optimizer.init(params)
    before = bits((params, opt_state, grads))
    new = optimizer.update(grads, opt_state, params, rates(optimizer))
    assert bits((params, opt_state, grads)) == before
    assert tree.signature(new) == tree.signature((params, opt_state))

    copies = tree.clone((params, opt_state))
    addresses = [leaf.data_ptr() for leaf in tree.leaves(copies)]
    donated = optimizer.update(grads, copies[1], copies[0], rates(optimizer), donate=True)
    assert bits(donated) == bits(new)
    assert [leaf.data_ptr() for leaf in tree.leaves(donated)] == addresses
    assert bits(grads) == before[-len(grads) :]


@families
@few
@given(problems())
def test_a_tensor_as_rate_gives_the_same_update(family, problem):
    params, grads = problem
    optimizer = FAMILIES[family](weight_decay=0.1)
    opt_state = optimizer.init(params)
    fused = optimizer.update(grads, opt_state, params, rates(optimizer))
    plain = optimizer.update(grads, opt_state, params, rates(optimizer, tensors=True))
    assert tree.signature(fused) == tree.signature(plain)
    for a, b in zip(tree.leaves(fused), tree.leaves(plain), strict=True):
        tolerance = {"rtol": 1e-12, "atol": 1e-14} if a.dtype == F64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(a, b, **tolerance)


@families
def test_without_donation_the_new_state_shares_no_memory_with_the_old_one(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.ones(3), "empty": torch.zeros(0)}
    opt_state = optimizer.init(params)
    for hyper in (rates(optimizer), rates(optimizer, tensors=True)):
        new = optimizer.update({"w": torch.ones(3), "empty": torch.zeros(0)}, opt_state, params, hyper)
        old = {leaf.data_ptr() for leaf in tree.leaves((params, opt_state)) if leaf.numel()}
        assert old.isdisjoint(leaf.data_ptr() for leaf in tree.leaves(new) if leaf.numel())


# Rates and gradients of zero, and gradients that are not finite


@pytest.mark.parametrize("tensors", [False, True])
@families
def test_a_rate_of_zero_moves_nothing(family, tensors):
    optimizer = FAMILIES[family](weight_decay=0.1)
    params = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    zero = torch.tensor(0.0, dtype=F64) if tensors else 0.0
    hyper = rates(optimizer) | dict.fromkeys(optimizer.schedules, zero)
    new, _ = optimizer.update(tree.map(torch.ones_like, params), optimizer.init(params), params, hyper)
    assert bits(new) == bits(params)


@families
def test_a_zero_gradient_moves_nothing(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.randn(3, 4), "b": torch.randn(4)}
    new, _ = optimizer.update(tree.map(torch.zeros_like, params), optimizer.init(params), params, rates(optimizer))
    assert bits(new) == bits(params)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("family", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_makes_the_parameters_not_finite(family, bad):
    """Even if the update is a sign: torch's sign of NaN is 0, and the parameters would silently stay as they are."""
    optimizer, params = OPTIMIZERS[family](), {"w": torch.ones(4, 4)}
    state = optimizer.init(params)
    for gradient in (bad, bad, 1.0):
        params, state = optimizer.update({"w": torch.full((4, 4), gradient)}, state, params, rates(optimizer))
    assert not params["w"].isfinite().any()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "partition"])
def test_trees_without_leaves_stay_as_they_are(family):
    optimizer = FAMILIES[family]()
    for empty in ({}, {"a": None}, []):
        for hyper in (rates(optimizer), rates(optimizer, tensors=True)):
            new, _ = optimizer.update(empty, optimizer.init(empty), empty, hyper)
            assert new == empty


# State


def test_state_of_sgd():
    params = {"w": torch.ones(2, 3, dtype=F64), "b": torch.ones(3)}
    assert sgd(0.1).init(params) == {}
    state = sgd(0.1, momentum=0.9).init(params)
    assert tree.signature(state) == {"momentum.b": "float32[3]", "momentum.w": "float64[2, 3]"}
    assert all(not leaf.any() for leaf in tree.leaves(state))


def test_state_of_adamw():
    params = {"w": torch.ones(2, 3, dtype=F64), "b": torch.ones(3).bfloat16()}
    state = adamw(0.1).init(params)
    assert tree.signature(state) == {
        "count": "float32[]",
        "mu.b": "bfloat16[3]",
        "mu.w": "float64[2, 3]",
        "nu.b": "bfloat16[3]",
        "nu.w": "float64[2, 3]",
    }
    assert all(not leaf.any() for leaf in tree.leaves(state))


def test_an_eps_that_is_0_in_the_dtype_of_the_parameters_is_warned_of():
    params = {"w": torch.ones(2).half(), "b": torch.ones(2)}
    for name in ("adam", "adamw", "rmsprop", "adagrad", "nadam", "radam"):
        with pytest.warns(UserWarning, match=rf"{name}: .* in float16, in which eps=1e-[0-9]+ is 0, and so is"):
            getattr(ft.optim, name)(0.1).init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adamw(0.1, eps=1e-4).init(params)
        adamw(0.1, state_dtype="fp32").init(params)
        adamw(0.1).init({"w": params["b"].bfloat16()})


def test_adamw_counts_updates_and_not_steps():
    """A skipped step must change neither the count nor the bias correction that depends on it."""
    step = ft.skip_nonfinite()(ft.train_step(lambda p, b: (p["w"] * b).sum(), adamw(0.1)))
    state = step.init({"w": torch.ones(2)})
    for scale in (1.0, math.nan, 1.0):
        state, _ = step(state, torch.tensor([scale, 1.0]))
    assert (int(state.step), float(state.opt_state["count"])) == (3, 2.0)


def strided(leaf):
    """Return a copy whose memory is every second column of a wider tensor."""
    wide = torch.zeros(*leaf.shape[:-1], 2 * leaf.shape[-1], dtype=leaf.dtype)
    wide[..., ::2] = leaf
    return wide[..., ::2]


# Each argument has each layout, and is donated with one of them.
@pytest.mark.parametrize(
    ("argument", "layout", "donate"),
    [
        ("params", turned, False),
        ("params", strided, True),
        ("grads", turned, True),
        ("grads", strided, False),
        ("opt_state", turned, False),
        ("opt_state", strided, True),
    ],
)
@pytest.mark.parametrize("family", OPTIMIZERS)
def test_memory_layouts_do_not_change_the_update(family, argument, layout, donate):
    """A parameter and its moments may have different layouts, for instance in a state of another program."""
    optimizer = OPTIMIZERS[family](weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    params, grads = ({"w": torch.randn(3, 4, generator=draw, dtype=F64)} for _ in range(2))
    opt_state = optimizer.update(grads, optimizer.init(params), params, rates(optimizer))[1]
    arguments = {"grads": grads, "opt_state": opt_state, "params": params}
    expected = optimizer.update(**arguments, hyper=rates(optimizer))
    copies = tree.clone(arguments)
    copies[argument] = tree.map(lambda leaf: layout(leaf) if leaf.ndim else leaf, copies[argument])
    assert not any(leaf.is_contiguous() for leaf in tree.leaves(copies[argument]) if leaf.squeeze().ndim > 1)
    actual = optimizer.update(**copies, hyper=rates(optimizer), donate=donate)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


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
        assert bits(actual) == bits(fresh.update(grads, fresh.init(params), params, rates(fresh)))


def test_groups_follow_the_dtypes_of_the_leaves():
    """A fused kernel on a GPU takes leaves of one dtype only."""
    plans = StructureCache(Planner(everything).plan)
    for dtypes, groups in (
        ((torch.float32, torch.float32), [([0, 1], True)]),
        ((F64, torch.float32), [([0], True), ([1], True)]),
    ):
        params = [torch.ones(2, dtype=dtype) for dtype in dtypes]
        plan, _ = plans(params, tree.clone(params))
        assert (plan.singles, plan.groups) == ([([0], True), ([1], True)], groups)
        assert plans(params, tree.clone(params))[0] is plan


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_another_structure_are_refused(family):
    optimizer = FAMILIES[family]()
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    grads = {"a": torch.ones(2), "c": torch.ones(2)}
    with pytest.raises(StructureError, match="differ in structure"):
        optimizer.update(grads, optimizer.init(params), params, rates(optimizer))


# Weight decay


def test_a_decay_mask_is_called_with_each_name_and_leaf():
    shapes = {}

    def mask(name, leaf):
        shapes[name] = tuple(leaf.shape)
        return name.endswith("w")

    params = {"layers": [{"w": torch.ones(2, 2), "b": torch.ones(2)}], "w": torch.ones(3)}
    zeros = tree.map(torch.zeros_like, params)
    for make in (sgd, adamw):
        shapes.clear()
        optimizer = make(0.1, weight_decay=1.0, decay_mask=mask)
        new, _ = optimizer.update(zeros, optimizer.init(params), params, {"lr": 0.1})
        assert shapes == {"layers.0.b": (2,), "layers.0.w": (2, 2), "w": (3,)}
        decayed = {
            name: bool((leaf < 1).all()) for name, leaf in zip(tree.leaf_names(new), tree.leaves(new), strict=True)
        }
        assert decayed == {"layers.0.b": False, "layers.0.w": True, "w": True}


def test_a_decay_mask_that_selects_no_parameter_is_logged(caplog):
    params = {"w": torch.ones(2, 2), "b": torch.ones(2)}

    def messages(**options):
        caplog.clear()
        adamw(0.1, **options).init(params)
        return [record.getMessage() for record in caplog.records]

    (message,) = messages(weight_decay=0.1, decay_mask=lambda name, leaf: "kernel" in name)
    assert message.startswith("adamw: weight_decay=0.1 has no effect")
    assert message.endswith("params.b, params.w")
    assert not messages(weight_decay=0.1, decay_mask=lambda name, leaf: name == "b")
    assert not messages(decay_mask=lambda name, leaf: False)
    params = {"b": torch.ones(2)}  # The default mask selects no bias, and need not.
    assert not messages(weight_decay=0.1)


def test_the_text_of_a_decay_mask_is_the_same_in_every_process():
    """Ranks and resumed runs compare it, so it must not contain the order of a set or an address."""
    mask = functools.partial(lambda name, leaf, names: name in names, names={"a", "b"})
    assert adamw(0.1, weight_decay=0.1, decay_mask=mask).options["decay_mask"] == "partial"


def test_matrices_and_everything_select_by_the_number_of_axes():
    for ndim in range(4):
        leaf = torch.ones((1,) * ndim)
        assert matrices("w", leaf) == (ndim >= 2)
        assert everything("w", leaf)


# Partition


def first_key(name, leaf):
    return name.split(".")[0]


def test_partition_keeps_the_structure_and_groups_the_state_by_label():
    params = {"body": [torch.ones(2), (torch.ones(3),)], "head": {"w": torch.ones(2, 2)}}
    optimizer = partition({"head": adamw(0.1), "body": sgd(0.1, momentum=0.9)}, first_key)
    state = optimizer.init(params)
    assert set(state) == {"head", "body"}
    assert set(state["head"]["mu"]) == {"head.w"}
    assert set(state["body"]["momentum"]) == {"body.0", "body.1.0"}
    new, new_state = optimizer.update(tree.map(torch.ones_like, params), state, params, rates(optimizer))
    assert tree.signature(new) == tree.signature(params)
    assert isinstance(new["body"][1], tuple)
    assert tree.signature(new_state) == tree.signature(state)


def test_partition_prefixes_schedules_with_their_labels():
    inner = partition({"x": sgd(1.0), "y": sgd(2.0)}, lambda name, leaf: name[-1])
    outer = partition({"a": inner, "b": sgd(lambda k: 3.0 + k)}, first_key)
    assert {name: schedule(1) for name, schedule in outer.schedules.items()} == {
        "a/x/lr": 1.0,
        "a/y/lr": 2.0,
        "b/lr": 4.0,
    }
    params = {"a": {"x": torch.zeros(1), "y": torch.zeros(1)}, "b": torch.zeros(1)}
    new, _ = outer.update(tree.map(torch.ones_like, params), outer.init(params), params, rates(outer))
    assert [float(leaf) for leaf in tree.leaves(new)] == [-1.0, -2.0, -3.0]


def test_partition_of_an_empty_tree():
    optimizer = partition({"a": sgd(0.1), "b": adamw(0.1)}, first_key)
    new, _ = optimizer.update({}, optimizer.init({}), {}, rates(optimizer))
    assert new == {}


def test_partition_refuses_unknown_and_unused_labels():
    with pytest.raises(OptionError, match=r"partition: label_fn gave x the label 'x'; the optimizers are a, b"):
        partition({"a": sgd(0.1), "b": sgd(0.1)}, first_key).init(
            {"a": torch.ones(1), "b": torch.ones(1), "x": torch.ones(1)}
        )
    with pytest.raises(OptionError, match=r"partition: no parameter has the label b; all have a"):
        partition({"a": sgd(0.1), "b": sgd(0.1)}, first_key).init({"a": torch.ones(1)})


def test_partition_does_not_confuse_leaves_of_the_same_name():
    """`{"a.b": x, "a": {"b": y}}` is refused, or each leaf gets its own update."""
    params = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    optimizer = partition({"all": sgd(1.0)}, lambda name, leaf: "all")
    try:
        new, _ = optimizer.update(tree.map(torch.ones_like, params), optimizer.init(params), params, rates(optimizer))
    except FtrainError:
        return
    assert float(new["a.b"]) == -1.0
    assert float(new["a"]["b"]) == 0.0


def test_partition_does_not_change_frozen_parameters():
    optimizer = partition({"a": sgd(0.1), "b": adamw(0.1)}, first_key)
    step = ft.train_step(lambda p, x: (p["a"] * p["b"] * p["c"] * x).sum(), optimizer, trainable=["a", "b"])
    state = step.init({name: torch.ones(2) for name in "abc"})
    new, metrics = step(state, torch.ones(2))
    assert torch.equal(new.frozen["c"], torch.ones(2))
    assert new.params["c"] is None
    assert {"a/lr", "b/lr"} <= set(metrics)


# Options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgd(0.1, momentum=1.0), r"sgd: momentum is 1\.0, needs a number in \[0, 1\)"),
        (lambda: sgd(0.1, momentum=-0.1), r"sgd: momentum is -0\.1"),
        (lambda: sgd(0.1, momentum=math.nan), r"sgd: momentum is nan"),
        (lambda: sgd(0.1, weight_decay=-1.0), r"sgd: weight_decay is -1\.0, needs a number in \[0, inf\)"),
        (lambda: sgd(0.1, weight_decay=math.inf), r"sgd: weight_decay is inf"),
        (lambda: sgd(0.1, nesterov=True), r"sgd: nesterov is True, needs momentum > 0"),
        (lambda: adamw(0.1, b1=1.0), r"adamw: b1 is 1\.0, needs a number in \[0, 1\)"),
        (lambda: adamw(0.1, b2=-0.5), r"adamw: b2 is -0\.5"),
        (lambda: adamw(0.1, b2=math.nan), r"adamw: b2 is nan"),
        (lambda: adamw(0.1, eps=-1e-8), r"adamw: eps is -1e-08"),
        (lambda: adamw(0.1, weight_decay=-0.1), r"adamw: weight_decay is -0\.1"),
        (lambda: adamw(0.1, weight_decay=math.nan), r"adamw: weight_decay is nan"),
        (lambda: adamw(math.nan), r"adamw: lr is nan"),
        (lambda: sgd(math.inf), r"lr is inf"),
        (lambda: sgd("0.1"), r"sgd: lr is '0\.1', needs a finite number, or a function"),
        (lambda: adamw(None), r"adamw: lr is None"),
        (lambda: ft.optim.noise("0.1"), r"noise: stddev is '0\.1', needs a finite number"),
        (lambda: adamw(0.1, b1="0.9"), r"adamw: b1 is '0\.9'"),
        (lambda: sgd(0.1, momentum=0.9, dampening=1.5), r"sgd: dampening is 1\.5, needs a number in \[0, 1\]"),
        (
            lambda: sgd(0.1, momentum=0.9, nesterov=True, dampening=0.1),
            r"nesterov is True, needs momentum > 0 and dampening 0; found 0\.9 and 0\.1",
        ),
        (lambda: adam(0.1, b2=1.0), r"adam: b2 is 1\.0, needs a number in \[0, 1\)"),
        (lambda: rmsprop(0.1, alpha=1.0), r"rmsprop: alpha is 1\.0"),
        (lambda: rmsprop(0.1, momentum=-1), r"rmsprop: momentum is -1"),
        (lambda: adagrad(0.1, lr_decay=-1.0), r"adagrad: lr_decay is -1\.0"),
        (lambda: adagrad(0.1, initial_accumulator_value=-1.0), r"adagrad: initial_accumulator_value is -1\.0"),
        (lambda: nadam(0.1, momentum_decay=-1.0), r"nadam: momentum_decay is -1\.0"),
        (lambda: radam(0.1, b1=1.0), r"radam: b1 is 1\.0"),
        (lambda: lion(0.1, b2=1.0), r"lion: b2 is 1\.0"),
        (lambda: lamb(0.1, eps=-1.0), r"lamb: eps is -1\.0"),
        (lambda: adafactor(0.1, beta2_decay=0.5), r"adafactor: beta2_decay is 0\.5, needs a number in \[-inf, 0\]"),
        (lambda: adamw(0.1, amsgrad="no"), "adamw: amsgrad is 'no', needs True or False"),
        (lambda: sgd(0.1, momentum=0.9, nesterov="true"), "sgd: nesterov is 'true', needs True or False"),
        (lambda: adafactor(0.1, eps=1e-3), r"adafactor: eps is 0\.001, needs a tuple"),
        (lambda: adafactor(0.1, eps=(-1.0, 0.0)), r"adafactor: eps\[0\] is -1\.0"),
        (lambda: adafactor(0.1, d=0.5), r"adafactor: d is 0\.5, needs a number in \[1, inf\)"),
        (lambda: muon(0.1, momentum=1.0), r"muon: momentum is 1\.0"),
        (lambda: muon(0.1, ns_steps=0), r"muon: ns_steps is 0"),
        (lambda: muon(0.1, ns_coefficients=(1.0, 2.0)), r"muon: ns_coefficients is \(1\.0, 2\.0\), needs three"),
        (lambda: muon(0.1, ns_coefficients=3.0), r"muon: ns_coefficients is 3\.0, needs three"),
        (
            lambda: muon(0.1, ns_coefficients=("3", "2", "1")),
            r"muon: ns_coefficients\[0\] is '3', needs a finite number",
        ),
        (lambda: muon(0.1, ns_coefficients=(3.0, math.nan, 2.0)), r"muon: ns_coefficients\[1\] is nan, needs a finite"),
        (lambda: partition([sgd(0.1)], {"all": ["*"]}), r"partition: optimizers is \[.*; needs label -> optimizer"),
        (lambda: muon(0.1, adjust_lr_fn="other"), r"muon: adjust_lr_fn is 'other'; choices are original, match"),
        (lambda: schedule_free_adamw(0.1, b1=0.0), r"schedule_free_adamw: b1 is 0\.0"),
        *(
            (lambda make=make: make(-0.1), r": lr is -0\.1, needs a number in \[0, inf\)")
            for make in OPTIMIZERS.values()
        ),
        (lambda: sgd(0.1, momentum=None), r"sgd: momentum is None"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_muon_refuses_parameters_that_are_no_matrices():
    with pytest.raises(StructureError, match=r"muon: the parameter params has the shape \[3\], needs two axes"):
        ft.optim.muon(0.1).init(torch.ones(3))
    with pytest.raises(StructureError, match=r"muon: the parameter layers\.0\.b has the shape \[4\], needs two axes"):
        muon(0.1).init({"layers": [{"w": torch.ones(4, 4), "b": torch.ones(4)}]})


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "partition"])
def test_a_state_of_another_optimizer_is_refused(family):
    optimizer = FAMILIES[family]()
    params = {"w": torch.ones(2)}
    for other in ({"m": params}, None):
        with pytest.raises(StructureError, match="the optimizer state has"):
            optimizer.update(params, other, params, rates(optimizer))


@pytest.mark.parametrize("requires_grad", ["params", "grads"])
@pytest.mark.parametrize("factory", [sgd, adam, rmsprop])
def test_an_update_that_autograd_would_record_is_refused(factory, requires_grad):
    """For instance in an inner loop within a loss: torch's fused kernels would silently give a gradient of 0."""
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    optimizer = factory(0.1)
    {"params": params, "grads": grads}[requires_grad]["w"].requires_grad_()
    with pytest.raises(LossError, match=r"cannot be differentiated.*detach them"):
        optimizer.update(grads, optimizer.init(params), params, {"lr": 0.1})
    with torch.no_grad():
        optimizer.update(grads, optimizer.init(params), params, {"lr": 0.1})


def test_schedule_free_params_refuses_the_state_of_another_optimizer_or_model():
    with pytest.raises(StructureError, match="not that of schedule_free_adamw"):
        schedule_free_params({"w": torch.ones(2)}, adamw(0.1).init({"w": torch.ones(2)}))
    with pytest.raises(StructureError, match="the state has w, which the parameters do not have"):
        schedule_free_params({"v": torch.ones(2)}, schedule_free_adamw(0.1).init({"w": torch.ones(2)}))


def test_schedule_free_params_takes_the_state_of_one_label_of_a_partition():
    """That state holds only the parameters of its label, by name."""
    params = {"layers": [{"w": torch.ones(2, 2, dtype=F64), "b": torch.ones(2, dtype=F64)}], "head": torch.ones(2)}
    optimizer = partition({"free": schedule_free_adamw(0.1), "rest": sgd(0.1)}, {"free": ["layers.*"]})
    state = optimizer.init(params)
    for scale in (1.0, -3.0):
        grads = tree.map(lambda leaf, scale=scale: scale * leaf, params)
        params, state = optimizer.update(grads, state, params, rates(optimizer))
    actual = schedule_free_params(params, state["free"])
    named = {f"layers.0.{key}": leaf for key, leaf in params["layers"][0].items()}
    averages = schedule_free_params(named, state["free"])
    assert bits(actual["layers"][0]) == bits({key: averages[f"layers.0.{key}"] for key in ("w", "b")})
    assert bits(actual["head"]) == bits(params["head"])
    assert not torch.equal(actual["layers"][0]["w"], params["layers"][0]["w"])


@pytest.mark.parametrize("family", OPTIMIZERS)
def test_a_donated_update_does_not_write_to_an_expanded_parameter(family):
    """Its elements share one place in memory."""
    optimizer = OPTIMIZERS[family]()
    params = {"w": torch.ones(1, dtype=F64).expand(2, 2)}
    grads = {"w": torch.tensor([[1.0, 2.0], [-3.0, 4.0]], dtype=F64)}
    expected = optimizer.update(grads, optimizer.init(params), params, rates(optimizer))
    actual = optimizer.update(grads, optimizer.init(params), params, rates(optimizer), donate=True)
    assert bits(actual) == bits(expected)
    assert bits(params) == bits({"w": torch.ones(2, 2, dtype=F64)})


def test_blocks_hold_every_leaf_once():
    """If a device does not cache memory, formulas take one block at a time: several small leaves, or a large one."""
    params = [torch.ones(size) for size in (3, BLOCK, BLOCK + 1, 5, 0, BLOCK // 2, BLOCK // 2, 1)]
    plan, _ = StructureCache(Planner(matrices).plan)(params, params)
    assert plan.blocks == [([0], False), ([1], False), ([2], False), ([3, 4, 5], False), ([6, 7], False)]


def test_options_of_zero_are_accepted():
    sgd(0.0, momentum=0.0, weight_decay=0.0)
    adamw(0.0, b1=0.0, b2=0.0, eps=0.0, weight_decay=0.0)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (sgd(0.1), "sgd(constant(0.1))"),
        (
            sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            "sgd(constant(0.1), momentum=0.9, nesterov, weight_decay=0.0001)",
        ),
        (
            adamw(ft.schedules.warmup_cosine(3e-4, 100, 2000), weight_decay=0.1),
            "adamw(warmup_cosine(3e-4, 100, 2000), weight_decay=0.1)",
        ),
        (
            partition({"a": sgd(0.1), "b": sgd(0.2)}, first_key),
            "partition(a: sgd(constant(0.1)), b: sgd(constant(0.2)))",
        ),
    ],
)
def test_the_text_of_optimizers(optimizer, text):
    assert optimizer.text == text


@pytest.mark.parametrize(
    "factory", [adagrad, adam, adamw, lamb, lion, muon, nadam, radam, rmsprop, schedule_free_adamw, sgd]
)
def test_every_numeric_argument_is_in_the_text_or_the_options(factory):
    """Ranks compare both, to see that their optimizers are the same."""
    # Without momentum, `sgd` has no dampening.
    momentum = {"momentum": 0.8} if factory is sgd else {}
    plain, compared = factory(0.1, **momentum), 0
    for name, parameter in inspect.signature(factory).parameters.items():
        if name not in ("lr", *momentum) and isinstance(parameter.default, float):
            other = factory(0.1, **momentum, **{name: parameter.default * 0.5 or 0.25})
            assert (other.text, other.options) != (plain.text, plain.options), name
            compared += 1
    assert compared


def test_a_rate_is_a_number_or_any_schedule():
    for make in (sgd, adamw):
        assert make(0.1).schedules["lr"](7) == 0.1
        assert make(lambda k: k / 10).schedules["lr"](7) == 0.7


def test_train_step_refuses_other_optimizers():
    weight = torch.nn.Parameter(torch.ones(1))
    for other in (torch.optim.SGD([weight], lr=0.1), 0.1, None, sgd):
        with pytest.raises(ComposeError, match=r"train_step: the optimizer is .*ft\.optim\.adamw"):
            ft.train_step(lambda p, b: p.sum(), other)


def test_optimizers_are_frozen_records():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sgd(0.1).text = "other"


UNDER_OTHER_DEFAULTS = """
import torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
import ftrain as ft
for make in (ft.optim.adamw, ft.optim.nadam, ft.optim.radam, ft.optim.schedule_free_adamw):
    state = make(0.1).init({"w": torch.ones(2, device="cpu")})
    print(*(f"{leaf.dtype} {leaf.device}" for leaf in state.values() if isinstance(leaf, torch.Tensor)), sep="\\n")
optimizer = ft.optim.adjustable(ft.optim.adamw_8bit(0.1, block=2, min_size=1))
step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optimizer)
state = ft.optim.adjust(step.init({"w": torch.ones(2, device="cpu")}), {"lr": 0.5})
state, metrics = step(state, torch.ones(2, device="cpu"))
evaluated = ft.eval_step(lambda params, batch: ((params["w"] * batch).sum(), {"number": 0.1}))
assert ft.evaluate(evaluated, state, [torch.ones(2, device="cpu")])["number"] == 0.1
print(*(f"{leaf.dtype} {leaf.device}" for leaf in ft.tree.leaves(state) if leaf.ndim == 0), sep="\\n")
"""


def test_counts_do_not_depend_on_the_default_dtype_and_device():
    """A count in bfloat16 would silently stop at 256; for one on a GPU, every step would wait."""
    completed = subprocess.run([sys.executable, "-c", UNDER_OTHER_DEFAULTS], capture_output=True, text=True, check=True)
    lines = completed.stdout.splitlines()
    # Of adamw, nadam, radam and schedule_free_adamw; then the step, the factor and the count of the last state.
    assert len(lines) == 1 + 2 + 1 + 4 + 3
    assert set(lines) == {"torch.float32 cpu", "torch.float64 cpu", "torch.int64 cpu"}
