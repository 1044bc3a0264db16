"""Compilation of an evaluation: as one graph for each kind of batch, or of its loss alone by `torch.compile`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from ftrain import tree
from ftrain.errors import TraceError, log_on_first_rank
from ftrain.step.eval_step import EagerMeans, EvalStep
from ftrain.transforms.compile.cache import CompiledCache, split_runner
from ftrain.transforms.compile.constants import Constants
from ftrain.transforms.compile.fallback import CompilerError
from ftrain.transforms.compile.microbatch_loop import stock_draws
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import Mean, PyTree

log = logging.getLogger("ftrain")


def compile_evaluation(step: EvalStep, compiler: Compiler, lowering: str) -> EvalStep:
    """Return an evaluation compiled with a lowering as `compiled` describes it.

    An evaluation on ranks that gather parameters block by block is returned as it is. The returned one raises what the
    compiler raises, unless the lowering is ``"auto"``, and a BatchError when batches need more than `max_graphs`
    graphs.
    """
    loss = step.loss
    if loss.ranks is not None and loss.ranks.by_block is not None:
        log_on_first_rank("compiled: the evaluation of %s, whose ranks gather its blocks, runs eagerly", loss.name)
        return step
    loss = dataclasses.replace(loss, wrapper_texts=(*loss.wrapper_texts, "compiled"))
    return EvalStep(loss, _CompiledMeans(EagerMeans(loss), compiler, lowering))


class _CompiledMeans:
    """Averages as one graph, with the loss alone compiled, or eager when the compiler fails."""

    def __init__(self, eager: EagerMeans, compiler: Compiler, lowering: str) -> None:
        self._eager, self._compiler, self._lowering = eager, compiler, lowering
        self._may_fall_back = lowering == "auto"
        self._name = eager.loss.name
        constants = Constants(eager.loss.fn, eager.loss.module)
        self._whole = CompiledCache(self._captured, compiler, self._name, donate=False, constants=constants)
        loss = dataclasses.replace(eager.loss, fn=eager.loss.on_compiled(compiler.compile_loss(eager.loss.fn)))
        self._split = split_runner(EagerMeans(loss), compiler, self._name)

    def __call__(self, tensors: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> dict[str, Mean]:
        if self._lowering == "eager":
            return self._eager(tensors, batch)
        try:
            run = self._split if self._lowering == "split" else self._run_whole
            return run(tensors, batch)
        except CompilerError as error:
            if not self._may_fall_back:
                cause = error.__cause__ or error
                raise cause from cause.__cause__
            why = str(error)
        # Outside of the handler, which keeps the tensors of the error alive. An error of the loss is raised here again.
        means = self._eager(tensors, batch)
        log.warning("compiled: the evaluation of %s runs eagerly, since the compiler failed: %s", self._name, why)
        self._lowering = "eager"
        return means

    def _run_whole(self, tensors: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> dict[str, Mean]:
        try:
            _, means = self._whole((), batch, tensors)
        except TraceError as error:
            if not self._may_fall_back:
                raise TraceError(f"compiled: the evaluation cannot be captured as one graph: {error}") from error
            log.warning(
                "compiled: only the loss of %s, since its evaluation cannot be captured as one graph: %s",
                self._name,
                error,
            )
        else:
            return means  # type: ignore[no-any-return]
        self._lowering = "split"
        return self._split(tensors, batch)  # type: ignore[no-any-return]

    def _captured(self, carry: PyTree, batch: PyTree, tensors: Any) -> tuple[PyTree, dict[str, Mean]]:
        # A model that draws random numbers in evaluation draws the same ones each time.
        key = torch.zeros(2, dtype=torch.int64, device=tree.device_of(tensors[0]))
        with stock_draws(self._eager.loss.module, self._compiler, key):
            return carry, self._eager(tensors, batch)
