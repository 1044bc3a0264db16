"""Optimizer updates alone, on given gradients: those of ftrain, of torch, and of libraries of optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.ours import compile_wrapper
from bench.tasks import Task
from bench.timing import LocalRacer
from ftrain import optim, tree
from ftrain.types import Optimizer, PyTree

RATE, DECAY = 1e-2, 0.1
FADING, LARGE = -0.9, 1e3
"""Factors of the gradients: `FADING` from each compared step to the next, `LARGE` once before the timing.

With large gradients, parameters do not shrink until weight decay balances the update. There the moments would become
denormal numbers, with which a CPU computes slowly.
"""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of ftrain, and where torch or another library has the same one.

    Args:
        name: its name in `ftrain.optim`.
        torch_name: its name in `torch.optim`, if torch has it.
        options: the options of both, besides the learning rate and the weight decay.
        fused: whether torch has a fused kernel for it.
        peer: ``module:class`` in another library, if torch does not have it.
        peer_is_slow: whether the other library compiles it for a minute.
        matrices_only: whether it accepts only matrices.
        blockwise: whether its state is stored in blocks of 256 elements. The other library does so only for leaves of
            whole blocks, and keeps the state of other leaves in float32.
        tolerance: the precision whose tolerance applies; looser if updates are signs or are rounded to few bits.
    """

    name: str
    torch_name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    peer: str = ""
    peer_is_slow: bool = False
    matrices_only: bool = False
    blockwise: bool = False
    tolerance: str = "fp32"

    def make(self) -> Optimizer:
        """Return the optimizer of ftrain, with weight decay of every parameter as in torch."""
        optimizer: Optimizer = getattr(optim, self.name)(
            RATE, weight_decay=DECAY, decay_mask=lambda name, leaf: True, **self.options
        )
        return optimizer

    def other_class(self) -> Any:
        """Return the class of the other library or of torch."""
        module, name = self.peer.split(":") if self.peer else ("torch.optim", self.torch_name)
        return getattr(importlib.import_module(module), name)


OPTIMIZERS = {
    "sgd": OptimizerSpec("sgd", "SGD", fused=True),
    "sgd, momentum": OptimizerSpec("sgd", "SGD", {"momentum": 0.9}, fused=True),
    "adam": OptimizerSpec("adam", "Adam", fused=True),
    "adamw": OptimizerSpec("adamw", "AdamW", fused=True),
    "rmsprop": OptimizerSpec("rmsprop", "RMSprop"),
    "adagrad": OptimizerSpec("adagrad", "Adagrad", fused=True),
    "nadam": OptimizerSpec("nadam", "NAdam"),
    "radam": OptimizerSpec("radam", "RAdam"),
    "adafactor": OptimizerSpec("adafactor", "Adafactor"),
    "muon": OptimizerSpec("muon", "Muon", matrices_only=True, tolerance="bf16"),
    "lion": OptimizerSpec("lion", peer="lion_pytorch.foreach:Lion", options={"b1": 0.9, "b2": 0.99}, tolerance="bf16"),
    "lamb": OptimizerSpec("lamb"),
    "schedule_free_adamw": OptimizerSpec("schedule_free_adamw", peer="schedulefree:AdamWScheduleFree"),
    "adamw_8bit": OptimizerSpec(
        "adamw_8bit", peer="torchao.optim:AdamW8bit", peer_is_slow=True, blockwise=True, tolerance="bf16"
    ),
}


class UpdateRacer(LocalRacer):
    """A racer whose step is an update of the optimizer.

    Instead of losses, it returns how far the parameters have moved: a loss would hardly change after a wrong update.
    The gradients change between these first updates; they are constant while updates are timed.
    """

    def __init__(self, update: Callable[[], Any], leaves: list[Tensor], grads: list[Tensor], device: str) -> None:
        super().__init__(update, device)
        self._leaves, self._grads = leaves, grads

    @torch.no_grad()
    def losses(self, steps: int) -> list[float]:
        """Make updates and return two numbers for each.

        They are the distance from the start, divided by the learning rate, and the component of the unit vector of the
        movement along a random direction.
        """
        start, grads = [leaf.double() for leaf in self._leaves], [grad.clone() for grad in self._grads]
        directions, progress = random_like(self._leaves, seed=2), []
        for _ in range(steps):
            self._run()
            moved = [leaf - old for leaf, old in zip(self._leaves, start, strict=True)]
            length = sum(float(part.square().sum()) for part in moved) ** 0.5
            along = sum(float((part * direction).sum()) for part, direction in zip(moved, directions, strict=True))
            progress += [length / RATE, along / length]
            # From a copy of the gradients, since some optimizers write into them.
            grads = [grad.flatten().roll(1).view_as(grad).mul(FADING) for grad in grads]
            for grad, value in zip(self._grads, grads, strict=True):
                grad.copy_(value)
        for grad in self._grads:
            grad.mul_(LARGE)
        return progress

    def close(self) -> None:
        super().close()
        self._leaves, self._grads = [], []


