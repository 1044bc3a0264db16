"""Fifty float64 steps of every option of every optimizer equal those of torch, or of a formula written out here."""

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from tests.parity.fifty_steps import F64, STEPS, TIGHT, make_grads, randn

LR = 0.05
DECAY = {"weight_decay": 0.1, "decay_mask": lambda name, leaf: True}

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq", "nu_max": "max_exp_avg_sq"}
TORCH_OPTIMIZERS = {
    "sgd": (optim.sgd, torch.optim.SGD, {"momentum": "momentum_buffer"}),
    "adam": (optim.adam, torch.optim.Adam, MOMENTS),
    "adamw": (optim.adamw, torch.optim.AdamW, MOMENTS),
    "rmsprop": (
        optim.rmsprop,
        torch.optim.RMSprop,
        {"nu": "square_avg", "mu": "grad_avg", "momentum": "momentum_buffer"},
    ),
    "adagrad": (optim.adagrad, torch.optim.Adagrad, {"sum": "sum"}),
    "nadam": (optim.nadam, torch.optim.NAdam, MOMENTS),
    "radam": (optim.radam, torch.optim.RAdam, MOMENTS),
    "adafactor": (optim.adafactor, torch.optim.Adafactor, {"row": "row_var", "column": "col_var"}),
    "muon": (optim.muon, torch.optim.Muon, {"momentum": "momentum_buffer"}),
}
"""Name -> our optimizer, the class of torch, and torch's name for each entry of our state."""

CASES = {
    "sgd": [
        {"momentum": 0.9, "dampening": 0.3, **DECAY},
        {"momentum": 0.9, "dampening": 1.0},
        {"momentum": 0.9, "nesterov": True, "maximize": True, **DECAY},
        {"dampening": 0.5},
        {"maximize": True},
    ],
    "adam": [{}, DECAY, {"amsgrad": True}, {"maximize": True, **DECAY}, {"b1": 0.5, "b2": 0.8, "eps": 1e-2}],
    "adamw": [{"amsgrad": True, **DECAY}, {"maximize": True, **DECAY}, {"amsgrad": True, "maximize": True}],
    "rmsprop": [
        {},
        {"alpha": 0.9, "eps": 1e-3, **DECAY},
        {"centered": True},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.5, "centered": True, **DECAY},
    ],
    "adagrad": [
        {},
        {"lr_decay": 0.01, "maximize": True, **DECAY},
        {"initial_accumulator_value": 0.5, "eps": 1e-3},
    ],
    "nadam": [
        {},
        DECAY,
        {"decoupled_weight_decay": True, **DECAY},
        {"momentum_decay": 0.1, "b1": 0.8, "b2": 0.9, "maximize": True},
    ],
    "radam": [
        {},
        DECAY,
        {"decoupled_weight_decay": True, **DECAY},
        {"b1": 0.8, "b2": 0.9, "maximize": True},
        {"b2": 0.5},
    ],
    "adafactor": [
        {},
        {"maximize": True, **DECAY},
        {"beta2_decay": -0.5, "eps": (1e-3, 0.1), "d": 2.0},
    ],
    "muon": [
        {},
        {"nesterov": False, **DECAY},
        {"momentum": 0.8, "ns_steps": 3, "eps": 1e-3, "adjust_lr_fn": "match_rms_adamw"},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
    ],
}
PATHS = ["eager", "donated", "unfused", "unread", "graph"]


def make_params(vectors=True):
    """Return parameters of ranks 0 to 4, or matrices alone: torch's Muon takes no others."""
    shapes = {"matrix": (4, 3), "wide": (2, 5), "tall": (7, 2), "one": (1, 1)}
    if vectors:
        shapes |= {"scalar": (), "vector": (5,), "image": (2, 3, 4, 4), "element": (1,)}
    return {name: randn(shape, index) for index, (name, shape) in enumerate(shapes.items())}


def torch_options(options):
    """Return our options under the names of torch."""
    options = {"weight_decay": 0.0} | {name: value for name, value in options.items() if name != "decay_mask"}
    if "b1" in options or "b2" in options:
        options["betas"] = options.pop("b1", 0.9), options.pop("b2", 0.999)
    return options


def train(optimizer, path, params, steps=STEPS):
    opt_state = optimizer.init(params)
    params = tree.clone(params)
    for step in range(steps):
        rates = {name: schedule(step) for name, schedule in optimizer.schedules.items()}
        if path == "graph":
            rates = {name: torch.tensor(rate, dtype=F64) for name, rate in rates.items()}
        params, opt_state = optimizer.update(
            make_grads(params, step), opt_state, params, rates, donate=path == "donated"
        )
    return params, opt_state


def case_id(options):
    named = {name: value for name, value in options.items() if name != "decay_mask"}
    return "-".join(f"{name}={value}" for name, value in named.items()) or "plain"


ALL_CASES = [
    pytest.param(name, options, id=f"{name}-{case_id(options)}") for name, cases in CASES.items() for options in cases
]

FUSED = {"sgd", "adam", "adamw", "adagrad"}


