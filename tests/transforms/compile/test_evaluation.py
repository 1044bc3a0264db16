"""`compiled` around an `EvalStep`: the same means, from the compiler's code."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.exc import TorchDynamoException
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.errors import BatchError, ComposeError, LossError, TraceError
from tests.bits import assert_same_bits
from tests.transforms.compile.counting_backend import compiled_graphs


@register_backend
def ftrain_no_linker(graph, inputs):
    raise RuntimeError("the linker is gone")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def classification_loss(model, batch):
    outputs = model(batch["x"])
    loss = nn.functional.cross_entropy(outputs, batch["y"], reduction="sum")
    correct = (outputs.argmax(-1) == batch["y"]).sum().to(loss.dtype)
    count = torch.tensor(float(len(batch["y"])), dtype=loss.dtype)
    return ft.Mean(loss, count), {"accuracy": ft.Mean(correct, count)}


def make_batches(dtype=torch.float32):
    return [{"x": torch.randn(rows, 4, dtype=dtype), "y": torch.randint(0, 3, (rows,))} for rows in (6, 6, 1)]


def weighted_mean(params, batch):
    return (batch * params["w"]).mean()


def init_state(loss_fn):
    """Return a state of a loss of a module, or with a scalar parameter "w" of 1."""
    params = None if isinstance(loss_fn, ft.types.Loss) else {"w": torch.ones(())}
    return ft.train_step(loss_fn, ft.optim.sgd(0.1)).init(params)


def logged_lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ftrain"]


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_its_means_are_those_of_eager_evaluation_between_compiled_training_steps(dtype):
    loss_fn = ft.from_module(make_model(), classification_loss)
    step = ft.compiled(backend="ftrain_counting")(ft.train_step(loss_fn, ft.optim.adamw(0.1)))
    eager = ft.eval_step(step.loss)
    compiled = ft.compiled(backend="ftrain_counting")(eager)
    state, batches = step.init(), make_batches()
    for _ in range(2):
        state, _ = step(state, batches[0])
        compiled_graphs.clear()
        before = ft.tree.clone(state)
        means = ft.evaluate(compiled, state, batches, dtype=dtype)
        torch.testing.assert_close(means, ft.evaluate(eager, state, batches, dtype=dtype), rtol=1e-6, atol=0)
        assert_same_bits(state, before)
    # The second evaluation, of another state, compiles nothing.
    assert not compiled_graphs
    assert repr(compiled).endswith("<- compiled")


def test_inductors_code_is_as_exact_in_float64():
    loss_fn = ft.from_module(make_model().double(), classification_loss)
    eager, batches = ft.eval_step(loss_fn), make_batches(torch.float64)[:1]
    state = init_state(loss_fn)
    means = ft.evaluate(ft.compiled()(eager), state, batches)
    torch.testing.assert_close(means, ft.evaluate(eager, state, batches), rtol=1e-12, atol=0)


def test_a_graph_that_the_compiler_cannot_compile_runs_eagerly_and_the_log_says_so(caplog):
    loss_fn = ft.from_module(make_model(), classification_loss)
    eager, batches = ft.eval_step(loss_fn), make_batches()
    state = init_state(loss_fn)
    compiled = ft.compiled(backend="ftrain_no_linker")(eager)
    with caplog.at_level(logging.WARNING, "ftrain"):
        means = ft.evaluate(compiled, state, batches)
    assert means == ft.evaluate(eager, state, batches)
    (line,) = logged_lines(caplog)
    assert "runs eagerly" in line
    assert "the linker is gone" in line
    split = ft.compiled(backend="ftrain_no_linker", lowering="split")(eager)
    with pytest.raises(TorchDynamoException, match="the linker is gone"):
        ft.evaluate(split, state, batches)


def test_an_error_of_the_loss_is_its_own_and_does_not_end_the_compilation(caplog):
    def loss(params, batch):
        if len(batch) == 3:
            raise ValueError("three is too few")
        return weighted_mean(params, batch)

    state, compiled = init_state(loss), ft.compiled(backend="ftrain_counting")(ft.eval_step(loss))
    with pytest.raises(ValueError, match="three is too few"):
        ft.evaluate(compiled, state, [torch.ones(3)])
    compiled_graphs.clear()
    assert ft.evaluate(compiled, state, [torch.ones(4)]) == {"loss": 1.0}
    assert len(compiled_graphs) == 1
    assert not logged_lines(caplog)


TEN_LENGTHS = [torch.ones(length) for length in range(2, 12)]


def test_more_shapes_than_max_graphs_are_an_error():
    compiled = ft.compiled(backend="ftrain_counting")(ft.eval_step(weighted_mean))
    with pytest.raises(BatchError, match="max_graphs is 8"):
        ft.evaluate(compiled, init_state(weighted_mean), TEN_LENGTHS)


def test_dynamic_needs_few_graphs_for_all_shapes():
    compiled = ft.compiled(backend="ftrain_counting", dynamic=True)(ft.eval_step(weighted_mean))
    compiled_graphs.clear()
    assert ft.evaluate(compiled, init_state(weighted_mean), TEN_LENGTHS) == {"loss": 1.0}
    assert len(compiled_graphs) <= 2


def test_more_graphs_than_the_default_limit_of_torch_are_all_compiled():
    compiled = ft.compiled(backend="ftrain_counting", lowering="whole", max_graphs=10)(ft.eval_step(weighted_mean))
    compiled_graphs.clear()
    for dtype in (None, "bf16"):
        assert ft.evaluate(compiled, init_state(weighted_mean), TEN_LENGTHS, dtype=dtype) == {"loss": 1.0}
    assert len(compiled_graphs) == 20


def test_a_loss_that_writes_to_its_input_is_an_error_as_in_an_eager_evaluation():
    def loss(params, batch):
        return (batch.mul_(2.0) * params["w"]).mean()

    for step in (ft.eval_step(loss), ft.compiled(backend="ftrain_counting")(ft.eval_step(loss))):
        with pytest.raises(LossError, match="in place"):
            ft.evaluate(step, init_state(loss), [torch.ones(3)])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_gather_blocks_evaluate_eagerly_and_the_first_logs_it(rank, caplog, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    ranks = SimpleNamespace(size=2, rank=rank, by_block=lambda state: None)
    loss_fn = ft.from_module(make_model(), classification_loss)
    step = ft.eval_step(dataclasses.replace(loss_fn, ranks=ranks))
    assert ft.compiled()(step) is step
    assert ["runs eagerly" in record.getMessage() for record in caplog.records] == [True] * (rank == 0)


def test_a_second_compiled_is_refused():
    step = ft.compiled()(ft.eval_step(weighted_mean))
    with pytest.raises(ComposeError, match="compiled: the evaluation already has it"):
        ft.compiled()(step)


def reads_a_value(params, batch):
    factor = 2.0 if batch.sum().item() > 0 else 1.0
    return weighted_mean(params, batch) * factor


def test_an_evaluation_that_is_not_one_graph_has_its_loss_compiled(caplog):
    state, eager, batches = init_state(reads_a_value), ft.eval_step(reads_a_value), [torch.ones(3), -torch.ones(3)]
    compiled = ft.compiled(backend="ftrain_counting")(eager)
    compiled_graphs.clear()
    for _ in range(2):
        assert ft.evaluate(compiled, state, batches) == ft.evaluate(eager, state, batches)
    assert compiled_graphs
    (line,) = logged_lines(caplog)
    assert line.startswith("compiled: only the loss of reads_a_value")
    assert "test_evaluation.py" in line


def test_a_whole_evaluation_that_is_not_one_graph_is_an_error():
    whole = ft.compiled(backend="ftrain_counting", lowering="whole")(ft.eval_step(reads_a_value))
    with pytest.raises(TraceError, match="the evaluation cannot be captured as one graph: the value of a tensor"):
        ft.evaluate(whole, init_state(reads_a_value), [torch.ones(3)])


def test_a_batch_is_one_call_of_one_graph_without_another_operation():
    calls, operations_outside = [], []

    class RecordOperations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations_outside.append(function)
            return function(*args, **(kwargs or {}))

    @register_backend
    def ftrain_unrecorded(graph, inputs):
        def run(*tensors):
            calls.append(len(tensors))
            with torch.utils._python_dispatch._disable_current_modes():
                return graph.forward(*tensors)

        return run

    loss_fn = ft.from_module(make_model(), classification_loss)
    state, batch = init_state(loss_fn), make_batches()[0]
    compiled = ft.compiled(backend="ftrain_unrecorded")(ft.eval_step(loss_fn))
    compiled(state, batch)
    with RecordOperations():
        means = compiled(state, batch)
    assert not operations_outside
    assert len(calls) == 2
    assert {mean.total.dtype for mean in means.values()} == {torch.float64}


def test_another_autocast_is_another_graph_though_the_state_has_the_dtype_already():
    loss_fn = ft.from_module(make_model().bfloat16(), classification_loss)
    state, eager, batches = init_state(loss_fn), ft.eval_step(loss_fn), make_batches(torch.bfloat16)
    compiled = ft.compiled(backend="ftrain_counting")(eager)
    for dtype in (None, "bf16", None):
        means = ft.evaluate(compiled, state, batches, dtype=dtype)
        torch.testing.assert_close(means, ft.evaluate(eager, state, batches, dtype=dtype), rtol=1e-6, atol=0)


def test_dropout_of_an_evaluation_is_the_same_in_each_call_and_the_generator_stays():
    def loss(model, batch):
        return nn.functional.dropout(model(batch), 0.5, training=True).square().mean()

    loss_fn = ft.from_module(nn.Linear(4, 64), loss)
    state, batch = init_state(loss_fn), torch.ones(8, 4)
    compiled = ft.compiled(backend="ftrain_counting")(ft.eval_step(loss_fn))
    random_state = torch.get_rng_state()
    first, second = (compiled(state, batch)["loss"].value for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), random_state)
    # Dropout doubles half of the outputs, so that the mean of their squares doubles, nearly.
    undropped = nn.functional.linear(batch, state.params["weight"], state.params["bias"]).square().mean()
    assert 0.5 < first / (2 * undropped) < 2


@pytest.mark.parametrize(
    "wrapper", [ft.with_amp("bf16"), ft.matmul_precision("high"), ft.lora(2, targets=["0", "4"])], ids=repr
)
def test_the_loss_of_a_wrapped_step_is_evaluated_with_its_wrappers(wrapper):
    step = wrapper(ft.train_step(ft.from_module(make_model(), classification_loss), ft.optim.adamw(0.1)))
    state, batches = step.init(), make_batches()
    state, _ = step(state, batches[0])
    eager = ft.eval_step(step.loss)
    compiled = ft.compiled(backend="ftrain_counting")(eager)
    means = ft.evaluate(compiled, state, batches)
    torch.testing.assert_close(means, ft.evaluate(eager, state, batches), rtol=1e-6, atol=0)
    assert step.base.module.training


def loss_with_autocast_off(params, batch):
    with torch.autocast("cpu", enabled=False):
        # In bfloat16 the difference would be lost.
        outputs = (batch + 100) @ torch.ones(8, 8) / 8 - 100
    return (params["w"] * outputs).square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_operations_of_a_loss_with_autocast_off_are_not_cast(backend):
    state, batches = init_state(loss_with_autocast_off), [torch.randn(5, 8)]
    eager = ft.eval_step(loss_with_autocast_off)
    means = ft.evaluate(ft.compiled(backend=backend, lowering="whole")(eager), state, batches, dtype="bf16")
    assert means == ft.evaluate(eager, state, batches, dtype="bf16")
