"""Which modules of a model are its blocks."""

import pytest
from torch import nn

from ftrain.step.blocks import forwarding, repeated_children


class Feedforward(nn.Sequential):
    """A block with children."""

    def __init__(self):
        super().__init__(nn.Linear(2, 4), nn.Linear(4, 2))


def two_blocks():
    return nn.ModuleList([Feedforward(), Feedforward()])


@pytest.mark.parametrize(
    "layers",
    [
        nn.ModuleList([two_blocks() for _ in range(3)]),
        nn.ModuleList([nn.ModuleDict({"first": Feedforward(), "second": Feedforward()}) for _ in range(3)]),
        nn.ModuleList([nn.ModuleList([nn.ModuleList([Feedforward()])]) for _ in range(6)]),
        nn.ModuleDict({"encoder": nn.ModuleList([two_blocks(), two_blocks()]), "decoder": two_blocks()}),
    ],
    ids=["lists", "dicts", "lists of lists", "two lists"],
)
def test_a_container_without_a_forward_is_no_block(layers):
    assert [type(part) for part in repeated_children(nn.ModuleDict({"layers": layers}))] == [Feedforward] * 6


def test_the_outermost_of_nested_modules_with_a_forward_are_the_blocks():
    stages = [nn.Sequential(Feedforward(), Feedforward()) for _ in range(2)]
    assert repeated_children(nn.ModuleList(stages)) == stages


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
