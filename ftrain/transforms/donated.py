"""Donation: the step overwrites the memory of the old state with the new one."""

from __future__ import annotations

from ftrain.step.wrapper import OnStep, Wrapper, wrapper


@wrapper
def donated() -> Wrapper:
    """Reuse the memory of the old state for the new one; using the old state afterwards raises `ConsumedError`.

    The result is the same to the bit. `fit` donates by default. Where an update may be refused (fp16,
    `skip_nonfinite`), both states are needed until then, and no memory is saved.
    """
    return Wrapper("donated", step=OnStep(donate=True))
