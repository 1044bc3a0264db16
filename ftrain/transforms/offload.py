"""Keep somewhere else what the device has no memory for."""

from __future__ import annotations

import os
from typing import Any

from ftrain import tree
from ftrain.away import Home, away
from ftrain.backends import Backend
from ftrain.errors import ComposeError, DeviceError, OptionError
from ftrain.optim.apart import require_apart
from ftrain.transfers import as_directory
from ftrain.types import Optimizer, PyTree
from ftrain.wrapper import Wrapper, wrapper

KINDS = ("opt_state",)
LEAST = 1 << 16
"""Bytes: what is smaller takes longer to be sent for than to be copied."""


@wrapper
def offload(what: str, *, directory: str | os.PathLike[str] | None = None, min_bytes: int = LEAST) -> Wrapper:
    """Keep a part of what training needs in host memory, or in files, and bring it to the device when it is needed.

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
        what: ``"opt_state"``.
        directory: of the files; made if it is not there.
        min_bytes: leaves that take less stay on the device.

    Raises:
        OptionError: for anything else, or a directory that cannot be written.
        ComposeError: beside `compiled`, whose graphs hold the whole state, or what may refuse an update, for which old
            and new state must be there at once (`skip_nonfinite`, fp16); or for an optimizer that cannot update
            parameters one by one.
        DeviceError: from `Step.init`, where the state is on the host already and there is no directory, or when a disk
            has no room.
    """
    if what not in KINDS:
        raise OptionError(f"offload: what is {what!r}; choices are {', '.join(KINDS)}")
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise OptionError(f"offload: min_bytes is {min_bytes!r}, needs a whole number of at least 0")
    name = f"offload_{what}"
    text = f"offload({what}{f', {directory}' if directory is not None else ''})"
    return _opt_state(name, text, Home(None if directory is None else as_directory(directory), min_bytes))


def _opt_state(name: str, text: str, home: Home) -> Wrapper:
    def optimizer(inner: Optimizer) -> Optimizer:
        require_apart(text, inner)
        return away(text, inner, home)

    def require(backend: Backend, params: PyTree) -> None:
        if home.directory is None and tree.device_of(params) == tree.HOST:
            raise DeviceError(
                f"{text}: the state is on the host already ({backend.describe()}); give a directory= for it to be in "
                "files, or a device to Step.init"
            )

    def suits(step: Any) -> None:
        for other in step.wrappers:
            if other.step:
                raise ComposeError(
                    f"{text}: {other.text} holds the whole state at once, and here it visits the device in parts; "
                    "leave out one of the two, or compile the module itself: torch.compile(module)"
                )
            if other.account:
                raise ComposeError(
                    f"{text}: {other.text} may take an update back, for which the old and the new state must be there "
                    "at once; leave out one of the two"
                )

    return Wrapper(name, text, "update", optimizer=optimizer, require=require, suits=suits, reads_gradients=False)
