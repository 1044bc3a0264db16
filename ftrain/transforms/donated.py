"""Donation: the step overwrites the memory of the old state with the new one."""

from __future__ import annotations

from ftrain.step.wrapper import OnStep, Wrapper, wrapper


@wrapper
def donated() -> Wrapper:
    """Reuse the memory of the old state for the new one; using the old state afterwards raises `ConsumedError`.

    The result is the same to the bit. `fit` donates by default. If an update may be refused (fp16, `skip_nonfinite`,
    `skip_spikes`), both states are needed and no memory is saved, except in eager steps whose fused kernel can refuse
    it: with `adam`, `adamw`, `sgd` or `adagrad`, without `ema` and `swa`, on a CPU or a GPU of NVIDIA or AMD.
    """
    return Wrapper("donated", step=OnStep(donate=True))
