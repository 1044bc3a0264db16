"""The options of optimizers: which values are refused, and what an optimizer prints."""

import dataclasses
import inspect
import math

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, OptionError, StructureError
from ftrain.optim import (
    adafactor,
    adagrad,
    adam,
    adamw,
    lamb,
    lion,
    muon,
    nadam,
    partition,
    radam,
    rmsprop,
    schedule_free_adamw,
    sgd,
)
from tests.laws.optimizers import OPTIMIZERS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgd(0.1, momentum=1.0), r"sgd: momentum is 1\.0, needs a number in \[0, 1\)"),
        (lambda: sgd(0.1, momentum=-0.1), r"sgd: momentum is -0\.1"),
        (lambda: sgd(0.1, momentum=math.nan), r"sgd: momentum is nan"),
        (lambda: sgd(0.1, weight_decay=-1.0), r"sgd: weight_decay is -1\.0, needs a number in \[0, inf\)"),
        (lambda: sgd(0.1, weight_decay=math.inf), r"sgd: weight_decay is inf"),
        (lambda: sgd(0.1, nesterov=True), r"sgd: nesterov is True, needs momentum > 0"),
        (lambda: adamw(0.1, b1=1.0), r"adamw: b1 is 1\.0, needs a number in \[0, 1\)"),
        (lambda: adamw(0.1, b2=-0.5), r"adamw: b2 is -0\.5"),
        (lambda: adamw(0.1, b2=math.nan), r"adamw: b2 is nan"),
        (lambda: adamw(0.1, eps=-1e-8), r"adamw: eps is -1e-08"),
        (lambda: adamw(0.1, weight_decay=-0.1), r"adamw: weight_decay is -0\.1"),
        (lambda: adamw(0.1, weight_decay=math.nan), r"adamw: weight_decay is nan"),
        (lambda: adamw(math.nan), r"adamw: lr is nan"),
        (lambda: sgd(math.inf), r"lr is inf"),
        (lambda: sgd("0.1"), r"sgd: lr is '0\.1', needs a finite number, or a function"),
        (lambda: adamw(None), r"adamw: lr is None"),
        (lambda: ft.optim.noise("0.1"), r"noise: stddev is '0\.1', needs a finite number"),
        (lambda: adamw(0.1, b1="0.9"), r"adamw: b1 is '0\.9'"),
        (lambda: sgd(0.1, momentum=0.9, dampening=1.5), r"sgd: dampening is 1\.5, needs a number in \[0, 1\]"),
        (
            lambda: sgd(0.1, momentum=0.9, nesterov=True, dampening=0.1),
            r"nesterov is True, needs momentum > 0 and dampening 0; found 0\.9 and 0\.1",
        ),
        (lambda: adam(0.1, b2=1.0), r"adam: b2 is 1\.0, needs a number in \[0, 1\)"),
        (lambda: rmsprop(0.1, alpha=1.0), r"rmsprop: alpha is 1\.0"),
        (lambda: rmsprop(0.1, momentum=-1), r"rmsprop: momentum is -1"),
        (lambda: adagrad(0.1, lr_decay=-1.0), r"adagrad: lr_decay is -1\.0"),
        (lambda: adagrad(0.1, initial_accumulator_value=-1.0), r"adagrad: initial_accumulator_value is -1\.0"),
        (lambda: nadam(0.1, momentum_decay=-1.0), r"nadam: momentum_decay is -1\.0"),
        (lambda: radam(0.1, b1=1.0), r"radam: b1 is 1\.0"),
        (lambda: lion(0.1, b2=1.0), r"lion: b2 is 1\.0"),
        (lambda: lamb(0.1, eps=-1.0), r"lamb: eps is -1\.0"),
        (lambda: adafactor(0.1, beta2_decay=0.5), r"adafactor: beta2_decay is 0\.5, needs a number in \[-inf, 0\]"),
        (lambda: adamw(0.1, amsgrad="no"), "adamw: amsgrad is 'no', needs True or False"),
        (lambda: sgd(0.1, momentum=0.9, nesterov="true"), "sgd: nesterov is 'true', needs True or False"),
        (lambda: adafactor(0.1, eps=1e-3), r"adafactor: eps is 0\.001, needs a tuple"),
        (lambda: adafactor(0.1, eps=(-1.0, 0.0)), r"adafactor: eps\[0\] is -1\.0"),
        (lambda: adafactor(0.1, d=0.5), r"adafactor: d is 0\.5, needs a number in \[1, inf\)"),
        (lambda: muon(0.1, momentum=1.0), r"muon: momentum is 1\.0"),
        (lambda: muon(0.1, ns_steps=0), r"muon: ns_steps is 0"),
        (lambda: muon(0.1, ns_coefficients=(1.0, 2.0)), r"muon: ns_coefficients is \(1\.0, 2\.0\), needs three"),
        (lambda: muon(0.1, ns_coefficients=3.0), r"muon: ns_coefficients is 3\.0, needs three"),
        (
            lambda: muon(0.1, ns_coefficients=("3", "2", "1")),
            r"muon: ns_coefficients\[0\] is '3', needs a finite number",
        ),
        (lambda: muon(0.1, ns_coefficients=(3.0, math.nan, 2.0)), r"muon: ns_coefficients\[1\] is nan, needs a finite"),
        (lambda: partition([sgd(0.1)], {"all": ["*"]}), r"partition: optimizers is \[.*; needs label -> optimizer"),
        (lambda: muon(0.1, adjust_lr_fn="other"), r"muon: adjust_lr_fn is 'other'; choices are original, match"),
        (lambda: schedule_free_adamw(0.1, b1=0.0), r"schedule_free_adamw: b1 is 0\.0"),
        *(
            (lambda make=make: make(-0.1), r": lr is -0\.1, needs a number in \[0, inf\)")
            for make in OPTIMIZERS.values()
        ),
        (lambda: sgd(0.1, momentum=None), r"sgd: momentum is None"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_muon_refuses_parameters_that_are_no_matrices():
    with pytest.raises(StructureError, match=r"muon: the parameter params has the shape \[3\], needs two axes"):
        ft.optim.muon(0.1).init(torch.ones(3))
    with pytest.raises(StructureError, match=r"muon: the parameter layers\.0\.b has the shape \[4\], needs two axes"):
        muon(0.1).init({"layers": [{"w": torch.ones(4, 4), "b": torch.ones(4)}]})


def test_options_of_zero_are_accepted():
    sgd(0.0, momentum=0.0, weight_decay=0.0)
    adamw(0.0, b1=0.0, b2=0.0, eps=0.0, weight_decay=0.0)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (sgd(0.1), "sgd(constant(0.1))"),
        (
            sgd(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
            "sgd(constant(0.1), momentum=0.9, nesterov, weight_decay=0.0001)",
        ),
        (
            adamw(ft.schedules.warmup_cosine(3e-4, 100, 2000), weight_decay=0.1),
            "adamw(warmup_cosine(3e-4, 100, 2000), weight_decay=0.1)",
        ),
        (
            partition({"a": sgd(0.1), "b": sgd(0.2)}, {"a": ["a"]}),
            "partition(a: sgd(constant(0.1)), b: sgd(constant(0.2)))",
        ),
    ],
)
def test_the_text_of_optimizers(optimizer, text):
    assert optimizer.text == text


