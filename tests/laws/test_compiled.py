"""Compilation changes nothing but rounding: with Inductor, in two pieces, over many steps, with stock dropout."""

import inspect
import logging

import pytest
import torch

import ftrain as ft
from ftrain.errors import TraceError
from ftrain.transforms.compile import capture as capturing
from tests.exhaustive import choose, exhaustive
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.registry import ALONE, STACKS, is_narrow
from tests.laws.test_pipelines import assert_equal, blocks_for, build, close_trees, train

WIDE = ("accumulate", "clip", "ema", "swa", "skip")
"""A stack that computes in float64, so that it is held to more digits than one in 16 bits."""


def label(names):
    return "+".join(names) or "plain"


def assert_same_state(actual, expected, names, **tolerance):
    for part in ("params", "buffers", "opt_state", "slots"):
        close_trees(getattr(actual, part), getattr(expected, part), names, **tolerance)


# `test_families` compiles a stack of two each time, around modules whose kernels are the harder part.
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [("clip", "ema"), *ALONE, WIDE, STACKS[0]], ids=label)
def test_inductor_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    compiled = ft.compiled(lowering="whole", donate=True)(step)
    actual, metrics = train(compiled)
    expected, eager_metrics = train(step)
    if is_narrow(names):
        # Inductor rounds to 16 bits in other places than autocast does. The first gradient agrees well; Adam divides
        # its small elements by themselves, so that afterwards single parameters are far off, and all together not.
        first = train(compiled, 1)[0], train(step, 1)[0]
        assert_close_in_norm(first[0].opt_state["mu"], first[1].opt_state["mu"], 1e-2)
        assert_close_in_norm(actual.params, expected.params, 5e-2)
    else:
        assert_same_state(actual, expected, names)
    seen, wanted = (rows[0 if is_narrow(names) else -1]["loss"] for rows in (metrics, eager_metrics))
    assert seen == pytest.approx(wanted, rel=1e-3 if is_narrow(names) else 1e-5)


def assert_close_in_norm(actual, expected, rtol):
    difference = ft.tree.global_norm(ft.tree.map(torch.sub, actual, expected))
    assert float(difference) < rtol * float(ft.tree.global_norm(expected))


@pytest.mark.exhaustive
def test_inductor_draws_the_same_dropout_again_and_in_a_rematerialisation():
    _, step = build(("remat",))
    whole = ft.compiled(lowering="whole")(step)
    state = whole.init()
    random_state = torch.get_rng_state()
    first, second = whole(state, make_batch(0)), whole(state, make_batch(0))
    assert_equal(first, second)
    assert torch.equal(torch.get_rng_state(), random_state)
    actual, _ = train(whole)
    other, _ = train(whole, seed=1)
    assert not torch.equal(other.params["embed.weight"], actual.params["embed.weight"])
    plain, _ = train(ft.compiled(lowering="whole", donate=True)(build(())[1]))
    close_trees(actual.params, plain.params, ())


@pytest.mark.exhaustive
def test_inductor_donation_changes_no_bit():
    _, step = build(STACKS[0])
    donated, plain = (train(ft.compiled(lowering="whole", donate=donate)(step))[0] for donate in (True, False))
    assert_equal(donated, plain)


# Dynamo looks at the .grad of every tensor it traces, and torch warns of that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("names", choose([*ALONE, *STACKS], [()]), ids=label)
def test_split_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    actual, _ = train(ft.compiled(lowering="split", backend="aot_eager", donate=True)(step))
    assert_same_state(actual, train(step)[0], names)


