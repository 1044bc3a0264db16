"""Compilation of the loss that an evaluation computes."""

from __future__ import annotations

import dataclasses
import logging
import sys
from contextlib import nullcontext

from torch import Tensor

from ftrain.errors import log_on_first_rank
from ftrain.transforms.compile.announce import log_if_slow
from ftrain.transforms.compile.cache import ShapeRegistry
from ftrain.transforms.compile.fallback import CompilerError, attempted
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import Loss, LossOutput, PyTree

log = logging.getLogger("ftrain")


def compile_evaluation(loss: Loss, compiler: Compiler, *, may_fall_back: bool) -> Loss:
    """Return the loss of an `EvalStep`, passed to `torch.compile`; it runs eagerly once the compiler has failed.

    That of many ranks is returned as it is: they gather parameters within it. The loss raises what the compiler raises,
    unless it may fall back, and a BatchError when batches need more than `max_graphs` graphs.
    """
    if loss.ranks is not None and loss.ranks.size > 1:
        log_on_first_rank("compiled: the evaluation of %s on many ranks runs eagerly", loss.name)
        return loss
    compiled, is_eager = loss.on_compiled(compiler.compile_loss(loss.fn)), False
    shapes = ShapeRegistry(sys.maxsize if compiler.dynamic else compiler.max_graphs)

    def run(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        nonlocal is_eager
        if is_eager:
            return loss.fn(params, batch, rng=rng, buffers=buffers)
        logging_slow = log_if_slow(loss.name) if shapes.admit(batch=batch) else nullcontext()
        try:
            with logging_slow, compiler.cache(), attempted() if may_fall_back else nullcontext():
                return compiled(params, batch, rng=rng, buffers=buffers)
        except CompilerError as error:
            why = str(error)
        # Outside of the handler, which keeps the tensors of the error alive. An error of the loss is raised here again.
        output = loss.fn(params, batch, rng=rng, buffers=buffers)
        log.warning("compiled: the evaluation of %s runs eagerly, since the compiler failed: %s", loss.name, why)
        is_eager = True
        return output

    return dataclasses.replace(loss, fn=run, wrapper_texts=(*loss.wrapper_texts, "compiled"))
