"""Compilation block by block: `torch.compile` for each repeated layer of a module, the rest of the step eagerly."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain.errors import ComposeError, LossError, log_on_first_rank
from ftrain.parallel import batch_rows
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
IN_PLACE = (
    "compiled: the blocks %s of %s run uncompiled, since they change a buffer in place: torch.compile may compute a "
    "wrong gradient of what they do with it next. To compile them, assign a new tensor: self.count = self.count + 1"
)
LATER_IN_PLACE = (
    "{}: a block {} changes a buffer in place, which no such block did in the first step, after which they were "
    "compiled; torch.compile may compute a wrong gradient of what it does with it next. Assign a new tensor "
    "(self.count = self.count + 1), or leave lowering='blocks' out"
)
SYNCHRONISED = (
    "compiled: lowering='blocks' cannot be combined with sync_batch_norm, which sends statistics to other ranks within "
    "a block; leave lowering out"
)
POLICY = (
    "compiled: lowering='blocks' cannot be combined with a policy of remat, which decides for each operation of a "
    "block whether to keep its result, while a compiled block is one operation; use remat() without a policy, or leave "
    "lowering out"
)


def compile_blocks(loss: Loss, compiler: Compiler) -> Loss:
    """Return a loss whose blocks are compiled by `torch.compile`; blocks with the same forward share its graphs.

    Raises a ComposeError if the loss has no module with repeated layers. The loss raises a BatchError when batches need
    too many graphs, a TraceError when it differentiates a gradient that it has taken, and a LossError when a block
    begins to change a buffer in place after the first step.
    """
    module = loss.module
    blocks = {} if module is None else {block: _own_buffers(block) for block in repeated_children(module)}
    if module is None or not blocks:
        raise ComposeError(NO_BLOCKS.format(loss.text))
    # Each block may need a graph of its own for a batch (window of attention, number of experts), and others in bf16.
    compile_function = partial(compiler.compile_function, graphs_per_batch=2 * len(blocks))
    shapes = ShapeRegistry(sys.maxsize if compiler.dynamic else compiler.max_graphs)
    without_cache = without_kv_cache(module, NO_CACHE)
    shared_forwards: dict[Callable[..., Any], _SharedForward] = {}
    draws = _Draws(loss.name)

    def forward_of(block: nn.Module) -> Callable[..., Any]:
        forward: Any = block.forward
        is_method = inspect.ismethod(forward) and forward.__self__ is block
        # Methods of blocks of one class are one function, which is compiled once.
        function = forward.__func__ if is_method else forward
        if function not in shared_forwards:
            shared_forwards[function] = _SharedForward(compile_function(function), type(block).__name__, loss.name)
        shared = shared_forwards[function]
        return partial(_run, draws, shared, blocks[block], forward, block if is_method else None)

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        # Entered first, so that what replaces the forward of a block later (remat, the gather of level 3) calls this.
        forwards = [(block, forward_of(block)) for block in blocks]
        with compiler.in_parts(), forwarding(forwards), without_cache(), loss.scope(training):
            yield
        draws.end_step()
        for shared in shared_forwards.values():
            shared.end_step()

    def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        run = partial(loss.fn, params, batch, rng=rng, buffers=buffers)
        if torch.compiler.is_compiling() or _torch.active_modes():
            return run()
        # Blocks do not read the texts of a batch.
        is_new = shapes.admit(batch=tree.map(lambda leaf: leaf if isinstance(leaf, Tensor | Number) else None, batch))
        may_compile = is_new or not all(shared.has_graph for shared in shared_forwards.values())
        with log_if_slow(loss.name) if may_compile else nullcontext():
            if is_new and torch.is_grad_enabled():
                refuse_gradient_of_gradient(run, tree.device_of(params))
            return refusing_gradient_of_gradient(run)

    texts = (*loss.wrapper_texts, f"compiled(blocks={len(blocks)})")
    return dataclasses.replace(loss, fn=fn, scope=scope, wrapper_texts=texts)


def require_compilable(step: Any) -> None:
    """Raises a ComposeError if a wrapper must see the operations within a block."""
    for wrapper in step.wrappers:
        options = wrapper.options or {}
        chosen = options.get("blocks")
        policies = [options.get("policy", FULL), *(chosen.values() if isinstance(chosen, Mapping) else ())]
        has_policy = options.get("budget") is not None or any(policy not in (None, FULL, NONE) for policy in policies)
        if wrapper.name == "remat" and has_policy:
            raise ComposeError(POLICY)
        if wrapper.name == "sync_batch_norm":
            raise ComposeError(SYNCHRONISED)


@dataclasses.dataclass
class _Draws:
    """Finds out whether the blocks of a loss draw random numbers from a key in every step, and then logs it once."""

    name: str
    has_drawn: bool = False
    steps: int = 0
    """Steps one after the other in which they have drawn. The first step on ranks runs like this in any case."""

    def end_step(self) -> None:
        self.steps = self.steps + 1 if self.has_drawn else 0
        self.has_drawn = False
        if self.steps == 2:
            log_on_first_rank(UNCOMPILED, self.name)


@dataclasses.dataclass
class _SharedForward:
    """A forward that blocks have in common.

    Its first step runs uncompiled, to see whether it changes buffers in place: `is_compiled` is None until then. A
    recomputation in that step then has the random numbers of its forward pass.
    """

    compiled_for: Callable[[torch.device], Callable[..., Any]]
    block_name: str
    loss_name: str
    is_compiled: bool | None = None
    has_run: bool = False
    has_changed_buffers: bool = False
    has_graph: bool = False
    """Whether a graph of it has been compiled."""

    def run_first(self, forward: Callable[..., Any], buffers: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run a block uncompiled, and see whether it changes its buffers in place."""
        versions = [*map(_torch.version_of, buffers)]
        result = forward(*args, **kwargs)
        self.has_changed_buffers |= versions != [*map(_torch.version_of, buffers)]
        self.has_run = True
        return result

    def run(self, function: Callable[..., Any], buffers: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function of a block. Raises a LossError if it changes a buffer in place."""
        versions = [*map(_torch.version_of, buffers)]
        result = function(*args, **kwargs)
        self.has_graph = True
        if versions != [*map(_torch.version_of, buffers)]:
            raise LossError(LATER_IN_PLACE.format(self.loss_name, self.block_name))
        return result

    def end_step(self) -> None:
        """Decide after the first step whether to compile."""
        if self.is_compiled is None and self.has_run:
            self.is_compiled = not self.has_changed_buffers
            if self.has_changed_buffers:
                log_on_first_rank(IN_PLACE, self.block_name, self.loss_name)


def _own_buffers(block: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return the dicts of the buffers of a block, but for those of torch's layers.

    The layers of torch do not read a buffer again after they have changed it.
    """
    layers = [part for part in block.modules() if not type(part).__module__.startswith("torch.nn.")]
    return [_torch.buffers_of(layer) for layer in layers if _torch.buffers_of(layer)]


def _run(
    draws: _Draws,
    shared: _SharedForward,
    own_buffers: Sequence[Mapping[str, Tensor | None]],
    forward: Callable[..., Any],
    block: nn.Module | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block compiled; uncompiled if a dispatch mode must see its operations, for random numbers, say.

    `block` is None if `forward` is no method of it.
    """
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if _torch.active_modes():
        draws.has_drawn |= batch_rows.current() is not None and torch_ops.current() is not None
        return forward(*args, **kwargs)
    buffers: list[Tensor] = []
    if own_buffers and torch.is_grad_enabled():
        buffers = [buffer for named in own_buffers for buffer in named.values() if buffer is not None]
    if shared.is_compiled is None and torch.is_grad_enabled():
        return shared.run_first(forward, buffers, *args, **kwargs)
    tensors = [leaf for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Inductor's code ignores the bits of tensors that are conjugated or negated by a bit (2.13).
    if shared.is_compiled is False or any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
        return forward(*args, **kwargs)
    function = shared.compiled_for(tree.device_of(tensors))
    return shared.run(function, buffers, *(args if block is None else (block, *args)), **kwargs)
