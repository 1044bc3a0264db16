"""The gradient of a microbatch as one graph, which runs for one microbatch after the other."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn

from ftrain import random, tree
from ftrain.errors import listed, log_on_first_rank
from ftrain.random.inductor import Fused
from ftrain.random.torch_ops import Keyed
from ftrain.step.core import assemble
from ftrain.step.swap_params import preserve_attributes
from ftrain.step.value_and_grad import Around, around_forward
from ftrain.transforms.compile import capture
from ftrain.transforms.compile.cache import Carrying, CompiledCache
from ftrain.transforms.compile.constants import Constants
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import GradFn, Gradients, Loss, Metrics, PyTree, TrainState, replace

Draw: TypeAlias = Callable[[Tensor], AbstractContextManager[Keyed]]
"""``key -> context`` in which torch's own random operations draw from the key."""


class CompiledGradient:
    """A `GradFn` as a compiled graph for each length of microbatches; it can add gradients to sums in place.

    Torch's own random operations draw from the key of the step, as in a step that is compiled whole. `compile_`
    compiles a function of trees; its graphs write to their first argument.
    """

    def __init__(
        self, grad: GradFn, compile_: Callable[[Carrying], CompiledCache], draw: Draw, *, needs_rng: bool
    ) -> None:
        self._grad, self._compile, self._draw, self._needs_rng = grad, compile_, draw, needs_rng
        self._cache = compile_(self._added)
        self._wrapped = dict[Around, CompiledGradient]()

    def around_forward(self, transform: Around) -> CompiledGradient:
        """Return this with a wrapped forward pass; it is cached, since it has its own graphs."""
        if transform not in self._wrapped:
            grad = around_forward(self._grad, transform)
            self._wrapped[transform] = CompiledGradient(grad, self._compile, self._draw, needs_rng=self._needs_rng)
        return self._wrapped[transform]

    def __call__(self, state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        """Return the gradient for a batch."""
        sums, spec, gradients = self.add(None, state, batch, rng)
        weight = gradients.loss.weight
        grads = tree.scale_leaves_(sums, torch.where(weight == 0, 0.0, 1.0 / weight))
        return replace(gradients, grads=tree.unflatten(spec, grads))

    def add(
        self, sums: list[Tensor] | None, state: TrainState, batch: PyTree, rng: Tensor | None
    ) -> tuple[list[Tensor], optree.PyTreeSpec, Gradients]:
        """Add the gradient for a batch, times the weight of its loss, to `sums`, or to zeros if they are None."""
        leaves, spec = tree.flatten(state.params)
        sums = [*map(torch.zeros_like, leaves)] if sums is None else sums
        sums, gradients = self._cache(sums, batch, replace(state, step=None, opt_state=None, rng=None), rng)
        return sums, spec, gradients

    def _added(self, sums: list[Tensor], batch: PyTree, state: TrainState, rng: Tensor) -> tuple[list[Tensor], Any]:
        key_data: Any = rng[0], rng[1]
        length, has_offset = tree.batch_length(batch) or 1, len(rng) > 2
        with (
            self._draw(torch.stack(random.stock_key_data(key_data))) as stream,  # type: ignore[arg-type]
            stream.for_examples(rng[2], length, 0) if has_offset else nullcontext(),
        ):
            gradients = self._grad(state, batch, rng if self._needs_rng else None)
        weight = 1.0 if gradients.loss.plain else gradients.loss.weight
        grads = tree.scale_leaves(tree.leaves(gradients.grads), weight)
        return list(torch._foreach_add(sums, grads)), replace(gradients, grads=None)


@contextmanager
def stock_draws(module: nn.Module | None, compiler: Compiler, key: Tensor) -> Iterator[Keyed]:
    """Context for a capture, in which torch's own modules draw from a key; it restores the attributes of the module."""
    draw = Fused if compiler.backend_for(key.device) == capture.INDUCTOR else Keyed
    with draw(key) as stream, preserve_attributes(module):
        attributes = _attributes(module)
        yield stream
        new_attributes = _attributes(module).items()
        lost = [name for name, value in new_attributes if value is not attributes.get(name) and _may_carry(value)]
    if lost and module is not None and module not in _logged:
        _logged.add(module)
        log_on_first_rank(
            "compiled: the loss sets %s, which a compiled step does not keep: each step begins with what was there "
            "before the first one. If the next step reads it (the hidden state of a recurrent net, a count), make it a "
            "buffer (register_buffer); a table that is computed again needs nothing",
            listed(lost),
        )


_logged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _attributes(module: nn.Module | None) -> dict[str, Any]:
    """Return the public attributes of a module and its children, by dotted names."""
    return {
        f"{name}.{key}".lstrip("."): value
        for name, part in ([] if module is None else module.named_modules())
        for key, value in vars(part).items()
        if not key.startswith("_")
    }


def _may_carry(value: Any) -> bool:
    """Return whether an attribute may be meant for the next step: a number, a tensor, or a sequence with a tensor.

    A tensor that requires a gradient is not: it is a part of the loss, or a weight computed from parameters.
    """
    if type(value) in (int, float):
        return True
    items = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, Tensor) and not item.requires_grad for item in items)


def in_a_loop(step: Any, compiler: Compiler, around_update: Any, unpack: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """Return a step whose innermost gradient and whose update are graphs; what is between them runs eagerly."""
    base: Loss = step.base
    # The microbatches of a batch have at most two lengths.
    gradient_compiler = dataclasses.replace(compiler, max_graphs=2 * compiler.max_graphs)
    constants = Constants(base.fn, base.module)
    compile_ = functools.partial(
        CompiledCache, compiler=gradient_compiler, name=base.name, donate=True, constants=constants
    )
    draw = functools.partial(stock_draws, base.module, compiler)

    def around_grad(grad: GradFn) -> GradFn:
        return CompiledGradient(grad, compile_, draw, needs_rng=base.needs_rng)

    core = assemble(step, around_grad=around_grad, around_update=around_update)

    def run(state: TrainState, batch: PyTree, packed: Tensor) -> tuple[TrainState, Metrics]:
        keys, hyper = unpack(packed)
        with torch.no_grad():
            return core(state, batch, hyper, keys[0])

    return run
