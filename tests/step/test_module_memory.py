"""The memory of a module and of its state: separate, or given to the state by `init(donate=True)`."""

import copy

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import OptionError, StructureError
from tests.step.modules import (
    LR,
    Net,
    all_cases,
    cross_entropy,
    make_case,
    make_step,
    mean_square,
    tokens,
    train,
    vectors,
)
from tests.step.states import assert_same_bits, tensors_of


def storages(tree):
    """Return the address of the memory of each leaf that has elements."""
    return [leaf.untyped_storage().data_ptr() for leaf in ft.tree.leaves(tree) if leaf.numel()]


def test_state_and_module_share_no_memory():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion, ft.ema(0.9), optimizer=ft.optim.adamw(LR))
    state = step.init()
    assert len(set(storages(state))) == len(storages(state))
    assert not set(storages(state)) & set(storages(tensors_of(module)))
    new, _ = step(state, make_batch())
    assert not set(storages(new)) & set(storages(tensors_of(module)))


def test_a_later_change_of_the_module_does_not_reach_the_state():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion)
    state = step.init()
    expected, _ = step(state, make_batch())
    with torch.no_grad():
        for tensor in tensors_of(module).values():
            tensor.zero_()
    new, _ = step(state, make_batch())
    assert_same_bits(new.params, expected.params)


@all_cases
def test_a_donated_module_gives_its_memory_to_the_state(name):
    module, _, criterion = make_case(name)
    addresses = {key: tensor.data_ptr() for key, tensor in tensors_of(module).items()}
    state = make_step(module, criterion).init(donate=True)
    assert {key: leaf.data_ptr() for key, leaf in {**state.params, **state.buffers}.items()} == addresses
    assert all(tensor.is_meta for tensor in tensors_of(module).values())


@all_cases
def test_a_donated_module_trains_with_the_same_bits_and_to_module_gives_it_weights(name):
    module, make_batch, criterion = make_case(name)
    copied = copy.deepcopy(module)
    state, expected = (
        train(make_step(module, criterion, optimizer=ft.optim.adamw(LR)), make_batch, seed=1, donate=True),
        train(make_step(copied, criterion, optimizer=ft.optim.adamw(LR)), make_batch, seed=1),
    )
    assert_same_bits(state, expected)
    assert all(tensor.is_meta for tensor in tensors_of(module).values())
    ft.to_module(module, state)
    ft.to_module(copied, expected)
    assert_same_bits(dict(module.state_dict()), dict(copied.state_dict()))
    requires_grad = [[param.requires_grad for param in model.parameters()] for model in (module, copied)]
    assert requires_grad[0] == requires_grad[1]
    with torch.no_grad():
        assert torch.equal(criterion(module.eval(), make_batch()), criterion(copied.eval(), make_batch()))


def test_the_weights_of_a_donated_module_stay_tied_and_frozen():
    module = Net().requires_grad_(False)
    module.norm.requires_grad_(True)
    step = make_step(module, cross_entropy)
    state, _ = step(step.init(donate=True), tokens())
    assert module.head.weight is module.embed.weight
    ft.to_module(module, state)
    assert module.head.weight is module.embed.weight
    assert [param.requires_grad for param in module.parameters()] == [False, True, True]


def test_a_donated_module_has_no_values_for_a_second_state():
    step = make_step(Net(), cross_entropy)
    step.init(donate=True)
    with pytest.raises(StructureError, match=r"embed.weight of Embedding has a shape but no values.*to_module"):
        step.init()


def test_a_module_keeps_its_weights_when_the_state_cannot_be_made():
    module = Net()
    step = ft.train_step(ft.from_module(module, cross_entropy), ft.optim.sgd(LR), trainable=["none"])
    with pytest.raises(OptionError, match="no parameter matches"):
        step.init(donate=True)
    assert not any(leaf.is_meta for leaf in tensors_of(module).values())


def test_donated_parameters_that_share_memory_are_copied():
    base, whole = torch.arange(6.0), torch.ones(3)
    params = {"first": whole, "second": whole, "left": base[:3], "right": base[3:]}
    step = ft.train_step(lambda params, batch: params["first"].sum(), ft.optim.sgd(LR))
    state = step.init(params, donate=True)
    assert len(set(storages(state.params))) == 4
    # The first of the two names of a tensor keeps its memory.
    assert [name for name in params if state.params[name].data_ptr() == params[name].data_ptr()] == ["first"]


class Graph(nn.Module):
    """Has a sparse matrix as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(8, dtype=torch.float64).to_sparse())
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return torch.sparse.mm(self.edges, self.layer(x))


@pytest.mark.parametrize("wrappers", [(), (ft.update_in_backward(),), (ft.ema(0.9),)], ids=len)
def test_a_donated_step_may_have_a_sparse_buffer(wrappers):
    def trained(*more):
        torch.manual_seed(0)
        return train(make_step(Graph(), mean_square, *wrappers, *more), vectors).params

    assert_same_bits(trained(ft.donated()), trained())
