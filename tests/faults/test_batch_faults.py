"""Batches that do not fit what is done to them."""

import math

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import BatchError, OptionError, TraceError
from tests.faults.problem import batch, failing, make, params, run, squares


def of_a_tensor(params, batch):
    return (batch @ params["w"]).square().mean() + params["b"]


def test_an_axis_without_examples():
    with failing(BatchError, "accumulate(2)", "no examples", "'x': 'float32[0, 3]'"):
        run(squares, ft.accumulate(2), given=batch(0))


def test_the_leaf_is_named_by_its_whole_path():
    def loss(params, batch):
        return squares(params, batch["data"][0])

    with failing(BatchError, "batch.data.0.y has 2"):
        run(loss, ft.accumulate(3), given={"data": [{**batch(), "y": torch.zeros(2)}]})


def test_axes_of_different_length():
    with failing(BatchError, "accumulate(2)", "batch.y has 2", "batch.x has 4", "same length"):
        run(squares, ft.accumulate(2), given={**batch(), "y": torch.zeros(2)})


@pytest.mark.parametrize(
    ("given", "actual"), [({"x": torch.zeros(()), "n": 3}, "'x': 'float32[]'"), ({}, "{}"), ({"s": "text"}, "str")]
)
def test_no_axis_to_cut(given, actual):
    with failing(BatchError, "accumulate(2)", "no tensor with an axis", actual):
        run(squares, ft.accumulate(2), given=given)


RAGGED = {
    "sparse_coo": lambda: torch.eye(4, 3).to_sparse(),
    "sparse_csr": lambda: torch.eye(4, 3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3)] * 4, layout=torch.jagged),
}


def of_ragged(params, batch):
    x = batch["x"]
    return squares(params, {**batch, "x": x.to_padded_tensor(0.0) if x.is_nested else x.to_dense()})


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", RAGGED)
def test_tensors_without_rows_are_refused_where_a_batch_is_split_or_captured(kind):
    given = {**batch(), "x": RAGGED[kind]()}
    run(of_ragged, given=given)
    for function, wrapper in (("accumulate(2)", ft.accumulate(2)), ("sharded", ft.sharded(ft.parallel.mesh()))):
        with failing(BatchError, function, "batch.x is a", kind, "cannot be split"):
            run(of_ragged, wrapper, given=given)
    if kind != "sparse_coo":
        with failing(TraceError, kind, "make it in the loss"):
            run(of_ragged, ft.compiled(backend="eager", lowering="whole"), given=given)


class Record:
    """As of torch_geometric: tensors in an attribute of an attribute."""

    def __init__(self, x):
        self.parts = {"x": x, "names": ["x"]}


def test_an_object_that_holds_tensors_is_no_input_of_a_graph_and_is_not_split():
    """They would be constants: it would train on the first batch in each step. Every piece would get all of them."""

    def loss(params, batch):
        return squares(params, {**batch, "x": batch["record"].parts["x"]})

    given = {"record": Record(batch()["x"]), "y": batch()["y"]}
    run(loss, given=given)
    with failing(BatchError, "a Record with tensors in it", "in a dict", "register"):
        run(loss, ft.compiled(backend="eager"), given=given)
    for wrapper in (ft.accumulate(2), ft.sharded(ft.parallel.mesh())):
        with failing(BatchError, "a Record with tensors in it", "cannot be split", "in a dict", "register"):
            run(loss, wrapper, given=given)
    run(squares, ft.accumulate(2), given={**batch(), "records": [Record(torch.ones(1)) for _ in batch()["y"]]})


def test_the_same_errors_when_compiled():
    with failing(BatchError, "accumulate(2)", "batch.y has 2", "batch.x has 4", "same length"):
        run(squares, ft.accumulate(2), ft.compiled(backend="eager"), given={**batch(), "y": torch.zeros(2)})


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", True, None])
def test_a_number_of_pieces_that_is_none(n):
    with failing(OptionError, "accumulate", "n is", repr(n), "whole number"):
        ft.accumulate(n)


def test_leaves_that_cannot_be_cut_go_to_every_piece():
    def loss(params, batch):
        assert batch["name"] == "all"
        return squares(params, batch) * batch["scale"]

    given = {**batch(), "scale": torch.tensor(2.0), "name": "all"}
    whole, pieces = run(loss, given=given)[0], run(loss, ft.accumulate(4), given=given)[0]
    for name in params():
        torch.testing.assert_close(pieces.params[name], whole.params[name])


@pytest.mark.parametrize("lowering", ["whole", "auto", "split"])
def test_more_batch_shapes_than_graphs(lowering):
    step = make(squares, ft.compiled(backend="eager", lowering=lowering, max_graphs=2))
    state = step.init(params())
    for length in (2, 3, 2, 3):
        state, _ = step(state, batch(length))
    with failing(BatchError, "compiled", "max_graphs is 2", "batch.x", "[2, 3]", "[3, 3]", "[4, 3]"):
        step(state, batch(4))
    step(state, batch(3))


def test_more_batch_shapes_than_graphs_where_the_batch_is_a_tensor():
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


def test_a_leaf_that_no_graph_can_depend_on():
    with failing(BatchError, "compiled", "set", "tensor"):
        run(squares, ft.compiled(backend="eager"), given={**batch(), "extra": {1, 2}})
