"""Steps that cannot be captured: an error that names the line, or one log line and the results of eager mode."""

import logging

import pytest
import torch

import ftrain as ft
from ftrain.errors import TraceError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares

# Warnings of torch: of reading a value, and of Dynamo where it resumes after a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _quiet():
    """Silences the log of Dynamo, which has lines for every graph break; the tests count our lines."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def by_item(params, batch):
    factor = params["w"].sum().item()  # here: item
    return squares(params, batch) * factor


def by_float(params, batch):
    factor = float(batch["x"].sum())  # here: float
    return squares(params, batch) * factor


def by_bool(params, batch):
    if params["w"].sum() > 2:  # here: bool
        return squares(params, batch)
    return 2 * squares(params, batch)


def by_int(params, batch):
    factor = int((batch["x"] > 0.5).sum())  # here: int
    return squares(params, batch) * factor


def by_list(params, batch):
    factor = batch["y"].add(2).tolist()[0]  # here: list
    return squares(params, batch) * factor


def by_selection(params, batch):
    rows = batch["x"][:, 0].gt(0.5).nonzero()[:, 0]  # here: selection
    return squares(params, {name: leaf[rows] for name, leaf in batch.items()})


ASKING = [by_item, by_float, by_bool, by_int, by_list, by_selection]
asking = pytest.mark.parametrize("loss", ASKING, ids=lambda loss: loss.__name__)


@asking
def test_whole_names_the_line_that_reads_a_value(loss):
    step = make(loss, ft.compiled(backend="eager", lowering="whole"))
    state = step.init(params())
    before = ft.tree.clone(state)
    marker = f"# here: {loss.__name__.removeprefix('by_')}"
    with failing(TraceError, "compiled", "one graph", "test_compiled_faults.py:", marker):
        step(state, batch())
    assert_same_bits(state, before)


@pytest.mark.parametrize(("loss", "donate"), [(by_item, True), *((loss, False) for loss in ASKING)])
def test_auto_falls_back_with_one_log_line_and_the_results_of_eager_mode(loss, donate, caplog):
    step = make(loss, ft.compiled(backend="eager", donate=donate))
    eager = make(loss)
    state, expected = step.init(params()), eager.init(params())
    with caplog.at_level(logging.WARNING, "ftrain"):
        for _ in range(3):
            state, metrics = step(state, batch())
            expected, expected_metrics = eager(expected, batch())
    lines = [record.getMessage() for record in caplog.records if record.name == "ftrain"]
    assert len(lines) == 1
    assert "split" in lines[0]
    assert f"# here: {loss.__name__.removeprefix('by_')}" in lines[0]
    assert "compiled(split" in repr(step)
    for name in params():
        torch.testing.assert_close(state.params[name], expected.params[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_auto_falls_back_with_inductor_too(caplog):
    step = make(by_item, ft.compiled())
    with caplog.at_level(logging.WARNING, "ftrain"):
        state, _ = step(step.init(params()), batch())
    assert "# here: item" in caplog.text
    expected, _ = make(by_item)(make(by_item).init(params()), batch())
    torch.testing.assert_close(state.params["w"], expected.params["w"])


def test_auto_says_nothing_when_the_whole_step_can_be_captured(caplog):
    step = make(squares, ft.compiled(backend="eager"))
    with caplog.at_level(logging.WARNING):
        step(step.init(params()), batch())
    assert not caplog.records
    assert "split" not in repr(step)


@pytest.mark.parametrize("lowering", ["whole", "auto", "split"])
def test_a_mistake_in_the_loss_is_shown(lowering):
    def wrong(params, batch):
        return batch["x"].T @ params["w"] @ params["b"]

    step = make(wrong, ft.compiled(backend="eager", lowering=lowering))
    with pytest.raises(RuntimeError, match="size mismatch"):
        step(step.init(params()), batch())


@pytest.mark.parametrize("lowering", ["whole", "auto", "split"])
def test_a_missing_key_is_shown_as_it_is(lowering):
    step = make(lambda params, batch: batch["labels"].sum(), ft.compiled(backend="eager", lowering=lowering))
    with pytest.raises(KeyError, match="labels"):
        step(step.init(params()), batch())


def test_a_random_operation_with_a_generator_is_an_error():
    generator = torch.Generator().manual_seed(0)

    def loss(params, batch):
        noise = torch.randn(4, generator=generator)  # here: generator
        return squares(params, {**batch, "y": noise})

    step = make(loss, ft.compiled(backend="eager", lowering="whole"))
    with failing(TraceError, "compiled", "generator", "# here: generator"):
        step(step.init(params()), batch())


def test_a_plain_function_that_writes_and_cannot_be_captured_writes_once(caplog):
    def step(state, batch):
        batch.numpy()
        state.add_(batch.sum())
        return state, {"sum": batch.sum()}

    with caplog.at_level(logging.WARNING, "ftrain"):
        state, _ = ft.compiled(backend="eager")(step)(torch.zeros(()), torch.ones(2))
    assert float(state) == 2
    assert "uncompiled" in caplog.text


@pytest.mark.parametrize("lowering", ["whole", "split"])
def test_a_metric_that_is_a_parameter_is_that_before_the_update(lowering):
    def loss(params, batch):
        return squares(params, batch), {"w": params["w"]}

    step = make(loss, ft.compiled(backend="eager", lowering=lowering, donate=True))
    state, metrics = step(step.init(params()), batch())
    assert torch.equal(metrics["w"], params()["w"])
    assert not torch.equal(state.params["w"], params()["w"])


@pytest.mark.parametrize("donate", [False, True])
def test_a_function_of_steps_that_cannot_be_captured_takes_one_step(donate):
    inner = make(squares, *[ft.donated()] * donate)

    def step(state, batch):
        batch["x"].numpy()
        return inner(state, batch)

    plain = make()
    actual, metrics = ft.compiled(backend="eager")(step)(inner.init(params()), batch())
    expected, expected_metrics = plain(plain.init(params()), batch())
    assert_same_bits(actual, expected)
    assert_same_bits(metrics, expected_metrics)


def test_a_loss_that_cannot_be_captured_runs_at_most_once_with_real_tensors():
    is_real = []

    def loss(params, batch):
        is_real.append(type(batch["x"]) is torch.Tensor)
        batch["x"].numpy()
        return squares(params, batch)

    step = make(loss, ft.compiled(backend="eager", lowering="whole"))
    with failing(TraceError, "compiled", "numpy"):
        step(step.init(params()), batch())
    assert is_real.count(True) <= 1


def test_a_changing_number_in_the_state_of_a_plain_function_is_an_error():
    # Every value needs another graph, so each step would compile.
    def step(state, batch):
        return {"count": state["count"] + 1, "sum": state["sum"] + batch.sum()}, {}

    compiled, start = ft.compiled(backend="eager", max_graphs=2)(step), {"count": 0, "sum": torch.zeros(())}
    with pytest.raises(ft.errors.FtrainError, match="max_graphs is 2") as caught:
        ft.fit(compiled, start, [torch.ones(2)] * 4, progress=False)
    assert "state.count" in str(caught.value)
    assert "tensor" in str(caught.value)


def test_metrics_that_are_numbers_are_no_inputs_of_the_compiled_update():
    def loss(params, batch):
        value = squares(params, batch)
        return value, {"number": value.item()}

    step = make(loss, ft.compiled(backend="eager", lowering="split", max_graphs=1))
    state, numbers = step.init(params()), []
    for _ in range(3):
        state, metrics = step(state, batch())
        assert metrics["number"] == pytest.approx(float(metrics["loss"]))
        numbers.append(metrics["number"])
    assert len(set(numbers)) == 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_the_error_under_anomaly_detection_says_that_it_reads_gradients():
    step = make(squares, ft.compiled(backend="eager", lowering="whole"))
    reads = torch.autograd.set_detect_anomaly(True)
    with reads, failing(TraceError, "set_detect_anomaly reads every gradient", "(at torch)"):
        step(step.init(params()), batch())
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(step.init(params()), batch())
