"""Whether a step is compiled, and whether it is being compiled at this moment."""

from __future__ import annotations

from types import FrameType
from typing import Any

from ftrain._torch import compile as torch_compile
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.settings import Compiler
from ftrain.transforms.compile.wrapper import CompiledFunction, _Compiled, _CompiledLoss

RUN = {kind.__call__.__code__ for kind in (_Compiled, _CompiledLoss, CompiledFunction)}
COMPILE = {capture.capture.__code__, Compiler.compile.__code__}
"""The code of the functions that run a step, and of those that compile it within."""


def is_compiled(step: Any) -> bool:
    """Whether a step, or a function in its place, is compiled at its first calls."""
    return isinstance(step, CompiledFunction) or getattr(step, "is_compiled", False)


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a frame is within a compiled step that is still being compiled, and has written nothing."""
    codes = set()
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    # Torch traces and compiles a loss, and later its backward pass, within a context of its own.
    compiles = not codes.isdisjoint(COMPILE) or torch_compile.is_compiling()
    return compiles and not codes.isdisjoint(RUN)
