"""Batches that cannot be split, captured or compiled."""

import math

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import BatchError, OptionError, TraceError
from tests.faults.problem import batch, failing, make, params, run, squares


def of_a_tensor(params, batch):
    return (batch @ params["w"]).square().mean() + params["b"]


def test_a_batch_without_examples_is_an_error():
    with failing(BatchError, "accumulate(2)", "no examples", "'x': 'float32[0, 3]'"):
        run(squares, ft.accumulate(2), inputs=batch(0))


def test_the_leaf_is_named_by_its_whole_path():
    def loss(params, batch):
        return squares(params, batch["data"][0])

    with failing(BatchError, "batch.data.0.y has 2"):
        run(loss, ft.accumulate(3), inputs={"data": [{**batch(), "y": torch.zeros(2)}]})


def test_leaves_with_different_numbers_of_examples_are_an_error():
    with failing(BatchError, "accumulate(2)", "batch.y has 2", "batch.x has 4", "same length"):
        run(squares, ft.accumulate(2), inputs={**batch(), "y": torch.zeros(2)})


@pytest.mark.parametrize(
    ("inputs", "message"), [({"x": torch.zeros(()), "n": 3}, "'x': 'float32[]'"), ({}, "{}"), ({"s": "text"}, "str")]
)
def test_a_batch_without_an_axis_to_split_is_an_error(inputs, message):
    with failing(BatchError, "accumulate(2)", "no tensor with an axis", message):
        run(squares, ft.accumulate(2), inputs=inputs)


RAGGED = {
    "sparse_coo": lambda: torch.eye(4, 3).to_sparse(),
    "sparse_csr": lambda: torch.eye(4, 3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3)] * 4, layout=torch.jagged),
}


def of_ragged(params, batch):
    x = batch["x"]
    return squares(params, {**batch, "x": x.to_padded_tensor(0.0) if x.is_nested else x.to_dense()})


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", RAGGED)
def test_tensors_without_rows_are_refused_where_a_batch_is_split_or_captured(layout):
    inputs = {**batch(), "x": RAGGED[layout]()}
    run(of_ragged, inputs=inputs)
    for function, wrapper in (("accumulate(2)", ft.accumulate(2)), ("sharded", ft.sharded(ft.parallel.mesh()))):
        with failing(BatchError, function, "batch.x is a", layout, "cannot be split"):
            run(of_ragged, wrapper, inputs=inputs)
    if layout != "sparse_coo":
        with failing(TraceError, layout, "make it in the loss"):
            run(of_ragged, ft.compiled(backend="eager", lowering="whole"), inputs=inputs)


class Record:
    """An object with tensors in an attribute, such as one of torch_geometric."""

    def __init__(self, x):
        self.parts = {"x": x, "names": ["x"]}


def test_an_object_that_holds_tensors_is_no_input_of_a_graph_and_is_not_split():
    """In a graph its tensors would be constants, those of the first batch; each microbatch would get all of them."""

    def loss(params, batch):
        return squares(params, {**batch, "x": batch["record"].parts["x"]})

    inputs = {"record": Record(batch()["x"]), "y": batch()["y"]}
    run(loss, inputs=inputs)
    with failing(BatchError, "a Record with tensors in it", "in a dict", "register"):
        run(loss, ft.compiled(backend="eager"), inputs=inputs)
    for wrapper in (ft.accumulate(2), ft.sharded(ft.parallel.mesh())):
        with failing(BatchError, "a Record with tensors in it", "cannot be split", "in a dict", "register"):
            run(loss, wrapper, inputs=inputs)
    run(squares, ft.accumulate(2), inputs={**batch(), "records": [Record(torch.ones(1)) for _ in batch()["y"]]})


def test_the_same_errors_when_compiled():
    with failing(BatchError, "accumulate(2)", "batch.y has 2", "batch.x has 4", "same length"):
        run(squares, ft.accumulate(2), ft.compiled(backend="eager"), inputs={**batch(), "y": torch.zeros(2)})


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True, None])
def test_a_wrong_number_of_microbatches_is_an_error(n):
    with failing(OptionError, "accumulate", "n is", repr(n), "whole number"):
        ft.accumulate(n)


def test_leaves_without_an_axis_go_to_every_microbatch():
    def loss(params, batch):
        assert batch["name"] == "all"
        return squares(params, batch) * batch["scale"]

    inputs = {**batch(), "scale": torch.tensor(2.0), "name": "all"}
    whole, pieces = run(loss, inputs=inputs)[0], run(loss, ft.accumulate(4), inputs=inputs)[0]
    for name in params():
        torch.testing.assert_close(pieces.params[name], whole.params[name])


@pytest.mark.parametrize("lowering", ["whole", "auto", "split"])
def test_more_batch_shapes_than_max_graphs_are_an_error_that_lists_them(lowering):
    step = make(squares, ft.compiled(backend="eager", lowering=lowering, max_graphs=2))
    state = step.init(params())
    for length in (2, 3, 2, 3):
        state, _ = step(state, batch(length))
    with failing(BatchError, "compiled", "max_graphs is 2", "batch.x", "[2, 3]", "[3, 3]", "[4, 3]"):
        step(state, batch(4))
    step(state, batch(3))


def test_more_shapes_of_a_batch_that_is_a_tensor_are_listed_too():
    step = make(of_a_tensor, ft.compiled(backend="eager", max_graphs=1))
    state, _ = step(step.init(params()), torch.zeros(2, 3))
    with failing(BatchError, "batch came as", "[2, 3]", "[3, 3]"):
        step(state, torch.zeros(3, 3))


def test_a_number_in_the_batch_that_changes_is_named():
    step = make(squares, ft.compiled(backend="eager", max_graphs=2))
    state = step.init(params())
    with failing(BatchError, "compiled", "max_graphs is 2", "batch.epoch"):
        for epoch in range(4):
            state, _ = step(state, {**batch(), "epoch": epoch, "a": "constant"})


def test_a_text_in_the_batch_that_changes_is_named():
    step = make(squares, ft.compiled(backend="eager", max_graphs=2))
    state = step.init(params())
    with failing(BatchError, "batch.names.0", "leave out a text that the loss does not read"):
        for name in "abc":
            state, _ = step(state, {**batch(), "names": [name]})


@pytest.mark.parametrize("convert", [float, complex, np.float32])
def test_numbers_in_the_batch_that_are_equal_and_differ_have_graphs_of_their_own(convert):
    def loss(params, batch):
        return squares(params, batch), {"sign": torch.tensor(math.copysign(1.0, batch["zero"].real))}

    step = make(loss, ft.compiled(backend="eager", lowering="whole", max_graphs=3))
    state = step.init(params())
    for zero in (0.0, -0.0, 0.0, math.nan, -0.0, math.nan):
        state, metrics = step(state, {**batch(), "zero": convert(zero)})
        assert metrics["sign"] == math.copysign(1.0, zero)


def test_a_leaf_that_no_graph_can_depend_on_is_an_error():
    with failing(BatchError, "compiled", "set", "tensor"):
        run(squares, ft.compiled(backend="eager"), inputs={**batch(), "extra": {1, 2}})
