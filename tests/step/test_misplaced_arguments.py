"""Errors for arguments in the wrong place say what was found, and what belongs there."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, StructureError
from tests.step.modules import make_step, mean_square

LOSS = ft.from_module(nn.Linear(3, 1), mean_square)
STEP = ft.train_step(LOSS, ft.optim.adamw(1e-3))


# Arguments of `init`


@pytest.mark.parametrize(
    ("params", "shown"), [(LOSS.module, "Linear"), (list(LOSS.module.parameters()), "list"), (0, "int")]
)
def test_init_of_a_module_refuses_params_that_are_not_its_own(params, shown):
    with pytest.raises(StructureError, match=rf"Step\.init: params is {shown}; leave it out"):
        STEP.init(params)


@pytest.mark.parametrize("arguments", [(), (LOSS.module,)], ids=["nothing", "a module"])
def test_init_of_a_pure_function_needs_params_and_no_module(arguments):
    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"has no module; .* ft\.from_module\(module, criterion\)"):
        step.init(*arguments)


@pytest.mark.parametrize("is_tied", [True, False])
def test_params_may_not_be_a_state_dict_with_more_than_the_parameters(is_tied):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3) if is_tied else nn.BatchNorm1d(3))
    if is_tied:
        module[1].weight = module[0].weight
    names = r"1\.weight" if is_tied else r"1\.running_mean, 1\.running_var, 1\.num_batches_tracked"
    with pytest.raises(StructureError, match=rf"Step\.init: params has {names}, which .*load_state_dict"):
        make_step(module, mean_square).init(module.state_dict())


# Arguments of `compose`


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (STEP, "a Step"),
        ([ft.clip(2)], r"\[clip.*\]"),
        (STEP.optimizer, "adamw.*"),
        (ft.schedules.cosine(1.0, 100), "cosine.*"),
    ],
    ids=["step", "list", "optimizer", "schedule"],
)
def test_compose_refuses_an_argument_that_is_no_wrapper(argument, shown):
    with pytest.raises(ComposeError, match=rf"argument 1 is {shown}; needs a wrapper. The step comes first"):
        ft.compose(ft.clip(1.0), argument)


def test_compose_refuses_a_function_that_returns_no_step():
    with pytest.raises(ComposeError, match="argument 2 returned None; a wrapper returns a step"):
        ft.compose(STEP, ft.clip(1.0), lambda step: None)


def test_compose_refuses_a_loss_in_the_place_of_the_step():
    with pytest.raises(ComposeError, match=r"and mean_square\(Linear\) is a Loss"):
        ft.compose(LOSS, ft.clip(1.0))


# States


@pytest.mark.parametrize(
    "make_argument",
    [lambda: STEP.init().params, lambda: nn.Linear(2, 2), lambda: None],
    ids=["params", "a module", "None"],
)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("to_module", lambda argument: ft.to_module(nn.Linear(3, 1), argument)),
        ("averaged", ft.averaged),
        ("evaluate", lambda argument: ft.evaluate(ft.eval_step(LOSS), argument, [torch.ones(3)])),
    ],
)
def test_functions_that_take_a_state_refuse_other_arguments(name, call, make_argument):
    argument = make_argument()
    with pytest.raises(StructureError, match=f"{name}: the state is {type(argument).__name__}; needs the TrainState"):
        call(argument)


def test_an_evaluation_refuses_a_batch_in_the_place_of_the_state():
    message = r"eval_step: the state is Tensor; needs the TrainState of step\.init\(\)$"
    with pytest.raises(StructureError, match=message):
        ft.eval_step(LOSS)(torch.ones(3), STEP.init())


def test_a_step_refuses_the_pair_that_a_step_returns():
    with pytest.raises(StructureError, match=r"Step: the state is tuple; .* return a pair: state, metrics = step"):
        STEP(STEP(STEP.init(), torch.ones(3)), torch.ones(3))


def test_a_step_refuses_a_checkpoint_in_the_place_of_the_state(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(0, {"state": STEP.init()}, wait=True)
    loaded = checkpoints.latest()
    with pytest.raises(StructureError, match=r"the state is LoadedCheckpoint; .* in \.parts\['state'\]"):
        STEP(loaded, torch.ones(3))
    STEP(loaded.parts["state"], torch.ones(3))
