"""`lookahead`: slow parameters that follow those of another optimizer."""

import pytest
import torch

import ftrain as ft
from ftrain import optim
from ftrain.errors import ComposeError, OptionError
from tests.optim.quadratic import F64, batches, make_params, quadratic, train


@pytest.mark.parametrize(
    ("wrappers", "k", "alpha"),
    [
        # A graph has k and alpha as constants. Their values are tested eagerly, so one compiled case is enough.
        pytest.param(wrappers, k, alpha, id=f"{k}-{alpha}-{name}", marks=pytest.mark.exhaustive if exhaustive else [])
        for k, alpha in ((5, 0.5), (1, 0.3), (7, 1.0), (3, 0.0))
        for name, wrappers, exhaustive in (
            ("eager", (), False),
            ("donated", (ft.donated(),), False),
            ("compiled", (ft.compiled(backend="eager"),), k != 5),
        )
    ],
)
def test_lookahead_equals_the_algorithm_of_the_paper(k, alpha, wrappers):
    """Algorithm 1 of Zhang et al. 2019, arXiv:1907.08610, around torch's Adam."""
    slow = [leaf.clone() for leaf in make_params().values()]
    fast = [leaf.clone().requires_grad_() for leaf in slow]
    inner = torch.optim.Adam(fast, lr=0.05)
    for number, batch in enumerate(batches(50), start=1):
        for leaf in fast:
            leaf.grad = leaf.detach() * batch + 1
        inner.step()
        if number % k == 0:
            with torch.no_grad():
                for slow_leaf, fast_leaf in zip(slow, fast, strict=True):
                    slow_leaf += alpha * (fast_leaf - slow_leaf)
                    fast_leaf.copy_(slow_leaf)
    state = train(optim.lookahead(optim.adam(0.05), k, alpha), 50, *wrappers)
    for actual, expected in ((state.params, fast), (state.opt_state["slow"], slow)):
        torch.testing.assert_close(list(actual.values()), [leaf.detach() for leaf in expected], rtol=1e-9, atol=1e-12)


def test_the_metric_lookahead_is_1_in_the_steps_that_move_the_slow_parameters():
    step = ft.train_step(quadratic, optim.lookahead(optim.sgd(0.1), 2))
    state, metrics = step(step.init(make_params()), torch.ones((), dtype=F64))
    assert metrics["lookahead"] == 0
    assert step(state, torch.ones((), dtype=F64))[1]["lookahead"] == 1


def test_invalid_lookaheads_are_refused():
    with pytest.raises(ComposeError, match="is a lookahead already"):
        optim.lookahead(optim.lookahead(optim.sgd(0.1)))
    with pytest.raises(OptionError, match="lookahead: k is 0"):
        optim.lookahead(optim.sgd(0.1), 0)
    with pytest.raises(OptionError, match=r"lookahead: alpha is 1\.5, needs a number in \[0, 1\]"):
        optim.lookahead(optim.sgd(0.1), 2, 1.5)
    with pytest.raises(ComposeError, match=r"lookahead: the optimizer is 0\.1"):
        optim.lookahead(0.1)


def test_lookahead_of_a_tree_without_leaves():
    optimizer = optim.lookahead(optim.sgd(0.1), 1)
    assert optimizer.update({}, optimizer.init({}), {}, {"lr": 0.1, "lookahead": 1.0})[0] == {}
