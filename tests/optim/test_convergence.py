"""Every optimizer solves the same four problems in float32, and two of them in bfloat16.

`make test` runs the quadratic in bfloat16, and the digits in float32 for optimizers that torch does not have;
`make test-all` runs the rest.

The rate rises linearly over the first tenth of the steps, and then falls linearly to zero; its peaks in the table below
are the best of a coarse grid. In bfloat16, the quadratic has parameters and moments of that dtype, and the digits train
in mixed precision.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import ftrain as ft
from ftrain import optim, tree
from tests.exhaustive import choose, exhaustive_rows
from tests.laws.optimizers import MATRICES_ONLY, OPTIMIZERS

RATES = {
    "sgd": (1.0, 0.003, 1.0, 1.0),
    "momentum": (0.3, 0.002, 0.1, 1.0),
    "dampened": (1.0, 0.002, 0.1, 1.0),
    "adam": (1.0, 1.0, 0.1, 0.3),
    "amsgrad": (1.0, 1.0, 0.1, 0.3),
    "adamw": (1.0, 1.0, 0.1, 0.3),
    "nearest": (1.0, 1.0, 0.1, 0.3),
    "stochastic": (1.0, 1.0, 0.1, 0.3),
    "adamw_8bit": (1.0, 1.0, 0.1, 0.3),
    "rmsprop": (1.0, 0.1, 1.0, 0.3),
    "centered": (0.1, 0.03, 0.003, 0.03),
    "adagrad": (1.0, 1.0, 1.0, 1.0),
    "nadam": (1.0, 0.3, 1.0, 0.3),
    "radam": (1.0, 0.3, 1.0, 0.3),
    "lion": (0.1, 0.03, 0.01, 0.03),
    "lamb": (1.0, 0.1, 0.1, 0.1),
    "adafactor": (1.0, 1.0, 1.0, 0.3),
    "muon": (0.1, 0.03, 0.03, 0.1),
    "schedule_free": (1.0, 0.3, 1.0, 0.3),
}
"""Name -> peak rate for each of `PROBLEMS`, in their order.

The rates are low enough that the result does not depend on how a CPU rounds its products.
"""


def quadratic():
    """Return a problem whose condition number is 100, in a rotated basis."""
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=draw))[0]
    root = torch.logspace(-1, 0, 6).unsqueeze(-1) * basis

    def loss(params, batch):
        return (root @ params["w"].float()).square().sum()

    return {"w": torch.randn(6, 4, generator=draw)}, loss, [None] * 300


def rosenbrock():
    def loss(params, batch):
        x, y = params["w"].float().flatten()
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2

    return {"w": torch.tensor([[-1.2, 1.0]])}, loss, [None] * 1000


def standardised(name):
    """Return the inputs of a data set, each with mean 0 and variance 1, and its labels."""
    from sklearn import datasets  # Here, because the import takes a second in each process of the tests.

    data = getattr(datasets, name)()
    x, y = data.data, data.target
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def logistic_regression():
    x, y = standardised("load_breast_cancer")
    params = {"w": torch.zeros(30, 1), "b": torch.zeros(1)}

    def loss(params, batch):
        return F.binary_cross_entropy_with_logits((x @ params["w"] + params["b"]).squeeze(-1).float(), y.float())

    return params, loss, [None] * 150


def digits():
    x, y = standardised("load_digits")
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(64, 32, generator=draw) / 8, "b": torch.zeros(32), "out": torch.zeros(32, 10)}

    def loss(params, batch):
        hidden = torch.relu(x[batch] @ params["w"] + params["b"])
        return F.cross_entropy((hidden @ params["out"]).float(), y[batch])

    return params, loss, [torch.randperm(len(x), generator=draw)[:256] for _ in range(150)]


NOT_IN_TORCH = {"nearest", "stochastic", "adamw_8bit", "lion", "lamb", "schedule_free"}

PROBLEMS = {quadratic: 1e-3, rosenbrock: 0.05, logistic_regression: 0.12, digits: 0.03}
"""Problem -> the final loss divided by the initial loss must be below this.

A problem is a function that returns the parameters, the loss function and the batches.
"""


@cache
def setup(problem):
    return problem()


def remaining_loss(name, problem, dtype, rate):
    """Return the final loss divided by the initial loss."""
    params, loss, batches = setup(problem)
    optimizer = OPTIMIZERS[name](ft.schedules.warmup_linear(rate, len(batches) // 10, len(batches)))
    if name in MATRICES_ONLY and any(leaf.ndim != 2 for leaf in tree.leaves(params)):
        parts = {"matrices": optimizer, "rest": optim.adamw(0.02)}
        optimizer = optim.partition(parts, lambda _, leaf: "matrices" if leaf.ndim == 2 else "rest")
    has_data = problem in (logistic_regression, digits)
    step = ft.donated(ft.train_step(loss, optimizer))
    if dtype == torch.bfloat16 and has_data:
        step = ft.with_amp("bf16")(step)
    state = step.init(tree.clone(params) if has_data else tree.cast(params, dtype))
    for batch in batches:
        state, _ = step(state, batch)
    final_params = state.params
    if name == "schedule_free":
        final_params = optim.schedule_free_params(final_params, state.opt_state)
    return float(loss(final_params, batches[0]) / loss(params, batches[0]))


@pytest.mark.parametrize(
    ("problem", "dtype"),
    # One problem has parameters and moments in bfloat16, and one is in mixed precision.
    [
        (quadratic, torch.bfloat16),
        *exhaustive_rows(
            [
                (quadratic, torch.float32),
                (rosenbrock, torch.float32),
                (logistic_regression, torch.float32),
                (digits, torch.bfloat16),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_solves_the_problem(name, problem, dtype):
    check(name, problem, dtype)


# The other optimizers equal those of torch, as `tests/parity` tests.
@pytest.mark.parametrize("name", choose([*OPTIMIZERS], NOT_IN_TORCH))
def test_learns_the_digits(name):
    check(name, digits, torch.float32)


def check(name, problem, dtype):
    rate = RATES[name][list(PROBLEMS).index(problem)]
    assert remaining_loss(name, problem, dtype, rate) < PROBLEMS[problem]


def test_every_optimizer_has_its_rates():
    assert RATES.keys() == OPTIMIZERS.keys()
