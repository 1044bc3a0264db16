"""What a user's type checker sees: a line with an error names it in a comment. Never run."""

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

    ft.with_amp("bf17")  # E: call-overload
    ft.remat("dot")  # E: call-overload
    ft.offload("weights")  # E: call-overload
    ft.matmul_precision("higher")  # E: call-overload
    ft.compiled(lowering="half")  # E: call-overload
    ft.clip("1.0")  # E: call-overload
    ft.ema(decays=0.9)  # E: call-overload
    ft.compose(plain, "clip")  # E: arg-type
    ft.fit(state, step, data)  # E: arg-type
    ft.fit(step, data, state)  # E: arg-type
    ft.fit(step, state, data, resume="yes")  # E: arg-type
    ft.fit(step, state, data, on_oom="retry")  # E: arg-type
    ft.Checkpoints("runs", every=1, mode="least")  # E: arg-type
    ft.optim.adamw(1e-3, state_dtype="bf17")  # E: arg-type
    ft.optim.muon(0.02, adjust_lr_fn="adamw")  # E: arg-type
    ft.schedules.piecewise({0: 1.0}, between="line")  # E: arg-type
    ft.schedules.one_cycle(1.0, 10, shape="line")  # E: arg-type
    ft.schedules.warmup_stable_decay(1.0, 2, 8, 4, decay_shape="sqrt")  # E: arg-type
    ft.schedules.reduce_on_plateau(mode="least")  # E: arg-type
    ft.averaged(state, "mean")  # E: arg-type
    ft.evaluate(ft.eval_step(loss), state, data, dtype="bf17", on_oom="raise")  # E: arg-type
    ft.evaluate(ft.eval_step(loss), state, data, on_oom="retry")  # E: arg-type
    step.init(seed="0")  # E: arg-type
    _ = step.lowered  # E: attr-defined
