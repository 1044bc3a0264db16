"""`compiled` around an `EvalStep`: the same means, from the compiler's code."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.errors import BatchError, ComposeError, LossError, TraceError

compiled_graphs = []


@register_backend
def ftrain_counted_evaluation(graph, inputs):
    compiled_graphs.append(graph)
    return graph.forward


@register_backend
def ftrain_broken_evaluation(graph, inputs):
    raise RuntimeError("the linker is gone")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def criterion(run, batch):
    outputs = run(batch["x"])
    loss = nn.functional.cross_entropy(outputs, batch["y"], reduction="sum")
    correct = (outputs.argmax(-1) == batch["y"]).sum().to(loss.dtype)
    count = torch.tensor(float(len(batch["y"])), dtype=loss.dtype)
    return ft.Mean(loss, count), {"accuracy": ft.Mean(correct, count)}


def batches(dtype=torch.float32):
    return [{"x": torch.randn(n, 4, dtype=dtype), "y": torch.randint(0, 3, (n,))} for n in (6, 6, 1)]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_its_means_are_those_of_eager_evaluation_between_compiled_training_steps(dtype):
    step = ft.compiled(backend="ftrain_counted_evaluation")(
        ft.train_step(ft.from_module(model(), criterion), ft.optim.adamw(0.1))
    )
    eager = ft.eval_step(step.loss)
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(eager)
    state, data = step.init(), batches()
    for _ in range(2):
        state, _ = step(state, data[0])
        compiled_graphs.clear()
        before = ft.tree.clone(state)
        actual = ft.evaluate(compiled, state, data, dtype=dtype)
        torch.testing.assert_close(actual, ft.evaluate(eager, state, data, dtype=dtype), rtol=1e-6, atol=0)
        assert all(map(torch.equal, ft.tree.leaves(state), ft.tree.leaves(before)))
    # One graph for each length, and no other one for another state.
    assert not compiled_graphs
    assert repr(compiled).endswith("<- compiled")


def test_inductors_code_is_as_exact_in_float64():
    loss = ft.from_module(model().double(), criterion)
    eager, data = ft.eval_step(loss), batches(torch.float64)[:1]
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init()
    actual = ft.evaluate(ft.compiled()(eager), state, data)
    torch.testing.assert_close(actual, ft.evaluate(eager, state, data), rtol=1e-12, atol=0)


def test_what_the_compiler_cannot_do_runs_eagerly_with_a_line(caplog):
    loss = ft.from_module(model(), criterion)
    eager, data = ft.eval_step(loss), batches()
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init()
    compiled = ft.compiled(backend="ftrain_broken_evaluation")(eager)
    with caplog.at_level(logging.WARNING, "ftrain"):
        actual = ft.evaluate(compiled, state, data)
    assert actual == ft.evaluate(eager, state, data)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert "runs eagerly" in line
    assert "the linker is gone" in line
    strict = ft.compiled(backend="ftrain_broken_evaluation", lowering="split")(eager)
    with pytest.raises(Exception, match="the linker is gone"):
        ft.evaluate(strict, state, data)


def test_an_error_of_the_loss_is_its_own_and_does_not_end_the_compilation(caplog):
    def loss(params, batch):
        if len(batch) == 3:
            raise ValueError("three is too few")
        return (batch * params["w"]).mean()

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(ft.eval_step(loss))
    with pytest.raises(ValueError, match="three is too few"):
        ft.evaluate(compiled, state, [torch.ones(3)])
    compiled_graphs.clear()
    assert ft.evaluate(compiled, state, [torch.ones(4)]) == {"loss": 1.0}
    assert len(compiled_graphs) == 1
    assert not [record for record in caplog.records if record.name == "ftrain"]


def test_more_shapes_than_graphs_are_an_error_and_with_dynamic_a_single_graph():
    def loss(params, batch):
        return (batch * params["w"]).mean()

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    data = [torch.ones(length) for length in range(2, 12)]
    step = ft.eval_step(loss)
    with pytest.raises(BatchError, match="max_graphs is 8"):
        ft.evaluate(ft.compiled(backend="ftrain_counted_evaluation")(step), state, data)
    compiled_graphs.clear()
    dynamic = ft.compiled(backend="ftrain_counted_evaluation", dynamic=True)(step)
    assert ft.evaluate(dynamic, state, data) == {"loss": 1.0}
    assert len(compiled_graphs) <= 2


def test_more_graphs_than_torch_has_by_default_are_all_compiled():
    def loss(params, batch):
        return (batch * params["w"]).mean()

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    data = [torch.ones(length) for length in range(2, 12)]
    step = ft.compiled(backend="ftrain_counted_evaluation", lowering="whole", max_graphs=10)(ft.eval_step(loss))
    compiled_graphs.clear()
    for dtype in (None, "bf16"):
        assert ft.evaluate(step, state, data, dtype=dtype) == {"loss": 1.0}
    assert len(compiled_graphs) == 20


def test_a_loss_that_writes_to_its_input_is_an_error_there_too():
    def loss(params, batch):
        return (batch.mul_(2.0) * params["w"]).mean()

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    with pytest.raises(LossError, match="in place"):
        ft.evaluate(ft.compiled(backend="ftrain_counted_evaluation")(ft.eval_step(loss)), state, [torch.ones(3)])


@pytest.mark.parametrize("rank", [0, 1])
def test_that_it_runs_eagerly_where_ranks_gather_blocks_is_said_once(rank, caplog, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    loss, ranks = ft.from_module(model(), criterion), SimpleNamespace(size=2, rank=rank, by_block=lambda state: None)
    step = ft.eval_step(dataclasses.replace(loss, ranks=ranks))
    assert ft.compiled()(step) is step
    assert ["runs eagerly" in record.getMessage() for record in caplog.records] == [True] * (rank == 0)


def test_it_is_compiled_once():
    step = ft.compiled()(ft.eval_step(lambda params, batch: params["w"].sum()))
    with pytest.raises(ComposeError, match="compiled: the evaluation already has it"):
        ft.compiled()(step)


def reads_a_value(params, batch):
    scale = 2.0 if batch.sum().item() > 0 else 1.0
    return (batch * params["w"]).mean() * scale


def test_what_is_not_one_graph_has_its_loss_compiled_and_as_a_whole_is_an_error(caplog):
    state = ft.train_step(reads_a_value, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    step, data = ft.eval_step(reads_a_value), [torch.ones(3), -torch.ones(3)]
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(step)
    compiled_graphs.clear()
    for _ in range(2):
        assert ft.evaluate(compiled, state, data) == ft.evaluate(step, state, data)
    assert compiled_graphs
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert line.startswith("compiled: only the loss of reads_a_value")
    assert "test_evaluation.py" in line
    whole = ft.compiled(backend="ftrain_counted_evaluation", lowering="whole")(step)
    with pytest.raises(TraceError, match="the evaluation cannot be captured as one graph: the value of a tensor"):
        ft.evaluate(whole, state, data)


def test_a_batch_is_one_call_of_one_graph_without_another_operation():
    calls, outside = [], []

    class Outside(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            outside.append(function)
            return function(*args, **(kwargs or {}))

    @register_backend
    def ftrain_unseen_evaluation(graph, inputs):
        def run(*tensors):
            calls.append(len(tensors))
            with torch.utils._python_dispatch._disable_current_modes():
                return graph.forward(*tensors)

        return run

    loss = ft.from_module(model(), criterion)
    state, (batch, *_) = ft.train_step(loss, ft.optim.sgd(0.1)).init(), batches()
    compiled = ft.compiled(backend="ftrain_unseen_evaluation")(ft.eval_step(loss))
    compiled(state, batch)
    with Outside():
        means = compiled(state, batch)
    assert not outside
    assert len(calls) == 2
    assert {mean.total.dtype for mean in means.values()} == {torch.float64}


def test_another_autocast_is_another_graph_though_the_state_has_the_dtype_already():
    loss = ft.from_module(model().bfloat16(), criterion)
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init()
    eager, data = ft.eval_step(loss), batches(torch.bfloat16)
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(eager)
    for dtype in (None, "bf16", None):
        actual = ft.evaluate(compiled, state, data, dtype=dtype)
        torch.testing.assert_close(actual, ft.evaluate(eager, state, data, dtype=dtype), rtol=1e-6, atol=0)


def test_dropout_of_an_evaluation_is_the_same_in_each_call_and_the_generators_stay():
    loss = ft.from_module(
        nn.Linear(4, 64), lambda model, batch: nn.functional.dropout(model(batch), 0.5, training=True).square().mean()
    )
    state, batch = ft.train_step(loss, ft.optim.sgd(0.1)).init(), torch.ones(8, 4)
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(ft.eval_step(loss))
    before = torch.get_rng_state()
    first, second = (compiled(state, batch)["loss"].value for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    kept = nn.functional.linear(batch, state.params["weight"], state.params["bias"]).square().mean()
    assert 0.5 < first / (2 * kept) < 2


@pytest.mark.parametrize(
    "wrap", [ft.with_amp("bf16"), ft.matmul_precision("high"), ft.lora(2, targets=["0", "4"])], ids=repr
)
def test_the_loss_of_a_wrapped_step_is_evaluated_with_its_wrappers(wrap):
    step = wrap(ft.train_step(ft.from_module(model(), criterion), ft.optim.adamw(0.1)))
    state, data = step.init(), batches()
    state, _ = step(state, data[0])
    eager = ft.eval_step(step.loss)
    compiled = ft.compiled(backend="ftrain_counted_evaluation")(eager)
    torch.testing.assert_close(ft.evaluate(compiled, state, data), ft.evaluate(eager, state, data), rtol=1e-6, atol=0)
    assert step.base.module.training


def centred(params, batch):
    with torch.autocast("cpu", enabled=False):
        outputs = (batch + 100) @ torch.ones(8, 8) / 8 - 100
    return (params["w"] * outputs).square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_loss_computes_with_autocast_off_is_not_cast_again(backend):
    state, data = ft.train_step(centred, ft.optim.sgd(0.1)).init({"w": torch.ones(())}), [torch.randn(5, 8)]
    eager = ft.eval_step(centred)
    actual = ft.evaluate(ft.compiled(backend=backend, lowering="whole")(eager), state, data, dtype="bf16")
    assert actual == ft.evaluate(eager, state, data, dtype="bf16")
