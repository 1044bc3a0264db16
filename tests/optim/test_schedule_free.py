"""`schedule_free_params`: the averages that a state of schedule_free_adamw holds."""

import pytest
import torch

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.optim import adamw, partition, schedule_free_adamw, schedule_free_params, sgd
from tests.optim.families import F64, elements, rates


def test_schedule_free_params_takes_the_state_of_one_label_of_a_partition():
    """That state holds only the parameters of its label, by name."""
    params = {"layers": [{"w": torch.ones(2, 2, dtype=F64), "b": torch.ones(2, dtype=F64)}], "head": torch.ones(2)}
    optimizer = partition({"free": schedule_free_adamw(0.1), "rest": sgd(0.1)}, {"free": ["layers.*"]})
    state = optimizer.init(params)
    for scale in (1.0, -3.0):
        grads = tree.map(lambda leaf, scale=scale: scale * leaf, params)
        params, state = optimizer.update(grads, state, params, rates(optimizer))
    actual = schedule_free_params(params, state["free"])
    params_by_name = {f"layers.0.{key}": leaf for key, leaf in params["layers"][0].items()}
    averages_by_name = schedule_free_params(params_by_name, state["free"])
    expected = {key: averages_by_name[f"layers.0.{key}"] for key in ("w", "b")}
    assert elements(actual["layers"][0]) == elements(expected)
    assert elements(actual["head"]) == elements(params["head"])
    assert not torch.equal(actual["layers"][0]["w"], params["layers"][0]["w"])


def test_schedule_free_params_refuses_the_state_of_another_optimizer_or_model():
    with pytest.raises(StructureError, match="not that of schedule_free_adamw"):
        schedule_free_params({"w": torch.ones(2)}, adamw(0.1).init({"w": torch.ones(2)}))
    with pytest.raises(StructureError, match="the state has w, which the parameters do not have"):
        schedule_free_params({"v": torch.ones(2)}, schedule_free_adamw(0.1).init({"w": torch.ones(2)}))
    with pytest.raises(StructureError, match=r"a parameter is float32\[8\], and its state is float32\[1\], of another"):
        schedule_free_params({"w": torch.ones(8)}, schedule_free_adamw(0.1).init({"w": torch.ones(1)}))


def test_schedule_free_params_of_two_parameters_of_one_name():
    params = {"a.b": torch.ones(1, dtype=F64), "a": {"b": torch.full((1,), 2.0, dtype=F64)}}
    optimizer = schedule_free_adamw(0.1)
    trained, state = optimizer.update(params, optimizer.init(params), params, rates(optimizer))
    # After one step the average is z, and so are the parameters.
    assert elements(schedule_free_params(trained, state)) == elements(trained)
