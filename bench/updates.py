"""Optimizers alone, with gradients at hand: ftrain's updates, torch's, and those of the libraries that have them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.ours import compiling
from bench.tasks import Task
from bench.timing import LocalRacer
from ftrain import optim, tree
from ftrain.types import Optimizer, PyTree

RATE, DECAY = 1e-2, 0.1
FADING, LARGE = -0.9, 1e3
"""Gradients take the first factor from one compared step to the next, and the second before the timing.

Large ones keep parameters from coming to rest where decay balances them, with moments so small that they take long.
"""


@dataclass(frozen=True)
class Kind:
    """An optimizer, and who else has it.

    Args:
        ours: its name in `ftrain.optim`.
        torchs: its name in `torch.optim`, if it is there.
        options: what both are given beside a rate and a decay.
        fused: whether torch has a kernel for it.
        peer: ``module:class`` of the library that has it.
        slow: the peer compiles for a minute.
        matrices: takes nothing else.
        blocks: stored in blocks of 256 elements; the peer does that with leaves of whole blocks alone, and keeps others
            in float32.
        tolerance: as a precision; looser where steps are signs, or rounded to few bits.
    """

    ours: str
    torchs: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    peer: str = ""
    slow: bool = False
    matrices: bool = False
    blocks: bool = False
    tolerance: str = "fp32"

    def make(self) -> Optimizer:
        """Ours, decaying every parameter as the others do."""
        optimizer: Optimizer = getattr(optim, self.ours)(
            RATE, weight_decay=DECAY, decay_mask=lambda name, leaf: True, **self.options
        )
        return optimizer

    def find(self) -> Any:
        """The class of its peer, or of torch."""
        module, name = self.peer.split(":") if self.peer else ("torch.optim", self.torchs)
        return getattr(importlib.import_module(module), name)


KINDS = {
    "sgd": Kind("sgd", "SGD", fused=True),
    "sgd, momentum": Kind("sgd", "SGD", {"momentum": 0.9}, fused=True),
    "adam": Kind("adam", "Adam", fused=True),
    "adamw": Kind("adamw", "AdamW", fused=True),
    "rmsprop": Kind("rmsprop", "RMSprop"),
    "adagrad": Kind("adagrad", "Adagrad", fused=True),
    "nadam": Kind("nadam", "NAdam"),
    "radam": Kind("radam", "RAdam"),
    "adafactor": Kind("adafactor", "Adafactor"),
    "muon": Kind("muon", "Muon", matrices=True, tolerance="bf16"),
    "lion": Kind("lion", peer="lion_pytorch:Lion", options={"b1": 0.9, "b2": 0.99}, tolerance="bf16"),
    "lamb": Kind("lamb"),
    "schedule_free_adamw": Kind("schedule_free_adamw", peer="schedulefree:AdamWScheduleFree"),
    "adamw_8bit": Kind("adamw_8bit", peer="torchao.optim:AdamW8bit", slow=True, blocks=True, tolerance="bf16"),
}


class Updating(LocalRacer):
    """A racer of which a step is an update. What it says of a step, where others tell a loss, is how far it has moved.

    That is the distance from the start, in rates, and the part of it along a direction drawn at random: losses are slow
    to tell a wrong update from a right one. The gradients change from step to step then, and stay while it is timed.
    """

    def __init__(self, update: Callable[[], Any], leaves: list[Tensor], grads: list[Tensor], device: str) -> None:
        super().__init__(update, device)
        self._leaves, self._grads = leaves, grads

    @torch.no_grad()
    def losses(self, steps: int) -> list[float]:
        start, grads = [leaf.double() for leaf in self._leaves], [grad.clone() for grad in self._grads]
        directions, progress = drawn(self._leaves, seed=2), []
        for _ in range(steps):
            self._run()
            moved = [leaf - old for leaf, old in zip(self._leaves, start, strict=True)]
            length = sum(float(part.square().sum()) for part in moved) ** 0.5
            along = sum(float((part * direction).sum()) for part, direction in zip(moved, directions, strict=True))
            progress += [length / RATE, along / length]
            # From a copy, for some write into their gradients.
            grads = [grad.flatten().roll(1).view_as(grad).mul(FADING) for grad in grads]
            for grad, value in zip(self._grads, grads, strict=True):
                grad.copy_(value)
        for grad in self._grads:
            grad.mul_(LARGE)
        return progress

    def close(self) -> None:
        super().close()
        self._leaves, self._grads = [], []


def drawn(leaves: list[Tensor], *, seed: int) -> list[Tensor]:
    """Draw normal numbers like the leaves."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(leaf.shape, generator=draw).to(leaf.device) for leaf in leaves]