@pytest.mark.parametrize("names", choose(STACKS, [STACKS[3]]), ids=label)
def test_functionalised_graph_equals_eager(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    actual, _ = train(ft.compiled(lowering="whole", backend="aot_eager", donate=True)(step))
    assert_same_state(actual, train(step)[0], names)


def test_one_graph_over_two_hundred_scheduled_steps(monkeypatch):
    built = []
    capture = capturing.capture
    monkeypatch.setattr(capturing, "capture", lambda *args: built.append(1) or capture(*args))
    schedule = ft.schedules.warmup_cosine(0.01, 10, 200)
    loss = ft.from_module(make_model(0.0), token_loss)
    step = ft.compiled(backend="eager", donate=True)(ft.train_step(loss, ft.optim.sgd(schedule)))
    state = step.init()
    rates = []
    for index in range(200):
        state, metrics = step(state, make_batch(index % 3))
        rates.append(metrics["lr"])
    assert built == [1]
    assert rates == [schedule(k) for k in range(200)]


def graph_of(names):
    """The graph of a step."""
    seen = []
    capture = capturing.capture
    step = ft.compiled(backend="eager")(build(names)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "capture", lambda *args: seen.append(capture(*args)) or seen[-1])
        step(step.init(), make_batch(0))
    return seen[-1].graph


@pytest.mark.parametrize("names", [("remat",), *exhaustive([("remat", "accumulate")])], ids=label)
def test_a_whole_graph_has_no_random_operation_and_computes_blocks_again_after_a_gradient(names):
    """Before it, a compiler would do so in the forward pass, and keep what it was not to keep."""
    nodes, product = list(graph_of(names).nodes), torch.ops.aten.addmm.default
    targets = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [t for t in targets if torch.Tag.nondeterministic_seeded in t.tags]
    waiting, again = set(), 0
    for node in nodes:
        if node.target is torch.ops.ftrain.after.default or waiting & {*node.all_input_nodes}:
            waiting.add(node)
            again += node.target is product
    # Of each microbatch two products in each of two blocks, which are in the forward pass too.
    assert again == 4 * len(names)
    assert targets.count(product) == 2 * again


def test_what_a_policy_keeps_is_not_computed_again_in_the_graph():
    products = [node for node in graph_of(("remat_dots",)).nodes if node.target is torch.ops.aten.addmm.default]
    assert len(products) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_auto_says_which_lowering_it_took(caplog):
    def branching(model, batch):
        loss = token_loss(model, batch)[0]
        return loss if loss.total.item() > 0 else ft.Mean(-loss.total, loss.weight)

    _, step = build((), p=0.0, criterion=branching, blocks=1)
    chosen = ft.compiled(backend="eager")(step)
    assert "compiled(auto)" in repr(chosen)
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        actual, _ = train(chosen)
    assert "compiled(split)" in repr(chosen)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert "loss.total.item() > 0" in said
    assert_same_state(actual, train(step)[0], ())


def test_whole_says_which_line_cannot_be_captured():
    _, step = build((), ft.compiled(lowering="whole", backend="eager"), criterion=lambda m, b: valued(m, b))
    with pytest.raises(ft.errors.TraceError, match=r"test_compiled\.py.*float\(total\)"):
        step(step.init(), make_batch(0))


def valued(model, batch):
    total = token_loss(model, batch)[0].total
    return total * float(total)


def test_a_plain_function_is_captured_whole():
    optimizer = ft.optim.sgd(0.1)

    def step(state, batch):
        weight = state["w"].detach().requires_grad_()
        with torch.enable_grad():
            loss = ((batch["x"] @ weight - batch["y"]) ** 2).mean()
            (grad,) = torch.autograd.grad(loss, weight)
        params, _ = optimizer.update({"w": grad}, {}, {"w": state["w"]}, {"lr": torch.tensor(0.1)})
        return params, {"loss": loss.detach()}

    batch = {"x": torch.randn(8, 3), "y": torch.randn(8)}
    start = {"w": torch.zeros(3)}
    actual, metrics = ft.compiled(backend="eager")(step)(start, batch)
    expected, eager_metrics = step(start, batch)
    assert_equal(actual, expected)
    assert torch.equal(metrics["loss"], eager_metrics["loss"])


def test_a_plain_function_that_donates_returns_the_tree_that_it_makes():
    def step(state, batch):
        return {"after": state["before"] + batch}, {}

    state = {"before": torch.zeros(2)}
    memory = state["before"].data_ptr()
    actual, _ = ft.compiled(backend="eager", donate=True)(step)(state, torch.ones(2))
    assert actual.keys() == {"after"}
    assert actual["after"].tolist() == [1, 1]
    assert actual["after"].data_ptr() == memory


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="before 2.13, torch counts the graphs of all functions with one code together",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@torch._dynamo.config.patch(recompile_limit=2)
def test_split_steps_with_one_loss_are_all_compiled():
    torch._dynamo.utils.counters.clear()
    most = torch._dynamo.config.recompile_limit
    for width in range(2, most + 4):
        loss = ft.from_module(torch.nn.Linear(width, 1), lambda model, batch: model(batch).square().mean())
        step = ft.compiled(lowering="split", backend="eager")(ft.train_step(loss, ft.optim.sgd(0.1)))
        step(step.init(), torch.ones(4, width))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == most + 2


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="before 2.13, torch compiles eight graphs at most, and the setting is that of the process",
)
def test_as_many_shapes_are_compiled_as_max_graphs_says():
    torch._dynamo.utils.counters.clear()
    loss = ft.from_module(torch.nn.Linear(3, 1), lambda model, batch: model(batch).square().mean())
    state, most = ft.train_step(loss, ft.optim.sgd(0.1)).init(), 9
    evaluation = ft.compiled(lowering="split", backend="eager", max_graphs=most)(ft.eval_step(loss))
    ft.evaluate(evaluation, state, [torch.ones(length, 3) for length in range(2, most + 2)])
    ft.evaluate(evaluation, state, [torch.ones(2, 3)], dtype="bf16")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == most + 1


