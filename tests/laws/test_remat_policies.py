"""A policy of `remat` keeps what it says and saves the work that it says; other policies are refused."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import OptionError
from tests.bits import assert_same_bits
from tests.laws.remat_model import BATCH, BYTES, LENGTH, MODES, WIDTH, Block, anatomy, build, by_name, make_batch


def test_each_policy_keeps_what_it_says():
    plain = anatomy()
    modes = ("full", "dots", "attention", "none", "products", "everything")
    reports = {mode: anatomy(MODES[mode]()) for mode in modes}
    kept = {mode: report.most["activations"] for mode, report in reports.items()}
    work = {mode: report.flops["tensor contractions"] for mode, report in reports.items()}
    tokens, blocks = BATCH * LENGTH, 4
    # Attention keeps its output and, for each of 2 heads and each token, a log-sum-exp.
    attention = blocks * tokens * (WIDTH + 2) * BYTES
    assert kept["attention"] - kept["full"] == attention
    assert kept["products"] - kept["full"] == blocks * tokens * 5 * WIDTH * BYTES
    assert kept["dots"] - kept["full"] == kept["products"] - kept["full"] + attention
    assert kept["none"] == plain.most["activations"] > kept["dots"]
    product = blocks * 2 * tokens * WIDTH * WIDTH
    assert work["full"] - work["attention"] == blocks * 2 * 2 * tokens * LENGTH * WIDTH
    assert work["full"] - work["products"] == 3 * product
    # `Block` writes over the results of its last two products, so they are computed again; the very last product of a
    # stage is not, for nothing needs it.
    assert work["dots"] == work["everything"] == work["none"] + product + product // 2
    assert work["none"] == plain.flops["tensor contractions"]


def test_each_block_may_have_its_own_policy():
    mixed = anatomy(ft.remat(blocks={Block: "full", "stages.1.1": "none"}))
    plain, full = anatomy(), anatomy(ft.remat())
    assert full.most["activations"] < mixed.most["activations"] < plain.most["activations"]
    assert "remat(dots=1, none=1, everything=1)" in repr(build(ft.remat(blocks=by_name)))
    all_dots = build(ft.remat(blocks=lambda name, module: "dots" if isinstance(module, Block) else None))
    assert "remat(dots, blocks=4)" in repr(all_dots)


def test_blocks_within_blocks_are_recomputed_one_by_one():
    """Less is in memory at once, and each inner block runs twice more instead of once."""
    stages = {"stages": 3, "blocks": 3, "batch": 64}
    outer, inner = (anatomy(ft.remat(blocks=[block]), **stages) for block in (nn.Sequential, Block))
    both = anatomy(ft.remat(blocks=[nn.Sequential, Block]), **stages)
    assert both.peak < 0.9 * min(outer.peak, inner.peak)
    forward = 9 * 2 * 64 * LENGTH * (5 * WIDTH * WIDTH + 2 * LENGTH * WIDTH)
    plain_work, outer_work, both_work = (
        report.flops["tensor contractions"] for report in (anatomy(**stages), outer, both)
    )
    assert plain_work < outer_work <= plain_work + forward
    assert plain_work + forward < both_work <= plain_work + 2 * forward


def test_functions_within_a_block_are_blocks():
    @ft.block
    def inner(w, x):
        return torch.tanh(x @ w).sin()

    @ft.block
    def outer(w, x):
        for _ in range(8):
            x = inner(w, x)
        return x

    def flat(w, x):
        for _ in range(8):
            x = torch.tanh(x @ w).sin()
        return x

    def loss(function):
        return lambda params, batch: function(params["w"], batch).square().sum()

    params, batch = {"w": torch.randn(16, 16, dtype=torch.float64)}, torch.randn(64, 16, dtype=torch.float64)
    states, peaks = [], []
    for function, *wrappers in ((flat,), (ft.block(flat), ft.remat()), (outer, ft.remat())):
        step = ft.compose(ft.train_step(loss(function), ft.optim.sgd(0.1)), *wrappers)
        states.append(step(step.init(params), batch)[0].params)
        peaks.append(ft.anatomy(step, step.init(params), batch, measure=False).peak)
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])
    assert peaks[2] < peaks[1]


def test_twelve_blocks_keep_two_fifths_for_a_third_more_work():
    plain = anatomy(stages=12, blocks=1)
    rematerialised = anatomy(ft.remat(), stages=12, blocks=1)
    assert rematerialised.most["activations"] < 0.4 * plain.most["activations"]
    assert sum(rematerialised.flops.values()) < 4 / 3 * sum(plain.flops.values())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("most", "'most'; choices are full, dots, attention, none, and a function"),
        (None, "None"),
    ],
)
def test_an_unknown_policy_is_refused(policy, message):
    with pytest.raises(OptionError, match=f"remat: policy is {message}"):
        ft.remat(policy=policy)
    if policy is not None:
        with pytest.raises(OptionError, match=f"remat: policy is {message}"):
            build(ft.remat(blocks={Block: policy}))
        with pytest.raises(OptionError, match=f"remat: policy is {message}"):
            build(ft.remat(blocks=lambda name, module: policy))


def test_a_policy_that_returns_no_bool_is_refused():
    step = build(ft.remat(policy=lambda op, *args, **kwargs: torch.ones(())))
    with pytest.raises(OptionError, match=r"remat: the policy <lambda> returned .* for aten.*; needs True or False"):
        step(step.init(), make_batch())


def test_blocks_that_the_model_does_not_have_are_refused():
    with pytest.raises(OptionError, match=r"Stages has no block 'stages\.7'"):
        build(ft.remat(blocks={"stages.7": "dots"}))
    with pytest.raises(OptionError, match="Stages has no such blocks"):
        build(ft.remat(blocks=lambda name, module: None))
