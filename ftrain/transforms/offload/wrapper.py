"""Keep somewhere else what the device has no memory for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from torch.autograd.graph import saved_tensors_hooks

from ftrain import tree
from ftrain.backends import Backend
from ftrain.backends.transfers import as_directory
from ftrain.errors import ComposeError, DeviceError, OptionError
from ftrain.optim.offloaded import Home, offload_state
from ftrain.optim.partial_update import require_apart
from ftrain.step.value_and_grad import around_forward
from ftrain.step.wrapper import OnGrad, OnUpdate, Wrapper, wrapper
from ftrain.transforms.offload.saved_tensors import ActivationOffloader
from ftrain.types import GradFn, Optimizer, PyTree, TrainState

KINDS = ACTIVATIONS, OPT_STATE = "activations", "opt_state"
LEAST = 1 << 16
"""Bytes: what is smaller takes longer to be sent for than to be copied."""


@wrapper
def offload(
    what: Literal["activations", "opt_state"],
    *,
    directory: str | os.PathLike[str] | None = None,
    min_bytes: int = LEAST,
) -> Wrapper:
    """Keep a part of what training needs in host memory, or in files, and bring it to the device when it is needed.

    ``"activations"``: what autograd keeps for the backward pass goes to host memory, page-locked where that helps, and
    comes back shortly before it is needed (Rhu et al. 2016, arXiv:1602.08124); where the device has streams, while it
    computes. Parameters, buffers and the batch, which are there anyway, stay, and so does what is small; each piece of
    memory is sent once, however many tensors see it. Gradients are the same to the bit. Beside `remat` it is the inputs
    of blocks that go. A whole graph cannot leave the device, so that ``compiled(lowering="auto")`` splits the step.

    ``"opt_state"``: the state of the optimizer lives in host memory, page-locked where that helps (Ren et al. 2021,
    arXiv:2101.06840), or with `directory` in memory-mapped files (Rajbhandari et al. 2021, arXiv:2104.07857), and
    visits the device some parameters at a time: where the device has streams, the next ones are under way while these
    are updated. The result is the same to the bit. The leaves of `TrainState.opt_state` are ordinary tensors of the
    host, which are saved, resumed and copied as any others; a copy (`ftrain.tree.clone`) is in memory until a step has
    written it to files. Donated, a state is written where it is; otherwise the new one takes its own memory, or files,
    as long as both are there. Files have no names: they are gone with the state, and nothing is left of them. The host
    waits for the copies at the end of each update, for anybody may read a tensor of the host.

    On the host itself ``directory=`` is of use as it is: what lies in files is no memory that has to be there.

    Args:
        what: ``"activations"`` or ``"opt_state"``; of each there can be one.
        directory: of the files of the state; made if it is not there.
        min_bytes: what takes less stays on the device.

    Raises:
        OptionError: for anything else, or a directory that cannot be written.
        TraceError: from the step, for activations when it must be one graph.
        LossError: from the step, when the loss changes a tensor that its gradient needs in place.
        ComposeError: for the state beside `compiled`, whose graphs hold all of it, or what may refuse an update, for
            which old and new state must be there at once (`skip_nonfinite`, fp16); or for an optimizer that cannot
            update parameters one by one.
        DeviceError: from `Step.init`, where the state is on the host already and there is no directory, or when a disk
            has no room.
    """
    if what not in KINDS:
        raise OptionError(f"offload: what is {what!r}; choices are {', '.join(KINDS)}")
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise OptionError(f"offload: min_bytes is {min_bytes!r}, needs a whole number of at least 0")
    if what == ACTIVATIONS:
        if directory is not None:
            raise OptionError(
                f"offload: directory={str(directory)!r} is for 'opt_state'; activations go to host memory"
            )
        return _activations(min_bytes)
    name = f"offload_{what}"
    text = f"offload({what}{f', {directory}' if directory is not None else ''})"
    return _opt_state(name, text, Home(None if directory is None else as_directory(directory), min_bytes))


def _activations(least: int) -> Wrapper:
    text = f"offload({ACTIVATIONS})"

    def offloading(run: Callable[..., Any]) -> Callable[..., Any]:
        def offloaded(state: TrainState, batch: PyTree, *more: Any) -> Any:
            known = tree.leaves((state.params, state.frozen, state.buffers, batch))
            offloader = ActivationOffloader(tree.device_of(state.params), known, least)
            with saved_tensors_hooks(offloader.pack, offloader.unpack):
                return run(state, batch, *more)

        return offloaded

    def wrap(grad: GradFn) -> GradFn:
        return around_forward(grad, offloading)

    def require(backend: Backend, params: PyTree) -> None:
        if tree.device_of(params) == tree.HOST:
            raise DeviceError(
                f"{text}: the device is the host itself ({backend.describe()}), and there is nowhere to send them; use "
                "ft.remat() or ft.accumulate(n), which need less memory on any device"
            )

    return Wrapper("offload_activations", text, grad=OnGrad(wrap, reads_gradients=False), require=require)


def _opt_state(name: str, text: str, home: Home) -> Wrapper:
    def optimizer(inner: Optimizer) -> Optimizer:
        require_apart(text, inner)
        return offload_state(text, inner, home)

    def require(backend: Backend, params: PyTree) -> None:
        if home.directory is None and tree.device_of(params) == tree.HOST:
            raise DeviceError(
                f"{text}: the state is on the host already ({backend.describe()}); give a directory= for it to be in "
                "files, or a device to Step.init"
            )

    def validate(step: Any) -> None:
        for other in step.wrappers:
            if other.may_refuse_updates:
                raise ComposeError(
                    f"{text}: {other.text} may take an update back, for which the old and the new state must be there "
                    "at once; leave out one of the two"
                )

    return Wrapper(name, text, update=OnUpdate(optimizer=optimizer), require=require, validate=validate)