@pytest.mark.parametrize("name", ["nadam", "radam", "lamb", "adafactor", "schedule_free_adamw", "adamw_8bit", "muon"])
def test_a_plain_function_that_updates_at_a_rate_that_is_a_number(name):
    optimizer = getattr(ft.optim, name)(0.1)

    def function(state, batch):
        return optimizer.update({"w": state[0]["w"] * batch}, state[1], state[0], {"lr": 0.1}), {}

    params = {"w": torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)}
    actual = expected = params, optimizer.init(params)
    compiled = ft.compiled(backend="eager")(function)
    # RAdam has another formula from its sixth update on.
    for _ in range(7):
        actual, expected = compiled(actual, torch.tensor(2.0))[0], function(expected, torch.tensor(2.0))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def in_place(layer):
    layer.compile(backend="eager")
    return layer


def as_a_module(layer):
    return torch.compile(layer, backend="eager")


def as_a_function(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")
    return layer


@pytest.mark.parametrize("by", [in_place, as_a_module, as_a_function])
def test_a_model_with_parts_that_torch_compiles_is_captured_whole(by):
    torch.manual_seed(0)
    model = torch.nn.Sequential(by(Layer()), Layer())
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    batch = torch.randn(4, 3, dtype=torch.float64)
    expected, _ = step(step.init(), batch)
    whole = ft.compiled(lowering="whole", backend="eager")(step)
    actual, _ = whole(whole.init(), batch)
    assert all(torch.allclose(actual.params[name], expected.params[name], rtol=1e-12) for name in expected.params)


def penalised(params, batch):
    """A gradient penalty, of a function that torch.compile saves no parameter for."""
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x + params["b"]).sum(), x, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean() + (batch * params["b"]).square().mean()


def penalised_by_value(params, batch):
    return penalised(params, batch) * (1.0 if float(batch[0, 0]) else 2.0)


def bent(params, batch):
    """A second derivative, as of a physics-informed net."""
    x = batch.clone().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(x * params["b"]).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return bend.square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("loss", [penalised, penalised_by_value, bent])
def test_a_split_step_does_not_lose_the_gradient_of_a_gradient(loss):
    step, batch = ft.train_step(loss, ft.optim.sgd(0.1)), torch.linspace(-1, 1, 20).view(4, 5)
    state = step.init({"b": torch.linspace(0.5, 1.5, 5)})
    expected, _ = step(state, batch)
    actual, _ = ft.compiled(backend="aot_eager")(step)(state, batch)
    torch.testing.assert_close(actual.params["b"], expected.params["b"])
    split = ft.compiled(lowering="split", backend="aot_eager")(step)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        # Torch runs such a loss uncompiled.
        torch.testing.assert_close(split(state, batch)[0].params["b"], expected.params["b"])
        return
    with pytest.raises(TraceError, match=r"create_graph=True.*lowering='whole'"):
        split(state, batch)


def test_inductor_scales_what_is_added_to_a_matrix_product():
    def loss(params, batch):
        return (batch @ params["w"]).square().mean()

    step = ft.train_step(loss, ft.optim.sgd(0.1, weight_decay=0.1))
    state, batch = step.init({"w": torch.ones(3, 2)}), torch.linspace(-1, 1, 12).view(4, 3)
    expected, _ = step(state, batch)
    actual, _ = ft.compiled(lowering="whole")(step)(state, batch)
    torch.testing.assert_close(actual.params["w"], expected.params["w"])