def parameters(task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters of a task's model, all or the matrices alone, and gradients of about 1, by name."""
    named = {name: leaf.detach() for name, leaf in task.model().named_parameters()}
    if kind(task).matrices:
        named = {name: leaf for name, leaf in named.items() if leaf.ndim == 2}
    return named, dict(zip(named, drawn([*named.values()], seed=1), strict=True))


def kind(task: Task) -> Kind:
    """The optimizer that the option `optimizer` names."""
    return KINDS[task.option("optimizer", "adamw")]


def ours(task: Task) -> Updating:
    """`Optimizer.update` with the old state donated, as an eager step calls it."""
    optimizer = kind(task).make()
    params, grads = parameters(task)
    leaves, state = [*params.values()], optimizer.init(params)

    def update() -> None:
        nonlocal params, state
        with torch.no_grad():
            params, state = optimizer.update(grads, state, params, {"lr": RATE}, donate=True)

    return Updating(update, leaves, [*grads.values()], task.device)


def ours_compiled(task: Task) -> Updating:
    """The same as one graph, with the rate as an input of each call, as a step that is split compiles it."""
    optimizer = kind(task).make()
    params, grads = parameters(task)
    leaves, carry = [*params.values()], (params, optimizer.init(params))

    @compiling(task, donate=True)  # type: ignore[untyped-decorator]
    def function(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return optimizer.update(inputs[0], carry[1], carry[0], {"lr": inputs[1]}), {}

    def update() -> None:
        nonlocal carry
        carry, _ = function(carry, (grads, torch.tensor(RATE, dtype=torch.float64, device=task.device)))

    return Updating(update, leaves, [*grads.values()], task.device)


def theirs(task: Task) -> Updating:
    """`step` of torch's optimizer: fused where torch has a kernel, else with the operations on many tensors.

    As torch chooses with the option ``way="default"``; ``best`` compiles it, as torch's recipe does.
    """
    chosen = kind(task)
    is_default = chosen.matrices or task.option("way") == "default"
    way = {} if is_default else {"fused": True} if chosen.fused else {"foreach": True}
    optimizer, leaves, grads = _theirs(task, **way)
    step = torch.compile(optimizer.step, backend=task.backend) if task.best else optimizer.step
    return Updating(step, leaves, grads, task.device)


def peers(task: Task) -> Updating:
    """`step` of the library that has this optimizer."""
    optimizer, leaves, grads = _theirs(task)
    # Schedule-free ones refuse to step until they are told.
    getattr(optimizer, "train", lambda: None)()
    return Updating(optimizer.step, leaves, grads, task.device)


def _theirs(task: Task, **way: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    chosen = kind(task)
    params, grads = parameters(task)
    leaves = [torch.nn.Parameter(leaf) for leaf in params.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad
    options = dict(chosen.options)
    if "b1" in options:
        options["betas"] = options.pop("b1"), options.pop("b2")
    return chosen.find()(leaves, lr=RATE, weight_decay=DECAY, **options, **way), leaves, [*grads.values()]


def state_bytes(task: Task) -> float:
    """Return how many bytes of state an optimizer holds a parameter, after an update."""
    optimizer = kind(task).make()
    params, grads = parameters(task)
    params, state = optimizer.update(grads, optimizer.init(params), params, {"lr": RATE}, donate=True)
    held = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tree.leaves(state)}
    return sum(held.values()) / sum(leaf.numel() for leaf in tree.leaves(params))
