"""Training on many devices: N ranks compute what one does, each on its rows of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ftrain import _torch, tree
from ftrain._context import setting
from ftrain._torch import dtensor
from ftrain._torch.collectives import waiting_after
from ftrain.errors import ComposeError, OptionError, RankError, require_choice
from ftrain.optim.partial_update import require_unique
from ftrain.parallel.batch_rows import current, rows_of
from ftrain.parallel.block_gather import BlockGather
from ftrain.parallel.compression import Compression
from ftrain.parallel.compression.memory_slot import SLOT
from ftrain.parallel.compression.reduction import Reduction
from ftrain.parallel.loss_params import Passing, loss_params, passing
from ftrain.parallel.loss_results import require_scalars
from ftrain.parallel.mesh import (
    ALL,
    REPLICATE,
    SHARD,
    groups,
    require_all_ranks_of,
    require_distributed,
    require_ranks,
)
from ftrain.parallel.partition import broadcast_all, start_sum_all_wide
from ftrain.parallel.rank_gradient import RankGradient
from ftrain.parallel.rank_watch import is_failed_collective, watch
from ftrain.parallel.same_loss import SameResults
from ftrain.parallel.same_step import SameInputs, digest, require_same_tensors
from ftrain.parallel.state import Layout, LocalStates, current_layout, divide, require_own_shards
from ftrain.parallel.whole_update.update import whole_update
from ftrain.step.forward import refuse_weight
from ftrain.step.loss_forms import zero_if_empty
from ftrain.step.microbatch import with_fewest_examples
from ftrain.step.wrapper import OnGrad, OnLoss, OnStep, OnUpdate, Wrapper, extend_scope, wrapper
from ftrain.tree import sharding
from ftrain.tree.wrapped_tensors import of_plain_tensors, plain_tensors
from ftrain.types import (
    Loss,
    LossOutput,
    LossRanks,
    Metrics,
    Optimizer,
    PyTree,
    Runner,
    TrainState,
    replace,
)

NAME = SLOT


@wrapper
def sharded(
    mesh: DeviceMesh,
    level: int = 3,
    reduce: Literal["fp32", "bf16", "fp16"] | Compression = "fp32",
    batches: Literal["whole", "rows"] = "whole",
    gather: Literal["own", "amp"] = "own",
) -> Wrapper:
    """Run the step on the ranks of a mesh, so that they compute together what one rank would on the whole batch.

    Every rank calls the step with the same batch and computes on its rows of it, or reads its rows alone
    (``batches="rows"``). They start with the parameters and buffers of the first rank. Gradients are summed over ranks
    with the weights of the losses (`Mean`), so that the result does not depend on how examples or tokens are spread; a
    loss that is a plain number is weighted by the examples of each rank. Random numbers are drawn per example, also in
    torch's own modules. Metrics that are not a `Mean` and floating-point buffers are averaged over all examples
    (the statistics of BatchNorm are of each rank's rows, without `sync_batch_norm`).

    The level is the ZeRO stage (Rajbhandari et al. 2020, arXiv:1910.02054). From level 1 on the leaves of the state are
    DTensors, sharded over the axis ``shard`` of the mesh; `ftrain.parallel.whole` returns a state of whole tensors.
    A leaf that its optimizer needs whole (`Optimizer.by_element` is false) is updated by one of the ranks.

    Args:
        mesh: mesh from `ftrain.parallel.mesh`.
        level: 0 replicates the whole state. From 1 on, parameters and optimizer state are sharded between
            steps; at 1 and 2 parameters are gathered once per step, at 3 block by block. At 2 and 3 the gradients
            of each microbatch are reduce-scattered as soon as they are complete.
        reduce: how gradients are sent: ``"fp32"`` in their own dtype, ``"bf16"`` or ``"fp16"`` in 16 bits,
            or in fewer bits by `ftrain.parallel.powersgd` or `ftrain.parallel.sign`. From level 1 on, if the state has
            several copies (``replicate``), gradients are sent in their own dtype within a copy, and like this
            between the copies; at level 3 only between them. One rank has nothing to send.
        batches: ``"whole"``: each rank calls the step with the batch of all ranks. ``"rows"``: with its own part of it,
            as ``ft.data.loader(..., rank=mesh.get_rank(), num_ranks=mesh.size())`` or a ``DistributedSampler`` reads
            it; all need the same number of examples. The batch is then that of all ranks, one after the other. A
            warning says when ranks have read the same first part.
        gather: how parameters of blocks are gathered at level 3: ``"own"`` in their own dtype; ``"amp"`` in the 16 bits
            of `with_amp`, if they have two or more axes; blocks then compute with these 16 bits. Gradients are
            summed in the parameters' own dtype.

    Raises:
        OptionError: for another level, a mesh with other axes, another `reduce`, or one at level 3 on a mesh with one
            copy of the state; other `batches`; or another `gather`, or ``"amp"`` below level 3.
        ComposeError: for a `reduce` that remembers what it has not sent, with a wrapper that takes the gradient more
            than once (`sam`); at level 1 and above, for an optimizer that can update neither parts of a leaf nor a leaf
            without the others, and for a wrapper that may need whole leaves (`OnGrad.by_element`,
            `OnUpdate.by_element`); for a step that is compiled in parts; from the step, for ``gather="amp"`` without
            `with_amp`.
        BatchError: from the step, for a batch that cannot be divided into rows; from the first one, on every rank, when
            they have different batches.
        StructureError: from the step, for a state that is sharded differently; from the first one, on every rank, when
            they make different steps, or have different states or keys; from ``Step.init``, for different models, or
            for parameters that another mesh or level has divided.
        RankError: from the step, when another rank died, hangs or failed, within the timeout of the mesh.
        DeviceError: when torch was built without torch.distributed.
    """
    require_distributed("sharded")
    if not isinstance(level, int) or isinstance(level, bool) or level not in range(4):
        raise OptionError(f"sharded: level is {level!r}; needs 0, 1, 2 or 3")
    if getattr(mesh, "mesh_dim_names", None) != (REPLICATE, SHARD):
        raise OptionError(f"sharded: the mesh is {mesh!r}; needs one of ft.parallel.mesh(), with axes replicate, shard")
    require_all_ranks_of(mesh)
    require_choice("sharded", "batches", batches, ("whole", "rows"))
    if gather not in ("own", "amp") or (gather == "amp" and level < 3):
        raise OptionError(f"sharded: gather is {gather!r} at level {level}; needs 'own', or at level 3 'amp'")
    reduction = Reduction(reduce, mesh, level)
    options = (", rows" if batches == "rows" else "") + (", gather=amp" if gather == "amp" else "")
    text = f"sharded({mesh.size(0)}x{mesh.size(1)}, level={level}{reduction.text}{options})"
    rank_step = _RankStep(mesh, level, text, reduction, whole_batches=batches == "whole", as_autocast=gather == "amp")
    return Wrapper(
        NAME,
        text,
        loss=OnLoss(rank_step.on_loss, order=1),
        grad=OnGrad(rank_step.gradient.of, reads_gradients=reduction.needs_all, across_ranks=True, by_element=True),
        update=OnUpdate(optimizer=rank_step.on_optimizer),
        validate=rank_step.validate,
        step=OnStep(distribute=rank_step.distribute, on_ranks=rank_step.on_ranks, ranks=mesh.size()),
        slot=reduction.slot,
        sends=rank_step.sends,
    )


class _RankStep:
    """The part of a step on one rank, around the gradient (`RankGradient`)."""

    def __init__(
        self, mesh: DeviceMesh, level: int, text: str, reduction: Reduction, *, whole_batches: bool, as_autocast: bool
    ) -> None:
        self._mesh, self._level, self._text, self._reduction = mesh, level, text, reduction
        self._as_autocast = as_autocast
        ranks = groups(mesh)
        self._all, self._shard = ranks[ALL], ranks[SHARD]
        self._same_inputs = SameInputs(self._all, whole_batches=whole_batches)
        self._whole_batches = whole_batches
        self._local_states, self._evaluated_states = (LocalStates(mesh, level, self._shard) for _ in range(2))
        self.gradient = RankGradient(level, ranks, reduction)
        self._watch = watch()

    def validate(self, step: Any) -> None:
        """Refuse a step that cannot compute on parts of leaves, or would draw numbers by the place on a rank.

        Raises a ComposeError.
        """
        optimizer = step.optimizer
        if self._level and not optimizer.by_element and optimizer.split is None:
            raise ComposeError(
                f"sharded: {optimizer.text} says neither that it updates each element by itself "
                "(Optimizer.by_element) nor how it updates a leaf without the others (Optimizer.split); say one of "
                "them, or use level=0"
            )
        self._reduction.require_one_gradient(step.wrappers)
        is_after = False
        for other in step.wrappers:
            _require_parts_suffice(other, self._level, is_after=is_after)
            is_after |= other.name == NAME
            options = other.options or {}
            lowering = options.get("lowering")
            if lowering == "split" or (options.get("dynamic") and lowering != "blocks"):
                raise ComposeError(
                    f"sharded: {other.text} compiles the loss alone, in which random operations would draw by their "
                    "place on a rank; use lowering='blocks', or leave out lowering='split' and dynamic=True"
                )
            if self._level == 3 and lowering == "blocks" and step.loss.narrow and not self._as_autocast:
                raise ComposeError(
                    f"sharded: {other.text} of blocks at level=3 would keep 16-bit copies of the gathered parameters "
                    "of all blocks until the backward pass; gather them in 16 bits with gather='amp'"
                )
            if self._level == 3 and options.get("watch"):
                raise ComposeError(
                    f"sharded: {other.text} runs parts of the model again in float32, and level 3 gathers the "
                    "parameters of a block only for its own forward; use level=2 to watch, or leave out watch=True"
                )

    def sends(self, step: Any) -> dict[str, str]:
        """Return a text for each part of a step that says what the ranks send for it, with the kind of collective."""
        if self._all.size == 1:
            return {}
        loss, grad, update = ["all-reduce of the loss"], [self._reduction.sends], ""
        if self._level and self._shard.size > 1:
            gathered = "blocks, twice" if step.loss.ranks.by_block else "parameters"
            loss.insert(0, f"{self._shard.gather_kind} of {gathered}")
            if any(other.grad is not None and other.grad.reads_norm for other in step.wrappers):
                grad.append("all-reduce of norms")
            if self._needs_wholes(step.optimizer):
                update = "all-to-all of leaves"
        return {"loss": "; ".join(loss), "grad": "; ".join(grad), "update": update}

    def _needs_wholes(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer needs whole leaves, and they are divided over ranks."""
        return self._level > 0 and not optimizer.by_element and optimizer.split is not None

    def on_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer of this rank's parts of leaves."""
        if not self._needs_wholes(optimizer):
            return optimizer
        if optimizer.offloaded is not None:
            return optimizer.offloaded(partial(whole_update, ranks=self._shard))
        return whole_update(optimizer, self._shard)

    def distribute(self, params: PyTree, frozen: PyTree, buffers: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return the tensors of the first rank on the device of every rank; as DTensors if the level shards them.

        DTensors of another state on this mesh keep their shards. Raises a StructureError for other DTensors, and a
        ComposeError if two parameters have one name.
        """
        require_unique("sharded", "parameters", tree.leaf_names(tree.overlay(params, frozen)))
        parts = {"params": params, "frozen": frozen, "buffers": buffers}
        leaves, spec = tree.flatten((params, frozen, buffers))
        require_ranks(self._mesh, leaves)
        require_own_shards(parts, self._mesh, self._level)
        leaves = [self._on_device(leaf) if tree.is_tensor(leaf) else leaf for leaf in leaves]
        if self._all.size > 1:
            leaves = self._of_first_rank(leaves, parts)
        params, frozen, buffers = tree.unflatten(spec, leaves)
        if self._level:
            params = divide(params, self._mesh, self._shard.rank)
        if self._level == 3:
            return params, divide(frozen, self._mesh, self._shard.rank), buffers
        return params, tree.map(dtensor.whole, frozen), buffers

    def _of_first_rank(self, leaves: list[Any], parts: PyTree) -> list[Any]:
        """Return the leaves with the whole tensors of the first rank. `parts` is their tree, for errors."""
        tensors = [leaf for leaf in leaves if tree.is_tensor(leaf)]
        # Leaves in a file are not sent: they are the same on all ranks.
        plain = [tensor for leaf in tensors if not dtensor.is_dtensor(leaf) for tensor in plain_tensors(leaf)]
        with self._watch:
            self._watch.note_place("in step.init")
            if tensors and not _torch.is_fake(first := plain_tensors(dtensor.local_part(tensors[0]))[0]):
                require_same_tensors(self._all, parts, first.device)
            # Copies, because a view of a flat buffer would keep all of it in memory.
            copies = iter([copy.clone() for copy in broadcast_all(self._all, plain)])
        return [
            of_plain_tensors(leaf, copies) if tree.is_tensor(leaf) and not dtensor.is_dtensor(leaf) else leaf
            for leaf in leaves
        ]

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the device of the mesh: ranks can send nothing from another device."""
        device = self._mesh.device_type
        return tensor if tensor.device.type in (device, "meta") or _torch.is_fake(tensor) else tensor.to(device)

    def on_ranks(
        self, step: Any, state: TrainState, batch: PyTree
    ) -> tuple[TrainState, PyTree, Callable[[Runner], Callable[..., Any]]]:
        """Return the local part of a state, this rank's rows, and a function that makes DTensors of the new state."""
        require_ranks(self._mesh, batch)
        if self._as_autocast and all(other.name != "with_amp" for other in step.wrappers):
            raise ComposeError("sharded: gather='amp' is the dtype of with_amp, which the step does not have; add it")
        if self._all.size > 1:  # One rank has no others to inform.
            self._watch.begin(state.step)
        with self._watch:
            device = tree.device_of(state.params)
            ranks, is_whole = self._all, self._whole_batches
            rows = replace(rows_of(batch, ranks.rank, ranks.size, step.splits, device, is_whole=is_whole), ranks=ranks)
            self._same_inputs.require(step, state, batch)
            local, layout = self._local_states.take(state)

        def around(runner: Runner) -> Callable[..., Any]:
            def run(*args: Any) -> tuple[TrainState, Metrics]:
                # The wait is outside of the watch, so that the others know of an error before this rank waits for them.
                waiting = waiting_after(_leaves_ranks_connected)
                # Wrappers outside of the sum over ranks split rows, too.
                splitting = with_fewest_examples(rows.fewest if ranks.size > 1 else None)
                with setting(current_layout, layout), waiting, self._watch, sharding.over(layout.shards), splitting:
                    new, metrics = runner(*args)
                return self._local_states.put_back(new, state), metrics

            return run

        return local, rows, around

    def on_loss(self, loss: Loss) -> Loss:
        """Return a loss of this rank's rows, with the weight of all ranks, so that gradients need only be summed."""
        gathers = self._level == 3 and self._shard.size > 1
        blocks = None
        if gathers and loss.module is not None:
            blocks = BlockGather(loss.module, self._watch, as_autocast=self._as_autocast)
        order = dict.fromkeys(name for name, _ in loss.module.named_parameters()) if loss.module is not None else {}
        self.gradient.order = order
        same_results = SameResults(self._all, self._watch)

        def of_rows(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            rows, layout = current(), current_layout.get(None)
            if layout is None:  # Not in a step: an evaluation with whole parameters.
                return loss.fn(params, batch, rng=rng, buffers=buffers)
            ranks = self._shard if self._level else self._all
            params = loss_params(self._level, ranks, params, layout.parts, blocks, order)
            if rows is None:  # An evaluation block by block.
                with _completed(blocks):
                    return loss.fn(params, batch, rng=rng, buffers=buffers)
            rows = rows.of_microbatch(batch)
            with rows.stock_draws():
                mean, metrics, buffers = loss.fn(params, batch, rng=rows.key(rng), buffers=buffers)
            if blocks is not None:
                blocks.finish()
            require_scalars(metrics)
            if self._all.size == 1:
                return mean, metrics, buffers  # As without a mesh, so that one rank launches no more kernels.
            same_results.require(mean, metrics)
            if mean.weight.requires_grad:
                refuse_weight(loss.name)
            weight, mean = rows.total_weight(mean), zero_if_empty(rows.weighted(mean))
            metrics = {name: rows.weighted_metric(metric) for name, metric in metrics.items()}
            weight = start_sum_all_wide(self._all, [mean.weight])()[0] if weight is None else weight
            return replace(mean, weight=weight), metrics, buffers

        def gathering(training: bool) -> AbstractContextManager[None]:
            is_divided = training or current_layout.get(None) is not None
            return blocks.installed() if blocks and is_divided else nullcontext()

        texts = (*loss.wrapper_texts, self._text)
        new = dataclasses.replace(loss, fn=of_rows, scope=extend_scope(loss, gathering), wrapper_texts=texts)
        if self._all.size == 1:
            return new
        by_block = self._evaluating if blocks is not None and blocks.names else None
        ranks = LossRanks(self._all.rank, self._all.size, self._all.sum, digest, self._whole_batches, by_block)
        return dataclasses.replace(new, ranks=ranks)

    def _evaluating(self, state: TrainState) -> tuple[TrainState, AbstractContextManager[None]]:
        """Return the local part of a state, and the context in which the loss is evaluated on it, block by block."""
        local, layout = self._evaluated_states.take(state)
        return local, _evaluating_on(layout)


def _leaves_ranks_connected(error: Exception) -> bool:
    """Whether the collectives that were started before an error of this rank may still complete."""
    return not isinstance(error, RankError) and not is_failed_collective(error)


@contextmanager
def _completed(blocks: BlockGather | None) -> Iterator[None]:
    """Context of a forward pass. If it fails, this rank still gathers the other blocks, for which all ranks wait."""
    try:
        yield
    except Exception as error:
        if blocks is not None and not is_failed_collective(error):
            blocks.take_part()
        raise
    if blocks is not None:
        blocks.finish()


@contextmanager
def _evaluating_on(layout: Layout) -> Iterator[None]:
    with setting(current_layout, layout), passing(Passing()):
        yield


def _require_parts_suffice(wrapper: Wrapper, level: int, *, is_after: bool) -> None:
    """Check that a wrapper may get parts of leaves. Raises a ComposeError if it does not say so.

    A mean of the rows of a gradient, say, would be another one on each rank, without an error. `is_after`: whether the
    wrapper is listed after `sharded`. If it replaces the optimizer there, that gets parts of leaves too.
    """
    if level and is_after and wrapper.update and wrapper.update.optimizer and not wrapper.update.by_element:
        raise ComposeError(
            f"sharded: {wrapper.text} replaces the optimizer of the parts of leaves that a rank has at level={level}; "
            "list it before sharded, which then gives whole leaves to an optimizer that needs them"
        )
    grad, update = wrapper.grad, wrapper.update
    changes_grad = grad is not None and grad.reads_gradients and not grad.by_element
    changes_update = update is not None and update.wrap is not None and not update.by_element
    if level and (changes_grad or changes_update):
        leaf, record = ("a gradient", "OnGrad") if changes_grad else ("an update", "OnUpdate")
        raise ComposeError(
            f"sharded: {wrapper.text} does not say that it changes each element of {leaf} by itself, and at "
            f"level={level} a rank has parts of leaves. If it reads no other elements, except in norms by "
            f"ft.tree.global_norm, say ft.{record}(wrap, by_element=True); else use level=0, or ft.optim.chain with a "
            "ft.optim.GradientTransform, which gets whole leaves"
        )
