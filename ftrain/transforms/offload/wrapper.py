"""Keep activations or the optimizer state in host memory, or in files, to save memory of the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from torch.autograd.graph import saved_tensors_hooks

from ftrain import tree
from ftrain.backends import Backend
from ftrain.backends.transfers import as_directory
from ftrain.errors import ComposeError, DeviceError, OptionError, require_choice, require_range
from ftrain.optim.offloaded import OffloadTarget, offload_state
from ftrain.step.value_and_grad import around_forward
from ftrain.step.wrapper import OnGrad, OnUpdate, Wrapper, wrapper
from ftrain.transforms.offload.saved_tensors import ActivationOffloader
from ftrain.types import PyTree, TrainState

ACTIVATIONS = "activations"
OPT_STATE = "opt_state"
CHOICES = (ACTIVATIONS, OPT_STATE)
MIN_BYTES = 1 << 16
"""For smaller tensors the overhead of a copy is larger than the copy itself."""


@wrapper
def offload(
    what: Literal["activations", "opt_state"],
    *,
    directory: str | os.PathLike[str] | None = None,
    min_bytes: int = MIN_BYTES,
) -> Wrapper:
    """Keep activations or the optimizer state in host memory, or in files, and copy them to the device for use.

    ``"activations"``: what autograd saves for the backward pass is copied to host memory, pinned where that helps, and
    back shortly before it is needed (Rhu et al. 2016, arXiv:1602.08124). A device with streams copies while it
    computes. Parameters, buffers, the batch and small tensors stay. With `remat` the inputs of blocks are offloaded.
    ``compiled(lowering="auto")`` splits the step: a graph cannot contain the copies.

    ``"opt_state"``: the optimizer state is in host memory, pinned where that helps (Ren et al. 2021, arXiv:2101.06840),
    or with `directory` in memory-mapped files (Rajbhandari et al. 2021, arXiv:2104.07857). An update copies it to the
    device for some parameters at a time; on a device with streams, the next ones are copied while these are updated.
    The leaves of `TrainState.opt_state` are ordinary tensors of the host. A donated state is overwritten; otherwise the
    new one has its own memory, or files, which have no names and are freed with it. A copy (`ftrain.tree.clone`) is in
    memory until a step has written it to files. The host waits for the copies at the end of each update.

    Both leave results the same to the bit.

    Args:
        what: ``"activations"`` or ``"opt_state"``; a step can have one of each.
        directory: directory for the files of the state; it is created if it does not exist.
        min_bytes: smaller tensors stay on the device.

    Raises:
        OptionError: for an argument out of its range, or a directory that cannot be written.
        TraceError: from the step, for activations when ``compiled(lowering="whole")``.
        LossError: from the step, when the loss changes a tensor in place that its gradient needs.
        ComposeError: for the state, with ``compiled(lowering="whole")``, with a wrapper that may refuse an update
            (`skip_nonfinite`, `skip_spikes`, fp16), which needs the old and the new state at once, or for an optimizer
            that cannot update parameters one by one.
        DeviceError: from `Step.init`, when the device is the host itself, except for a state with a directory; or when
            the disk is full.
    """
    require_choice("offload", "what", what, CHOICES)
    require_range("offload", "min_bytes", min_bytes, 0)
    if what == ACTIVATIONS:
        if directory is not None:
            raise OptionError(
                f"offload: directory={str(directory)!r} is for 'opt_state'; activations go to host memory"
            )
        return _activations(min_bytes)
    return _opt_state(directory, min_bytes)


def _activations(min_bytes: int) -> Wrapper:
    text = f"offload({ACTIVATIONS})"

    def transform(run: Callable[..., Any]) -> Callable[..., Any]:
        def offloading(state: TrainState, batch: PyTree, *more: Any) -> Any:
            resident = tree.leaves((state.params, state.frozen, state.buffers, batch))
            offloader = ActivationOffloader(tree.device_of(state.params), resident, min_bytes)
            with saved_tensors_hooks(offloader.pack, offloader.unpack):
                return run(state, batch, *more)

        return offloading

    def require(backend: Backend, params: PyTree) -> None:
        if tree.device_of(params) == tree.HOST:
            raise DeviceError(
                f"{text}: the device is the host itself ({backend.describe()}), so nothing can be offloaded; use "
                "ft.remat() or ft.accumulate(n), which save memory on any device"
            )

    on_grad = OnGrad(lambda grad: around_forward(grad, transform), reads_gradients=False)
    return Wrapper("offload_activations", text, grad=on_grad, require=require)


def _opt_state(directory: str | os.PathLike[str] | None, min_bytes: int) -> Wrapper:
    if directory is None:
        text = f"offload({OPT_STATE})"
        target = OffloadTarget(None, min_bytes)
    else:
        text = f"offload({OPT_STATE}, {directory})"
        target = OffloadTarget(as_directory(directory), min_bytes)

    def require(backend: Backend, params: PyTree) -> None:
        if target.directory is None and tree.device_of(params) == tree.HOST:
            raise DeviceError(
                f"{text}: the state is on the host already ({backend.describe()}); give a directory= to keep it in "
                "files, or a device to Step.init"
            )

    def validate(step: Any) -> None:
        for other in step.wrappers:
            if other.may_refuse_updates:
                raise ComposeError(
                    f"{text}: {other.text} may refuse an update, for which the old and the new state must exist at "
                    "once; leave out one of the two"
                )

    on_update = OnUpdate(by_element=True, optimizer=lambda optimizer: offload_state(text, optimizer, target))
    return Wrapper("offload_opt_state", text, update=on_update, require=require, validate=validate)
