"""Right and wrong calls of the public functions, for the type checker only: this file never runs.

A comment `type: ignore[...]` names the error that mypy must report for its line. `make lint` fails if it reports
another error or none, since mypy also reports comments that are not needed.
"""

from typing import assert_type

import torch

import ftrain as ft
from ftrain.types import Metrics


def loss(params: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return (batch @ params["w"]).square().mean()


def count(state: int, batch: torch.Tensor) -> tuple[int, dict[str, float]]:
    return state + 1, {"loss": 0.0}


def script() -> None:
    plain = ft.train_step(loss, ft.optim.sgd(0.1))
    step = ft.compose(plain, ft.remat("dots"), ft.with_amp("bf16"), ft.clip(1.0), ft.accumulate(2), ft.compiled())
    assert_type(step, ft.Step)
    assert_type(ft.clip(step), ft.Step)
    assert_type(ft.ema(0.9)(step), ft.Step)
    assert_type(ft.clip(value=0.1), ft.Wrapper)

    state = step.init({"w": torch.ones(2)})
    data = [torch.ones(4, 2)]
    assert_type(state, ft.TrainState)
    assert_type(step(state, data[0]), tuple[ft.TrainState, Metrics])
    assert_type(ft.fit(step, state, data), ft.FitResult[ft.TrainState])
    state, _ = ft.fit(step, state, data, steps=1, resume="auto", on_oom="split")
    assert_type(state, ft.TrainState)

    assert_type(ft.fit(count, 0, data).state, int)
    ft.with_amp(torch.float16), ft.with_amp("auto"), ft.with_amp(), ft.with_amp(step)

    ft.with_amp("bf17")  # type: ignore[call-overload]
    ft.remat("dot")  # type: ignore[call-overload]
    ft.offload("weights")  # type: ignore[call-overload]
    ft.matmul_precision("higher")  # type: ignore[call-overload]
    ft.compiled(lowering="half")  # type: ignore[call-overload]
    ft.clip("1.0")  # type: ignore[call-overload]
    ft.ema(decays=0.9)  # type: ignore[call-overload]
    ft.compose(plain, "clip")  # type: ignore[arg-type]
    ft.fit(state, step, data)  # type: ignore[arg-type]
    ft.fit(step, data, state)  # type: ignore[arg-type]
    ft.fit(step, state, data, resume="yes")  # type: ignore[arg-type]
    ft.fit(step, state, data, on_oom="retry")  # type: ignore[arg-type]
    ft.Checkpoints("runs", every=1, mode="least")  # type: ignore[arg-type]
    ft.optim.adamw(1e-3, state_dtype="bf17")  # type: ignore[arg-type]
    ft.optim.muon(0.02, adjust_lr_fn="adamw")  # type: ignore[arg-type]
    ft.schedules.piecewise({0: 1.0}, between="line")  # type: ignore[arg-type]
    ft.schedules.one_cycle(1.0, 10, shape="line")  # type: ignore[arg-type]
    ft.schedules.warmup_stable_decay(1.0, 2, 8, 4, decay_shape="sqrt")  # type: ignore[arg-type]
    ft.schedules.reduce_on_plateau(mode="least")  # type: ignore[arg-type]
    ft.averaged(state, "mean")  # type: ignore[arg-type]
    ft.evaluate(ft.eval_step(loss), state, data, dtype="bf17", on_oom="raise")  # type: ignore[arg-type]
    ft.evaluate(ft.eval_step(loss), state, data, on_oom="retry")  # type: ignore[arg-type]
    step.init(seed="0")  # type: ignore[arg-type]
    _ = step.lowered  # type: ignore[attr-defined]