def cases_on_path(path):
    """Yield all cases of an optimizer if the path has code of its own for it, else the case with the most options.

    `unfused` is `eager` where torch has no fused kernel; a donated update has the bits of the others, which
    `test_donated_equals_undonated_bitwise` shows for every option.
    """
    for name, cases in CASES.items():
        own_code = path in {"eager", "graph"} or (path == "unfused" and name in FUSED)
        for options in cases if own_code else [max(cases, key=len)]:
            yield pytest.param(path, name, options, id=f"{path}-{name}-{case_id(options)}")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        *(("eager", shape) for shape in [(20, 20), (30, 17), (8, 64), (2, 5)]),
        # Muon updates matrices of this size one by one, not stacked.
        pytest.param("eager", (520, 520), marks=pytest.mark.exhaustive),
        *((path, (17, 30)) for path in PATHS[1:]),
    ],
    ids=str,
)
def test_muon_updates_matrices_of_one_shape_as_torch_updates_each_alone(shape, path, pretend):
    pretend(path)
    start = {f"w{index}": randn(shape, index) for index in range(3)} | {"other": randn((8, 10), 9)}
    decays = {"weight_decay": 0.1, "decay_mask": lambda name, leaf: name != "w1"}
    steps = STEPS if shape[0] < 100 else 2

    params, opt_state = train(ft.optim.muon(LR, **decays), path, start, steps)

    for name in start:
        leaf = start[name].clone().requires_grad_()
        theirs = torch.optim.Muon([leaf], lr=LR, weight_decay=0.1 if name != "w1" else 0.0)
        for step in range(steps):
            leaf.grad = make_grads(start, step)[name]
            theirs.step()
        torch.testing.assert_close(params[name], leaf.detach(), **TIGHT)
        assert torch.equal(opt_state["momentum"][name], theirs.state[leaf]["momentum_buffer"])


@pytest.mark.parametrize(("path", "name", "options"), [case for path in PATHS for case in cases_on_path(path)])
def test_fifty_steps_equal_torch(name, options, path, pretend):
    pretend(path)
    make, torch_class, state_names = TORCH_OPTIMIZERS[name]
    start = make_params(vectors=name != "muon")
    params, opt_state = train(make(LR, **{"weight_decay": 0.0, **options}), path, start)

    leaves = {key: leaf.clone().requires_grad_() for key, leaf in start.items()}
    theirs = torch_class(list(leaves.values()), lr=LR, **torch_options(options))
    for step in range(STEPS):
        for leaf, grad in zip(leaves.values(), make_grads(start, step).values(), strict=True):
            leaf.grad = grad
        theirs.step()
    torch.testing.assert_close(params, {key: leaf.detach() for key, leaf in leaves.items()}, **TIGHT)
    for ours, their in state_names.items():
        if ours in opt_state:
            expected = {key: theirs.state[leaf][their] for key, leaf in leaves.items() if their in theirs.state[leaf]}
            assert expected
            torch.testing.assert_close({key: opt_state[ours][key] for key in expected}, expected, **TIGHT)


@pytest.mark.parametrize(("name", "options"), ALL_CASES)
def test_donated_equals_undonated_bitwise(name, options):
    make = TORCH_OPTIMIZERS[name][0]
    start = make_params(vectors=name != "muon")
    undonated = train(make(LR, **options), "eager", start, 5)
    donated = train(make(LR, **options), "donated", start, 5)
    for a, b in zip(tree.leaves(donated), tree.leaves(undonated), strict=True):
        assert torch.equal(a, b)


# Formulas written out, for the optimizers that torch does not have


def lion_reference(p, g, state, t, *, b1=0.9, b2=0.99, weight_decay=0.0):
    """Chen et al. 2023, algorithm 2."""
    m = state.get("m", torch.zeros_like(p))
    state["m"] = b2 * m + (1 - b2) * g
    return p - LR * (torch.sign(b1 * m + (1 - b1) * g) + weight_decay * p)


def lamb_reference(p, g, state, t, *, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.0):
    """You et al. 2020, algorithm 2, with the identity for their phi."""
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    r = (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)) ** 0.5 + eps) + weight_decay * p
    length, step = float((p**2).sum()) ** 0.5, float((r**2).sum()) ** 0.5
    return p - LR * (length / step if length and step else 1.0) * r


def schedule_free_reference(y, g, state, t, *, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    """Defazio et al. 2024, equations 3 to 5 with x stored, for a constant rate: x is the plain mean of z."""
    x, z = state.get("x", y), state.get("z", y)
    torch.testing.assert_close(y, (1 - b1) * z + b1 * x, **TIGHT)
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
    state["z"] = z - LR * (g / ((state["v"] / (1 - b2**t)) ** 0.5 + eps) + weight_decay * y)
    state["x"] = (1 - 1 / t) * x + state["z"] / t
    return (1 - b1) * state["z"] + b1 * state["x"]


FORMULAS = {
    "lion": (optim.lion, lion_reference),
    "lamb": (optim.lamb, lamb_reference),
    "schedule_free_adamw": (optim.schedule_free_adamw, schedule_free_reference),
}
FORMULA_CASES = {
    "lion": [{}, DECAY, {"b1": 0.5, "b2": 0.8}],
    "lamb": [{}, DECAY, {"b1": 0.5, "b2": 0.8, "eps": 1e-2}],
    "schedule_free_adamw": [{}, DECAY, {"b1": 0.5, "b2": 0.8, "eps": 1e-2}],
}


# None of them has a fused kernel, so that "unfused" is "eager".
@pytest.mark.parametrize("path", [path for path in PATHS if path != "unfused"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{case_id(options)}")
        for name, cases in FORMULA_CASES.items()
        for options in cases
    ],
)
def test_fifty_steps_equal_the_formula(name, options, path):
    make, formula = FORMULAS[name]
    start = make_params()
    params, _ = train(make(LR, **{"weight_decay": 0.0, **options}), path, start)
    states = {key: {} for key in start}
    expected = dict(start)
    formula_options = {key: value for key, value in options.items() if key != "decay_mask"}
    for step in range(STEPS):
        grads = make_grads(start, step)
        expected = {
            key: formula(leaf, grads[key], states[key], step + 1, **formula_options) for key, leaf in expected.items()
        }
    torch.testing.assert_close(params, expected, **TIGHT)