@pytest.mark.parametrize(
    "factory", [adagrad, adam, adamw, lamb, lion, muon, nadam, radam, rmsprop, schedule_free_adamw, sgd]
)
def test_every_numeric_argument_is_in_the_text_or_the_options(factory):
    """Ranks compare both, to see that their optimizers are the same."""
    # Without momentum, `sgd` has no dampening.
    momentum = {"momentum": 0.8} if factory is sgd else {}
    plain = factory(0.1, **momentum)
    compared = 0
    for name, parameter in inspect.signature(factory).parameters.items():
        if name not in ("lr", *momentum) and isinstance(parameter.default, float):
            changed = factory(0.1, **momentum, **{name: parameter.default * 0.5 or 0.25})
            assert (changed.text, changed.options) != (plain.text, plain.options), name
            compared += 1
    assert compared > 0


def test_a_rate_is_a_number_or_any_schedule():
    for make in (sgd, adamw):
        assert make(0.1).schedules["lr"](7) == 0.1
        assert make(lambda k: k / 10).schedules["lr"](7) == 0.7


def test_train_step_refuses_what_is_no_optimizer_of_ftrain():
    weight = torch.nn.Parameter(torch.ones(1))
    for optimizer in (torch.optim.SGD([weight], lr=0.1), 0.1, None, sgd):
        with pytest.raises(ComposeError, match=r"train_step: the optimizer is .*ft\.optim\.adamw"):
            ft.train_step(lambda params, batch: params.sum(), optimizer)


def test_optimizers_are_frozen_records():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sgd(0.1).text = "other"
