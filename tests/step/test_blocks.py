"""Which modules of a model are its blocks, and the forwards that replace theirs."""

import pytest
from torch import nn

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.step.blocks import forwarding, repeated_children
from tests.step.modules import floats, make_step, mean_square


class Feedforward(nn.Sequential):
    """A block with children."""

    def __init__(self):
        super().__init__(nn.Linear(2, 4), nn.Linear(4, 2))


def list_of_two():
    return nn.ModuleList([Feedforward(), Feedforward()])


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList([list_of_two() for _ in range(3)]),
        nn.ModuleList([nn.ModuleDict({"first": Feedforward(), "second": Feedforward()}) for _ in range(3)]),
        nn.ModuleList([nn.ModuleList([nn.ModuleList([Feedforward()])]) for _ in range(6)]),
        nn.ModuleDict({"encoder": nn.ModuleList([list_of_two(), list_of_two()]), "decoder": list_of_two()}),
    ],
    ids=["lists", "dicts", "lists of lists", "two lists"],
)
def test_a_container_without_a_forward_is_no_block(layers):
    blocks = repeated_children(nn.ModuleDict({"layers": layers}))
    assert [type(block) for block in blocks] == [Feedforward] * 6


def test_the_outermost_of_nested_modules_with_a_forward_are_the_blocks():
    stages = [nn.Sequential(Feedforward(), Feedforward()) for _ in range(2)]
    assert repeated_children(nn.ModuleList(stages)) == stages


def model_of_three_blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]).double()


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (None, "blocks=3"),
        ([nn.Linear], "blocks=3"),
        (["0", "2"], "blocks=2"),
        (["0", nn.Tanh], "blocks=4"),
    ],
    ids=["repeated children", "type", "names", "name and type"],
)
def test_blocks_are_found_by_type_and_by_name(blocks, text):
    step = make_step(model_of_three_blocks(), mean_square, ft.remat(blocks=blocks))
    assert f"remat({text})" in repr(step)
    step(step.init(), floats(2, 4))


def test_a_name_without_a_module_is_an_error():
    with pytest.raises(OptionError, match="no block"):
        make_step(model_of_three_blocks(), mean_square, ft.remat(blocks=["3"]))


class Interrupting(dict):
    """The `__dict__` of a module; an assignment, such as that of a forward, raises KeyboardInterrupt."""

    def __setitem__(self, key, value):
        raise KeyboardInterrupt


def test_ctrl_c_while_forwards_are_replaced_restores_them():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    object.__setattr__(second, "__dict__", Interrupting(vars(second)))
    with pytest.raises(KeyboardInterrupt), forwarding([(first, len), (second, len)]):
        pass
    assert "forward" not in vars(first)
