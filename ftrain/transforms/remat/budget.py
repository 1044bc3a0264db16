"""Which blocks to compute again, so that the rest fits into a share of the memory that all would keep."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ftrain import _torch, tree
from ftrain.errors import TraceError
from ftrain.step.blocks import within
from ftrain.step.flops import flops
from ftrain.step.swap_params import Slot, preserve_attributes
from ftrain.transforms.remat.policies import DOTS, FULL, NONE
from ftrain.types import Loss, PyTree

MOST_STATES = 2000
"""Sums that the search goes on with; blocks of a few kinds have fewer, and are chosen among exactly."""

log = logging.getLogger("ftrain")


BYTE, LOOKED_UP = 16, 1_000_000
"""Floating-point operations that take as long as to move a byte (Williams et al. 2009, *Roofline*; 5 to 20 in float32,
on CPUs and GPUs alike), and as Python takes to see whether the result of an operation is kept: some 10 us."""


class Price(NamedTuple):
    """What a policy costs in a block: bytes that are kept, and work to do again, in floating-point operations."""

    policy: str
    size: int
    work: int


class Budget:
    """The policies of the blocks of a loss, in the order in which it runs them.

    Args:
        loss: the loss.
        share: of the bytes that its blocks keep for the backward pass beside their inputs, in [0, 1].
    """

    def __init__(self, loss: Loss, share: float) -> None:
        self._loss, self._share = loss, share
        self._known: dict[Hashable, list[str]] = {}
        self._turns: Iterator[str] = iter(())

    def begin(self, params: PyTree, batch: PyTree, rng: Tensor | None, buffers: PyTree) -> None:
        """Prepare for one run of the loss on a batch.

        Raises:
            TraceError: when the loss asks for the value of a tensor.
        """
        if not torch.is_grad_enabled():
            self._turns = iter(())
            return
        kind = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in tree.leaves(batch))
        if kind not in self._known:
            menus = self._menus(params, batch, rng, buffers)
            self._known[kind] = choose(menus, self._share)
            log.info("remat: a budget of %s is %s blocks", self._share, dict(Counter(self._known[kind])))
        self._turns = iter(self._known[kind])

    def turn(self) -> str:
        """Return the policy of the block that is run next."""
        return next(self._turns, NONE)

    def _menus(self, params: PyTree, batch: PyTree, rng: Tensor | None, buffers: PyTree) -> list[list[Price]]:
        found: list[list[Price]] = []

        def region(function: Callable[..., Any], slots: Sequence[Slot], choice: Any, *args: Any, **kwargs: Any) -> Any:
            meter = _Meter()
            with saved_tensors_hooks(meter.save, _never), meter:
                returned = within(None, function, *args, **kwargs)
            found.append(meter.prices())
            return returned

        # On tensors without memory of its own mode, unseen by whatever captures or watches this run.
        fake = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        with _torch.without_modes(), fake, preserve_attributes(self._loss.module):
            params, batch, rng, buffers = tree.map(
                lambda leaf: _fake(fake, leaf) if isinstance(leaf, Tensor) else leaf, (params, batch, rng, buffers)
            )
            try:
                within(region, self._loss.fn, params, batch, rng=rng, buffers=buffers)
            except _torch.NEEDS_VALUES as error:
                raise TraceError(
                    f"remat: a budget needs the sizes of blocks, which are found on tensors without values, and "
                    f"{self._loss.text} asks for a value ({error.func}); give blocks={{name: policy}} in its place"
                ) from error
            except RuntimeError as error:
                raise TraceError(
                    "remat: a budget needs the sizes of blocks, which are found on tensors without values, on which "
                    f"{self._loss.text} fails: {error}. If it runs without remat, give blocks={{name: policy}} in "
                    "place of the budget"
                ) from error
        return found


def choose(menus: Sequence[Sequence[Price]], share: float) -> list[str]:
    """Return a policy for each block: the least work again, within a share of the most that could be kept.

    Args:
        menus: of each block, the prices of its policies; one of them keeps nothing.
        share: in [0, 1], of the sum of the largest sizes.
    """
    limit = share * sum(max(price.size for price in menu) for menu in menus)
    # Of a multiple-choice knapsack, the sums that no other beats: smaller ones need more work.
    states: list[tuple[int, int, tuple[Any, ...]]] = [(0, 0, ())]
    for menu in menus:
        sums = [
            (size + price.size, again + price.work, (chosen, price.policy))
            for size, again, chosen in states
            for price in menu
            if size + price.size <= limit
        ]
        states = _unbeaten(sums, limit)
    _, _, chosen = min(states, key=lambda state: (state[1], state[0]))
    policies: list[str] = []
    while chosen:
        chosen, policy = chosen
        policies.append(policy)
    return policies[::-1]


def _unbeaten(states: list[tuple[int, int, Any]], limit: float) -> list[tuple[int, int, Any]]:
    best: list[tuple[int, int, Any]] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not best or state[1] < best[-1][1]:
            best.append(state)
    if len(best) <= MOST_STATES:
        return best
    # Of sums that are nearly the same, the one with the least work, which is the last.
    return list({int(state[0] / limit * MOST_STATES): state for state in best}.values())


class _Meter(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what a block makes and keeps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Held, so that no other tensor takes the place of one that is gone.
        self._made: dict[int, Tensor] = {}
        self._saved: set[int] = set()
        self._work = self._dots = self._results = self._operations = 0

    def save(self, tensor: Tensor) -> None:
        """Note what is kept for the backward pass; what was there before the block is not the block's."""
        self._saved.add(_torch.storage_id(tensor))

    def prices(self) -> list[Price]:
        """Return what the policies cost."""
        kept = sum(each.untyped_storage().nbytes() for key, each in self._made.items() if key in self._saved)
        whole = Price(NONE, kept, 0)
        # Each operation is looked up when it is kept, and when it is made again.
        rest = self._work - self._dots + 2 * LOOKED_UP * self._operations
        prices = [Price(FULL, 0, self._work), Price("dots", self._results, rest), whole]
        return [price for price in prices if price.size < kept or price is whole]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if isinstance(func, _torch.OpOverload) and not func.is_view:
            given, results = _storages((args, kwargs)), _storages(returned)
            self._made.update({key: leaf for key, leaf in results.items() if key not in given})
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


def _never(packed: None) -> Tensor:
    raise TraceError("remat: the run that finds the sizes of blocks has no backward pass; take no gradient in the loss")


def _fake(mode: _torch.FakeTensorMode, tensor: Tensor) -> Tensor:
    return _torch.fake_like(mode, tensor).requires_grad_(tensor.requires_grad)
