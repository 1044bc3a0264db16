"""Compilation block by block: `torch.compile` for each repeated layer of a module, the rest of the step eagerly."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain.errors import ComposeError, log_on_first_rank
from ftrain.random import torch_ops
from ftrain.step.blocks import forwarding, repeated_children
from ftrain.step.kv_cache import without_kv_cache
from ftrain.transforms.compile.cache import ShapeRegistry
from ftrain.transforms.compile.log_if_slow import log_if_slow
from ftrain.transforms.compile.settings import (
    Compiler,
    refuse_gradient_of_gradient,
    refusing_gradient_of_gradient,
)
from ftrain.transforms.remat.policies import FULL, NONE
from ftrain.types import Loss, LossOutput, PyTree

NO_BLOCKS = (
    "compiled: lowering='blocks' compiles the layers of a module that are repeated in a ModuleList or Sequential, and "
    "{} has none; leave lowering out"
)
NO_CACHE = (
    "compiled: %s runs without its cache of keys and values (use_cache=False), with which each block would need a "
    "graph of its own"
)
UNCOMPILED = (
    "compiled: the blocks of %s run uncompiled, since they draw random numbers (dropout), which must not depend on the "
    "number of ranks; lowering='whole' compiles them"
)
POLICY = (
    "compiled: lowering='blocks' cannot be combined with a policy of remat, which decides for each operation of a "
    "block whether to keep its result, while a compiled block is one operation; use remat() without a policy, or leave "
    "lowering out"
)


def compile_blocks(loss: Loss, compiler: Compiler) -> Loss:
    """Return a loss whose blocks are compiled by `torch.compile`; blocks with the same forward share its graphs.

    Raises a ComposeError if the loss has no module with repeated layers. The loss raises a BatchError when batches need
    too many graphs, and a TraceError when it differentiates a gradient that it has taken.
    """
    module = loss.module
    blocks = [] if module is None else repeated_children(module)
    if module is None or not blocks:
        raise ComposeError(NO_BLOCKS.format(loss.text))
    # Each block may need a graph of its own for a batch (window of attention, number of experts), and others in bf16.
    compiled = cache(partial(compiler.compile_function, graphs_per_batch=2 * len(blocks)))
    shapes = ShapeRegistry(sys.maxsize if compiler.dynamic else compiler.max_graphs)
    log_once = cache(log_on_first_rank)
    without_cache = without_kv_cache(module, NO_CACHE)
    runs = _Runs()

    def forward_of(block: nn.Module) -> Callable[..., Any]:
        forward: Any = block.forward
        is_method = inspect.ismethod(forward) and forward.__self__ is block
        # Methods of blocks of one class are one function, which is compiled once.
        compiled_for = compiled(forward.__func__ if is_method else forward)
        return partial(_run, runs, forward, compiled_for, [block] if is_method else [])

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        # Entered first, so that what replaces the forward of a block later (remat, the gather of level 3) calls this.
        forwards = [(block, forward_of(block)) for block in blocks]
        with compiler.in_parts(), forwarding(forwards), without_cache(), loss.scope(training):
            yield
        # The first step on ranks always runs like this, to find out whether the loss draws.
        if runs.have_drawn and runs.steps > 0:
            log_once(UNCOMPILED, loss.name)
        runs.have_drawn, runs.steps = False, runs.steps + 1

    def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        run = partial(loss.fn, params, batch, rng=rng, buffers=buffers)
        if torch.compiler.is_compiling() or _torch.active_modes():
            return run()
        # Blocks read neither texts nor numbers of the batch, except by way of the loss.
        is_new = shapes.admit(batch=tree.map(lambda leaf: leaf if isinstance(leaf, Tensor) else None, batch))
        if not is_new:
            return run()
        with log_if_slow(loss.name):
            if torch.is_grad_enabled():
                refuse_gradient_of_gradient(run, tree.device_of(params))
            return refusing_gradient_of_gradient(run)

    texts = (*loss.wrapper_texts, f"compiled(blocks={len(blocks)})")
    return dataclasses.replace(loss, fn=fn, scope=scope, wrapper_texts=texts)


def require_no_policy(step: Any) -> None:
    """Raises a ComposeError if `remat` decides for each operation of a block whether to keep its result."""
    for wrapper in step.wrappers:
        options = wrapper.options or {}
        chosen = options.get("blocks")
        policies = [options.get("policy", FULL), *(chosen.values() if isinstance(chosen, Mapping) else ())]
        has_policy = options.get("budget") is not None or any(policy not in (None, FULL, NONE) for policy in policies)
        if wrapper.name == "remat" and has_policy:
            raise ComposeError(POLICY)


@dataclasses.dataclass
class _Runs:
    """The number of steps so far, and whether blocks drew random numbers from a key in the current one."""

    steps: int = 0
    have_drawn: bool = False


def _run(
    runs: _Runs,
    forward: Callable[..., Any],
    compiled_for: Callable[[torch.device], Callable[..., Any]],
    block: Sequence[nn.Module],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block compiled; uncompiled if a dispatch mode must see its operations, for random numbers, say.

    `block` has the block itself if the compiled function is its method.
    """
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if _torch.active_modes():
        runs.have_drawn = runs.have_drawn or torch_ops.current() is not None
        return forward(*args, **kwargs)
    tensors = [leaf for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Inductor's code ignores the bits of tensors that are conjugated or negated by a bit (2.13).
    if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return forward(*args, **kwargs)
    return compiled_for(tree.device_of(tensors))(*block, *args, **kwargs)
