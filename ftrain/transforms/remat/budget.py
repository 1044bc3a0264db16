"""Choose which blocks to recompute, so that the others keep at most a share of the memory that all would keep."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ftrain import _torch, tree
from ftrain._torch.fake import CaptureFakeTensorMode, uninterrupted
from ftrain.errors import LossError, TraceError
from ftrain.step.blocks import unrecorded, within
from ftrain.step.flops import flops
from ftrain.step.swap_params import Slot, preserve_attributes
from ftrain.transforms.remat.policies import DOTS, FULL, NONE
from ftrain.types import Loss, PyTree

MAX_SUMS = 2000
"""The largest number of partial sums in the search. Blocks of a few kinds have fewer, and the choice is exact."""

BYTE = 16
"""The time to move a byte, in floating-point operations (Williams et al. 2009, *Roofline*: 5 to 20 in float32)."""

LOOKUP = 1_000_000
"""The time in which Python looks up whether the result of an operation is kept, in floating-point operations: 10 us."""

CHECKPOINTED = (
    "remat: the loss recomputes a block by a checkpoint of its own, with which a budget cannot be combined; turn that "
    "off (of transformers: model.gradient_checkpointing_disable()), or leave out budget="
)

log = logging.getLogger("ftrain")


class PolicyCost(NamedTuple):
    """The cost of a policy for a block: bytes that it keeps, and recomputed work in floating-point operations."""

    policy: str
    size: int
    work: int


class Budget:
    """The policies of the blocks of a loss, in the order in which it runs them.

    They keep at most a share in [0, 1] of the bytes that all blocks would keep for the backward pass besides their
    inputs.
    """

    def __init__(self, loss: Loss, share: float) -> None:
        self._loss, self._share = loss, share
        self._policies: dict[Hashable, list[str]] = {}
        self._remaining: Iterator[str] = iter(())
        self._recomputes = False

    def begin(self, params: PyTree, batch: PyTree, rng: Tensor | None, buffers: PyTree) -> None:
        """Prepare for one run of the loss on a batch. Raises a TraceError if it reads a value."""
        if not torch.is_grad_enabled():
            self._remaining = iter(())
            return
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in tree.leaves(batch))
        if shapes not in self._policies:
            costs = self._costs(params, batch, rng, buffers)
            self._policies[shapes] = choose(costs, self._share)
            log.info("remat: a budget of %s is %s blocks", self._share, dict(Counter(self._policies[shapes])))
        self._remaining, self._recomputes = iter(self._policies[shapes]), set(self._policies[shapes]) != {NONE}

    def next_policy(self) -> str:
        """Return the policy of the block that runs next.

        Raises a LossError when another checkpoint runs a block again, which then must have the policy of its first run.
        """
        if self._recomputes and _torch.in_backward():
            raise LossError(CHECKPOINTED)
        return next(self._remaining, NONE)

    def _costs(self, params: PyTree, batch: PyTree, rng: Tensor | None, buffers: PyTree) -> list[list[PolicyCost]]:
        """Return the costs of the policies of each block, from a run on tensors without memory."""
        costs: list[list[PolicyCost]] = []

        def region(function: Callable[..., Any], slots: Sequence[Slot], choice: Any, *args: Any, **kwargs: Any) -> Any:
            if _torch.in_transform():  # Not recomputed there.
                costs.append([PolicyCost(NONE, 0, 0)])
                return within(None, function, *args, **kwargs)
            meter = _Meter()
            with saved_tensors_hooks(meter.save, _refuse_gradient), meter:
                returned = within(None, function, *args, **kwargs)
            costs.append(meter.costs())
            return returned

        def as_fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return _torch.fake_like(fake, leaf).requires_grad_(leaf.requires_grad)

        # Without the modes that capture or observe the step: this run is not a part of it.
        fake = CaptureFakeTensorMode(allow_non_fake_inputs=True)
        with uninterrupted(), _torch.without_modes(), unrecorded(), fake, preserve_attributes(self._loss.module):
            params, batch, rng, buffers = tree.map(as_fake, (params, batch, rng, buffers))
            try:
                within(region, self._loss.fn, params, batch, rng=rng, buffers=buffers)
            except RuntimeError as error:
                raise TraceError(
                    "remat: with a budget the blocks are measured on tensors without values, on which "
                    f"{self._loss.text} fails: {error}. If it runs without remat, give blocks={{name: policy}} instead"
                ) from error
        return costs


class _Choice(NamedTuple):
    """Policies for the first blocks, and the bytes and the work that they take together."""

    size: int
    work: int
    policies: tuple[Any, ...]
    """A linked list that the choices share: ``(policies of the blocks before the last, policy of the last)``, or ()."""


def choose(costs: Sequence[Sequence[PolicyCost]], share: float) -> list[str]:
    """Return a policy for each block, so that the least is recomputed within a share of the sum of the largest sizes.

    `costs` has, for each block, the costs of its policies. One of them must keep nothing, so that a choice exists.
    """
    limit = share * sum(max(cost.size for cost in block_costs) for block_costs in costs)
    # A multiple-choice knapsack, block after block.
    choices = [_Choice(0, 0, ())]
    for block_costs in costs:
        longer = [
            _Choice(choice.size + cost.size, choice.work + cost.work, (choice.policies, cost.policy))
            for choice in choices
            for cost in block_costs
            if choice.size + cost.size <= limit
        ]
        choices = _pareto_front(longer, limit)
    linked = min(choices, key=lambda choice: (choice.work, choice.size)).policies
    policies: list[str] = []
    while linked:
        linked, policy = linked
        policies.append(policy)
    return policies[::-1]


def _pareto_front(choices: list[_Choice], limit: float) -> list[_Choice]:
    """Return the choices that no other one beats in memory and work, smallest first; at most about `MAX_SUMS`."""
    best: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.size, choice.work)):
        if not best or choice.work < best[-1].work:
            best.append(choice)
    if len(best) <= MAX_SUMS:
        return best
    # Of choices of nearly the same size, keep the one with the least work, which is the last.
    return list({int(choice.size / limit * MAX_SUMS): choice for choice in best}.values())


class _Meter(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the memory that a block allocates and saves, and its work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage; kept alive, so that no other tensor gets the same storage.
        self._allocated: dict[int, Tensor] = {}
        self._saved: set[int] = set()
        self._work = self._dots = self._results = self._operations = 0

    def save(self, tensor: Tensor) -> None:
        """Note a tensor that is saved for the backward pass; `costs` counts those that the block has allocated."""
        self._saved.add(_torch.storage_id(tensor))

    def costs(self) -> list[PolicyCost]:
        """Return the costs of the policies."""
        saved = sum(leaf.untyped_storage().nbytes() for key, leaf in self._allocated.items() if key in self._saved)
        save_all = PolicyCost(NONE, saved, 0)
        # Each operation is looked up in the first run and in the second one.
        work_without_dots = self._work - self._dots + 2 * LOOKUP * self._operations
        costs = [PolicyCost(FULL, 0, self._work), PolicyCost("dots", self._results, work_without_dots), save_all]
        # A policy that keeps as much as all activations is of no use.
        return [cost for cost in costs if cost.size < saved or cost is save_all]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if isinstance(func, _torch.OpOverload) and not func.is_view:
            inputs, results = _storages((args, kwargs)), _storages(returned)
            self._allocated.update({key: leaf for key, leaf in results.items() if key not in inputs})
            moved = sum(leaf.nbytes for leaf in tree.leaves((args, kwargs, returned)) if isinstance(leaf, Tensor))
            work = max(flops(func, func.overloadpacket.__name__, args, kwargs, returned), BYTE * moved)
            self._work += work
            self._operations += 1
            if func in DOTS:
                self._dots += work
                self._results += sum(leaf.untyped_storage().nbytes() for leaf in results.values())
        return returned


def _storages(values: PyTree) -> dict[int, Tensor]:
    return {_torch.storage_id(leaf): leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)}


def _refuse_gradient(packed: None) -> Tensor:
    raise TraceError("remat: the run that measures the blocks has no backward pass; take no gradient in the loss")