def random_like(leaves: list[Tensor], *, seed: int) -> list[Tensor]:
    """Return normal random numbers with the shapes and devices of the leaves."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(leaf.shape, generator=draw).to(leaf.device) for leaf in leaves]


def parameters(task: Task) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters of a task's model and random gradients, by name; for some optimizers only matrices."""
    params = {name: leaf.detach() for name, leaf in task.model().named_parameters()}
    if spec_of(task).matrices_only:
        params = {name: leaf for name, leaf in params.items() if leaf.ndim == 2}
    grads = random_like([*params.values()], seed=1)
    return params, dict(zip(params, grads, strict=True))


def spec_of(task: Task) -> OptimizerSpec:
    """Return the optimizer that the option `optimizer` names."""
    return OPTIMIZERS[task.option("optimizer", "adamw")]


def ours(task: Task) -> UpdateRacer:
    """Prepare `Optimizer.update` with the old state donated, as an eager step calls it."""
    optimizer = spec_of(task).make()
    params, grads = parameters(task)
    leaves, state = [*params.values()], optimizer.init(params)

    def update() -> None:
        nonlocal params, state
        with torch.no_grad():
            params, state = optimizer.update(grads, state, params, {"lr": RATE}, donate=True)

    return UpdateRacer(update, leaves, [*grads.values()], task.device)


def ours_compiled(task: Task) -> UpdateRacer:
    """Prepare `Optimizer.update` as one graph, as `compiled(lowering="split")` compiles it.

    The learning rate is an input of the graph.
    """
    optimizer = spec_of(task).make()
    params, grads = parameters(task)
    leaves, carry = [*params.values()], (params, optimizer.init(params))

    @compile_wrapper(task, donate=True)  # type: ignore[untyped-decorator]
    def function(carry: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        return optimizer.update(inputs[0], carry[1], carry[0], {"lr": inputs[1]}), {}

    def update() -> None:
        nonlocal carry
        carry, _ = function(carry, (grads, torch.tensor(RATE, dtype=torch.float64, device=task.device)))

    return UpdateRacer(update, leaves, [*grads.values()], task.device)


def torch_optimizer(task: Task) -> UpdateRacer:
    """Prepare `step` of torch's optimizer: fused if torch has a fused kernel, else `foreach`.

    With the option ``implementation="default"``, torch chooses. With `best` the method is compiled, as in torch's
    recipe.
    """
    spec = spec_of(task)
    if spec.matrices_only or task.option("implementation") == "default":
        implementation = {}
    else:
        implementation = {"fused": True} if spec.fused else {"foreach": True}
    optimizer, leaves, grads = _other_optimizer(task, **implementation)
    step = torch.compile(optimizer.step, backend=task.backend) if task.best else optimizer.step
    return UpdateRacer(step, leaves, grads, task.device)


def peer_optimizer(task: Task) -> UpdateRacer:
    """Prepare `step` of the other library that has this optimizer."""
    optimizer, leaves, grads = _other_optimizer(task)
    # Optimizers of schedulefree refuse to step before `train()` is called; others have no such method.
    if hasattr(optimizer, "train"):
        optimizer.train()
    return UpdateRacer(optimizer.step, leaves, grads, task.device)


def _other_optimizer(task: Task, **implementation: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return the optimizer of torch or of another library, its parameters, and their gradients."""
    spec = spec_of(task)
    params, grads = parameters(task)
    leaves = [torch.nn.Parameter(leaf) for leaf in params.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad
    options = dict(spec.options)
    if "b1" in options:
        options["betas"] = options.pop("b1"), options.pop("b2")
    optimizer = spec.other_class()(leaves, lr=RATE, weight_decay=DECAY, **options, **implementation)
    return optimizer, leaves, [*grads.values()]


def state_bytes(task: Task) -> float:
    """Return the bytes of state per element of the parameters, after one update."""
    optimizer = spec_of(task).make()
    params, grads = parameters(task)
    params, state = optimizer.update(grads, optimizer.init(params), params, {"lr": RATE}, donate=True)
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tree.leaves(state)}
    return sum(storages.values()) / sum(leaf.numel() for leaf in tree.leaves(params))
