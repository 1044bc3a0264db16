"""Rematerialisation (activation checkpointing): recompute activations instead of keeping them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ftrain import _torch, backends, tree
from ftrain.errors import ComposeError, LossError, OptionError, log_on_first_rank, require_range
from ftrain.random import torch_ops
from ftrain.step.blocks import Region, Wanted, find_blocks, through, within
from ftrain.step.forward import versions
from ftrain.step.kv_cache import without_kv_cache
from ftrain.step.swap_params import Slot, bound, slots_of
from ftrain.step.wrapper import OnLoss, Wrapper, wrapper
from ftrain.transforms.remat.budget import Budget
from ftrain.transforms.remat.checkpoint import recomputed
from ftrain.transforms.remat.policies import FULL, NONE, Policy, SavedResults, keeps_of, name_of, require_policy
from ftrain.tree import device_off_host
from ftrain.types import Loss, LossOutput, PyTree

NAME = "remat"
IN_TRANSFORM = (
    "remat: a block that runs within a transform of torch.func (grad, vmap, jvp ...) keeps its activations, since they "
    "cannot be recomputed there; for a gradient by torch.autograd.grad(..., create_graph=True) they can"
)
NO_CACHE = "remat: %s runs without its cache of keys and values (use_cache=False), which recomputed blocks fill twice"

Context: TypeAlias = Callable[[], AbstractContextManager[None]]


@wrapper
def remat(policy: Policy = FULL, blocks: Wanted | None = None, *, budget: float | None = None) -> Wrapper:
    """Keep only the inputs of each block for the backward pass, and recompute its activations there.

    Gradients are the same to the bit, dropout included, and buffers advance once (Chen et al. 2016, arXiv:1604.06174).
    By default the blocks are the repeated children of the module's `ModuleList` and `Sequential`; in a pure function,
    the functions marked by `ft.block`. Blocks inside a block are recomputed one by one when it is recomputed, which
    needs less memory and runs them once more. Models of transformers that fill a cache of keys and values
    (``config.use_cache``) run without it, and a block within a transform of `torch.func` keeps its activations; the log
    says so once.

    Args:
        policy: which activations to keep. ``"full"`` recomputes everything, ``"dots"`` keeps matmuls, convolutions and
            attention, ``"attention"`` keeps attention where it is one operation (a fused kernel of
            `scaled_dot_product_attention`), ``"none"`` recomputes nothing. A function ``(op, *args, **kwargs) -> bool``
            decides for each call of an operation, such as ``torch.ops.aten.mm.default``, whether to keep its result;
            views, casts, random numbers and in-place operations are always recomputed.
        blocks: types of modules or their dotted names, or a mapping from these to policies, or a function
            ``(name, module) -> policy``, which is None for a module that is not a block.
        budget: a share in [0, 1] of the bytes that the blocks would keep without this wrapper, besides their inputs.
            Each block gets the policy ``"full"``, ``"dots"`` or ``"none"``, so that as little as possible is
            recomputed, by an estimate of floating-point operations, memory traffic and the overhead of policies on the
            host. Blocks are measured on fake tensors when the loss first gets a batch of a shape; blocks inside a block
            are part of it.

    Raises:
        OptionError: for an unknown policy, a budget outside of [0, 1] or together with policies, or when there is no
            such block.
        ComposeError: from the step, when the loss ran no block.
        LossError: from the step, when an argument of a block or a tensor that it keeps was overwritten before the block
            was recomputed, when it then needed other tensors, or when with a budget a checkpoint of the loss recomputes
            it.
        TraceError: from the step, when with a budget the loss reads the value of a tensor, or takes a gradient.
    """
    require_policy(policy)
    is_known = blocks is None or callable(blocks) or isinstance(blocks, Sequence | Mapping)
    if isinstance(blocks, str | type) or not is_known:
        raise OptionError(
            f"remat: blocks is {blocks!r}, needs a list of types and dotted names, a mapping from these to policies, "
            "or a function (name, module) -> policy"
        )
    if budget is not None:
        require_range(NAME, "budget", budget, 0.0, 1.0, closed=True)
        if policy != FULL or isinstance(blocks, Mapping) or callable(blocks):
            raise OptionError(
                f"remat: budget={budget} chooses the policies of the blocks; leave out policy={name_of(policy)}, and "
                "give blocks as a list, or leave out budget="
            )

    def wrap(loss: Loss) -> Loss:
        policies = _policies_of_blocks(loss, policy, blocks)
        plan = None if budget is None else Budget(loss, budget)
        text = f"remat({_text(policy, list(policies.values()), budget)})"
        return _with_remat(loss, policies, policy, plan, text)

    return Wrapper(NAME, loss=OnLoss(wrap, order=2), innermost=True)


def _policies_of_blocks(loss: Loss, policy: Policy, blocks: Wanted | None) -> dict[nn.Module, Policy]:
    if loss.module is None:
        if blocks:
            raise OptionError(
                f"remat: {loss.text} has no module in which to find blocks={blocks!r}; mark functions with ft.block"
            )
        return {}
    choices = find_blocks(loss.module, blocks)
    policies = {module: policy if choice is None else choice for module, choice in choices.items()}
    for choice in policies.values():
        require_policy(choice)
    return policies


@dataclasses.dataclass
class _Calls:
    """The number of times that blocks of a loss ran."""

    count: int = 0


def _with_remat(
    loss: Loss, policies: Mapping[nn.Module, Policy], policy: Policy, plan: Budget | None, text: str
) -> Loss:
    def slots(block: nn.Module) -> list[Slot]:
        adapter_slots = loss.adapters.slots(block) if loss.adapters else []
        return [*slots_of(block), *adapter_slots]

    calls = _Calls()
    blocks = [(block, slots(block), choice) for block, choice in policies.items()]
    region = _region(policy, calls, plan)
    begin_plan = None if plan is None else torch.compiler.disable(plan.begin)  # type: ignore[no-untyped-call]
    without_cache = without_kv_cache(loss.module, NO_CACHE)

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        with loss.scope(training), without_cache() if training else nullcontext(), through(region, blocks):
            yield

    def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        if begin_plan is not None:
            begin_plan(params, batch, rng, buffers)
        output = loss.fn(params, batch, rng=rng, buffers=buffers)
        # Not under Dynamo, which would guard its graph by the number of calls. Only until a block has run: later, layer
        # dropout may skip all blocks.
        if not torch.compiler.is_dynamo_compiling() and calls.count == 0:
            raise ComposeError(
                f"remat: {loss.text} ran no block; mark the functions to recompute with ft.block(function), "
                "or name modules with blocks=[...]"
            )
        return output

    return dataclasses.replace(loss, fn=fn, scope=scope, wrapper_texts=(*loss.wrapper_texts, text))


def _text(policy: Policy, chosen: Sequence[Policy], budget: float | None) -> str:
    """Return the options as they print, of a default policy, and of the policies chosen for the blocks of a module."""
    blocks = [f"blocks={len(chosen)}"] if chosen else []
    if budget is not None:
        return ", ".join([f"budget={budget:g}", *blocks])
    counts = Counter(map(name_of, chosen))
    if len(counts) > 1:
        return ", ".join(f"{name}={count}" for name, count in counts.items())
    name = next(iter(counts), name_of(policy))
    return ", ".join(blocks if name == FULL else [name, *blocks])


def _region(policy: Policy, calls: _Calls, plan: Budget | None) -> Region:
    """Return a region that runs blocks so that they can be recomputed, and counts their calls."""
    # Not compiled by Dynamo: the two runs of a compiled block may save different tensors.
    run_recomputed: Any = torch.compiler.disable(recomputed)  # type: ignore[no-untyped-call]
    log_once = functools.cache(log_on_first_rank)

    def region(function: Callable[..., Any], slots: Sequence[Slot], choice: Any, *args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        chosen: Any = policy if choice is None else choice
        if plan is not None:
            chosen = plan.next_policy()
        inside = partial(within, again if plan is None else None, function)
        if chosen != NONE and _torch.in_transform():
            log_once(IN_TRANSFORM)
            chosen = NONE
        if chosen == NONE:
            return inside(*args, **kwargs)
        tensors = [slot.tensors[slot.key] for slot in slots]
        if not tensors:  # Without parameters and buffers, its inputs say on which device it runs.
            tensors = [leaf for leaf in tree.leaves((args, kwargs)) if tree.is_tensor(leaf)]
        device = device_off_host(tensors) if tensors else backends.default().device
        # torch.utils.checkpoint saves the generators of CUDA and XPU only, for the devices of its arguments.
        repeatable = _Repeatable(inside, slots, chosen, torch_ops.rng_snapshot(device, tensors))
        returned = run_recomputed(repeatable.first, repeatable.recompute, args, kwargs, device=device)
        if _torch.is_capturing():
            repeatable.wait_for(returned)
        return returned

    # Not recursive: Dynamo may compile the inside of a block that is not recomputed.
    again: Region = torch.compiler.disable(region, recursive=False)  # type: ignore[no-untyped-call]
    return again


class _Repeatable:
    """A block that can run again on the parameters, buffers and random numbers (`same_draws`) of its first run."""

    def __init__(
        self, function: Callable[..., Any], slots: Sequence[Slot], policy: Policy, same_draws: Context
    ) -> None:
        self._function, self._slots, self._same_draws = function, list(slots), same_draws
        self._tensors = [slot.tensors[slot.key] for slot in slots]
        self._versions = versions(self._tensors)
        # A block must change its buffers only once, so it is recomputed on copies.
        self._values = [
            tensor.clone() if slot.is_buffer else tensor for slot, tensor in zip(slots, self._tensors, strict=True)
        ]
        keeps = keeps_of(policy)
        self._results = None if keeps is None else SavedResults(keeps)
        self._gradient: Tensor | None = None

    def wait_for(self, returned: PyTree) -> None:
        """Let a compiler start later runs only when there is a gradient of a result of the block."""
        for leaf in tree.leaves(returned):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._keep_gradient)  # type: ignore[no-untyped-call]

    def _keep_gradient(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def first(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block for the first time."""
        with nullcontext() if self._results is None else self._results:
            return self._function(*args, **kwargs)

    def recompute(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block again."""
        stream = torch_ops.current()
        key = None
        if self._gradient is not None:
            # Imported here: it registers an operation, which takes as long as importing ten files.
            from ftrain.transforms.remat import optimization_barrier

            inputs = args, kwargs, stream.key if stream is not None else None
            args, kwargs, key = optimization_barrier.after(self._gradient, inputs)
        with (
            bound(self._slots, self._first_values()),
            self._same_draws(),
            nullcontext() if stream is None or key is None else stream.drawing_from(key),
            nullcontext() if self._results is None else self._results.reusing(),
        ):
            return self._function(*args, **kwargs)

    def _first_values(self) -> list[Tensor]:
        """Return the tensors of the slots in the first run, with copies of those buffers that the block writes."""
        current = versions(self._tensors)
        if current == self._versions:
            return self._values
        values = []
        for slot, value, version, first in zip(self._slots, self._values, current, self._versions, strict=True):
            if version != first and not slot.is_buffer:
                raise LossError(
                    f"remat: the parameter {slot.name} of a block was overwritten before the block was recomputed: "
                    "update_in_backward does not wait for blocks that use a parameter only detached, or only after "
                    "everything that their gradient needs. Do not donate the state, or leave out one of the wrappers"
                )
            values.append(value if version == first else value.clone())
        return values
