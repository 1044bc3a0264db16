"""`linear_cross_entropy` in steps: with wrappers, compiled, in mixed precision, in blocks, and in an evaluation."""

import itertools

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.losses import cross_entropy, linear_cross_entropy
from ftrain.transforms.compile import capture as capturing
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.losses.cases import F64, randn
from tests.losses.linear_cases import (
    CLASSES,
    WIDTH,
    assert_all_close,
    layer,
    loss_of_logits,
    random_labels,
    relative_error,
)


class TinyModel(nn.Module):
    """An embedding, two blocks and a head, whose weight is that of the embedding if `tied`."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def trunk(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


def fused(model, batch):
    hidden = model.trunk(batch["x"])
    return linear_cross_entropy(hidden, model.head.weight, batch["y"], bias=model.head.bias, chunk=7)


def unfused(model, batch):
    return cross_entropy(model.head(model.trunk(batch["x"])), batch["y"])


def batches():
    return [
        {"x": random_labels(4, 5, ignore_index=0, seed=seed), "y": random_labels(4, 5, seed=seed + 9)}
        for seed in range(3)
    ]


def trained_params(criterion, *wrappers, tied=True, dtype=F64):
    """Return the list of parameters after three steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = TinyModel(tied).to(dtype)
    step = ft.compose(ft.train_step(ft.from_module(module, criterion), ft.optim.sgd(0.5, momentum=0.9)), *wrappers)
    state = step.init(seed=0)
    for batch in batches():
        state, _ = step(state, batch)
    return ft.tree.leaves(state.params)


STACKS = {
    "plain": [],
    "remat": [ft.remat()],
    "dots": [ft.remat("dots")],
    "accumulate": [ft.accumulate(2), ft.clip(0.1)],
    "all": [ft.remat(), ft.accumulate(2), ft.clip(0.1), ft.ema()],
}
# The rows (stack, tied) that `make test` runs.
CHOSEN = [("plain", True), ("plain", False), ("dots", True), ("all", True)]
OTHERS = [row for row in itertools.product(STACKS, (True, False)) if row not in CHOSEN]


@pytest.mark.parametrize(("stack", "tied"), [*CHOSEN, *exhaustive_rows(OTHERS)])
def test_steps_train_as_with_the_loss_of_the_logits_eager_and_captured(stack, tied):
    wrappers = STACKS[stack]
    expected = trained_params(unfused, *wrappers, tied=tied)
    captured = ft.compiled(lowering="whole", backend="aot_eager", donate=True)
    assert_all_close(trained_params(fused, *wrappers, tied=tied), expected)
    assert_all_close(trained_params(fused, *wrappers, captured, tied=tied), expected)


# Dynamo looks at the .grad of every tensor it traces, and makes an instance of every Function: torch warns of both.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("stack", ["all", *exhaustive(["plain"])])
def test_split_steps_train_as_with_the_loss_of_the_logits(stack):
    split = ft.compiled(lowering="split", backend="aot_eager")
    assert_all_close(trained_params(fused, *STACKS[stack], split), trained_params(unfused, *STACKS[stack]))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_steps_in_mixed_precision_train_as_with_the_loss_of_the_logits(dtype):
    amp = ft.with_amp(dtype)
    params, expected = (trained_params(criterion, amp, dtype=torch.float32) for criterion in (fused, unfused))
    for param, expected_param in zip(params, expected, strict=True):
        assert param.dtype == torch.float32
        assert relative_error(param, expected_param.double()) < 0.02
    captured = ft.compiled(lowering="whole", backend="aot_eager")
    assert_all_close(trained_params(fused, amp, captured, dtype=torch.float32), params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_the_loss_may_be_inside_of_a_block(policy):
    def trained_params_of_block(function, *wrappers):
        block = ft.block(lambda hidden, weight, labels: function(torch.tanh(hidden), weight, labels).total)
        loss = lambda params, batch: block(params["hidden"], params["weight"], batch) / 2  # noqa: E731
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.5)), *wrappers)
        state, _ = step(step.init({"hidden": randn(9, WIDTH), "weight": layer()[0]}), random_labels(9))
        return ft.tree.leaves(state.params)

    captured = ft.compiled(lowering="whole", backend="eager")
    expected = trained_params_of_block(loss_of_logits)
    for wrappers in ([], [ft.remat(policy)], [ft.remat(policy), captured]):
        assert_all_close(trained_params_of_block(linear_cross_entropy, *wrappers), expected)


def test_all_chunks_are_one_node_of_the_graph_and_no_node_has_all_logits(monkeypatch):
    recorded, capture = [], capturing.capture

    def record(*args):
        recorded.append(capture(*args))
        return recorded[-1]

    monkeypatch.setattr(capturing, "capture", record)
    trained_params(fused, ft.compiled(lowering="whole", backend="eager"))
    (captured,) = recorded
    targets = [node.target for node in captured.graph.nodes]
    assert targets.count(torch.ops.ftrain.linear_cross_entropy.default) == 1
    results = [node.meta.get("val") for node in captured.graph.nodes]
    assert 4 * 5 * CLASSES not in [result.numel() for result in results if isinstance(result, torch.Tensor)]


def test_an_evaluation_gives_the_loss_of_the_logits():
    module = TinyModel(tied=True).double()
    state = ft.train_step(ft.from_module(module, fused), ft.optim.sgd(0.1)).init()
    loss, expected = (
        ft.evaluate(ft.eval_step(ft.from_module(module, criterion)), state, batches())["loss"]
        for criterion in (fused, unfused)
    )
    assert loss == pytest.approx(expected, rel=1e-12)
