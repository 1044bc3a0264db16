"""Turn an `nn.Module` into a pure loss, and copy a state back into the module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy

from ftrain import _torch, tree
from ftrain._torch import dtensor
from ftrain.errors import LossError, StructureError, first_lines, listed, log_on_first_rank
from ftrain.step.across_ranks import require_to_gather
from ftrain.step.hf_loss_weights import Weigh, weigher, with_any_label
from ftrain.step.loss_forms import normalise
from ftrain.step.shared_memory import overlaps
from ftrain.step.state_checks import mismatches, require_state
from ftrain.step.swap_params import (
    BorrowedModule,
    DuringStep,
    Slot,
    fill,
    is_donated,
    named_tensors,
    preserve_dicts,
    put,
    require_no_other_thread,
    slots_of,
)
from ftrain.types import Loss, LossOutput, Mean, PyTree, TrainState

Criterion: TypeAlias = Callable[..., Any]

DIVISOR = "num_items_in_batch"
"""The key that the `Trainer` of transformers adds to a batch: the number of labels in all batches of an update."""

OF_ROUTERS = "aux_loss", "z_loss"
"""The ends of the names of the losses of routers among the outputs of a model of transformers."""


def from_module(module: nn.Module, criterion: Criterion | None = None) -> Loss:
    """Turn a module into a pure loss, whose parameters are a dict from their dotted names.

    The module runs on the parameters and buffers of the state, in training mode in a training step and in evaluation
    mode in an evaluation; afterwards it is unchanged. What it recomputes itself (`torch.utils.checkpoint`,
    ``gradient_checkpointing_enable()`` of transformers) runs on the state too; the wrapper for this is `remat`.
    Buffers that it changes (the statistics of BatchNorm) are returned, not changed in the module. Tied parameters are
    one parameter. Parameters with ``requires_grad=False`` are frozen.

    Args:
        module: any module, including the models of transformers.
        criterion: ``criterion(model, batch)``, which may take ``rng=``, and returns a 0-d tensor or `Mean`, alone or
            with a dict of metrics. Default: ``model(**batch).loss``, as the models of transformers compute it, weighted
            by the number of labels that are not ignored, if the model declares what its loss is the mean of
            (`ftrain.step.hf_loss_weights.LOSS_TYPES`; an answer outside the text must have both positions outside).
            The loss of a router, or of the size of the logits, on top of it has the same weight. Other losses (sums of
            several, those of other modules) are plain numbers; the logger ``ftrain`` says so.

    Raises:
        LossError: when `module` is not a module, or is scripted or traced by `torch.jit`; when the criterion cannot be
            called. From the loss, when its parameters are not those of the module, or the module changes in place a
            buffer that shares memory with another one (a split-compiled step logs a warning instead).
    """
    _require_module(module, criterion)
    # The module inside torch.compile's: its names have no prefix, and the step is compiled as a whole.
    module = _torch.original(module)
    slots, borrowed = slots_of(module), BorrowedModule(module)
    buffer_slots = [slot for slot in slots if slot.is_buffer]
    slot_names = [slot.name for slot in slots]
    param_names = {slot.name for slot in slots if not slot.is_buffer}
    shared = overlaps(dict(module.named_buffers()))
    text = _criterion_name(criterion, module)
    run: Criterion = criterion or partial(hf_loss, weigh=_weigher(module))
    needs_rng = "rng" in inspect.signature(run).parameters

    def loss(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        if len(params) > len(param_names):
            raise _surplus(text, [name for name in params if name not in param_names])
        copies = {name: buffer.clone() for name, buffer in buffers.items()} if buffers else {}
        try:
            values = [*map({**copies, **params}.__getitem__, slot_names)]
        except KeyError as error:
            raise _missing(text, error.args[0]) from None
        # Otherwise Dynamo would capture that the tensors stay in the module after the run.
        with preserve_dicts(borrowed.dicts) if is_dynamo_compiling() else borrowed:
            put(slots, values)
            returned = run(module, batch, rng=rng) if needs_rng else run(module, batch)
            new_buffers = {slot.name: slot.tensors[slot.key] for slot in buffer_slots} if buffer_slots else {}
            if shared and not is_dynamo_compiling():
                _require_unwritten(shared, slots, values, new_buffers, text)
        mean, metrics, _ = normalise(returned, None, text)
        return mean, metrics, new_buffers

    def initial() -> tuple[PyTree, PyTree, set[str]]:
        _require_unchanged(borrowed, slots)
        return module_state(module)

    kept = partial(borrowed.kept_from, slots=slots)
    scope = partial(DuringStep, borrowed)
    return Loss(loss, text, scope, module=module, initial=initial, needs_rng=needs_rng, on_compiled=kept)


def _require_module(module: Any, criterion: Any) -> None:
    if not isinstance(module, nn.Module):
        raise LossError(
            f"from_module: the module is {module!r:.60}; needs an nn.Module, as in from_module(module, criterion). A "
            "function (params, batch) is a loss as it is: ft.train_step(loss_fn, optimizer)"
        )
    scripted = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise LossError(
            f"from_module: {scripted[0] or 'the module'} is scripted or traced by torch.jit, so it can only run on its "
            "own parameters; pass the original nn.Module (ft.compiled() compiles the step)"
        )
    if criterion is None:
        return
    if not callable(criterion):
        raise LossError(f"from_module: the criterion is {criterion!r}; needs a function criterion(model, batch)")
    if isinstance(criterion, nn.Module) and next(criterion.parameters(), None) is not None:
        raise LossError(
            f"from_module: the criterion {type(criterion).__name__} is a module with parameters, which would not be in "
            "the state. Put both into one module, and write the loss as a function of it: "
            "from_module(nn.ModuleDict({'net': module, 'loss': criterion}), lambda both, batch: both['loss'](...))"
        )
    signature = inspect.signature(criterion.forward if isinstance(criterion, nn.Module) else criterion)
    try:
        signature.bind("model", "batch", **({"rng": None} if "rng" in signature.parameters else {}))
        is_callable = not isinstance(criterion, nn.Module)
    except TypeError:
        is_callable = False
    if not is_callable:
        raise LossError(
            f"from_module: the criterion {getattr(criterion, '__name__', type(criterion).__name__)}{signature} "
            f"{'is a module' if isinstance(criterion, nn.Module) else 'cannot be called as criterion(model, batch)'}; "
            "needs a function criterion(model, batch): for a loss of outputs and labels write "
            "lambda model, batch: loss(model(batch['x']), batch['y'])"
        )


def _require_unchanged(borrowed: BorrowedModule, slots: list[Slot]) -> None:
    """Check that a module has the same submodules, parameters and buffers as when `from_module` was called."""
    module = borrowed.module
    names = [[slot[1:] for slot in each] for each in (slots_of(module), slots)]
    if [*module.modules()] != borrowed.parts or names[0] != names[1]:
        raise StructureError(
            f"Step.init: {type(module).__name__} got other submodules, parameters or buffers after ft.from_module; "
            "call ft.from_module after the last change"
        )


def _require_unwritten(
    shared: list[tuple[str, str]], slots: list[Slot], values: list[Tensor], new_buffers: Mapping[str, Tensor], text: str
) -> None:
    """Check that no buffer that shares memory with another one was changed in place: in a state they are separate."""
    # Each buffer was a new copy, with version 0.
    written = {
        slot.name
        for slot, value in zip(slots, values, strict=True)
        if new_buffers.get(slot.name) is value and not value.is_inference() and _torch.version_of(value)
    }
    for pair in shared:
        if name := next((name for name in pair if name in written), None):
            raise LossError(
                f"{text}: the buffers {pair[0]} and {pair[1]} share memory, and {name} was changed in place; in a "
                "state they are separate, so the other would keep its old value. Register one of them as a buffer, and "
                "compute the view of it where it is used"
            )


def _weigher(module: nn.Module) -> Weigh | None:
    weigh = weigher(module)
    # No message for the layers of torch: they have no loss, and the first step raises an error.
    if weigh is None and not type(module).__module__.startswith("torch.nn."):
        log_on_first_rank(
            "from_module: the loss of %s is not known to be a mean over labels, so it is a plain number, in which "
            "each example counts the same. If it is a mean over something that examples have different numbers of "
            "(tokens), pass a criterion(model, batch) that returns a Mean; if it is a sum, as CTC losses are by "
            "default, make it a mean (config.ctc_loss_reduction = 'mean')",
            type(module).__name__,
        )
    return weigh


def hf_loss(module: nn.Module, batch: Mapping[str, Any], *, weigh: Weigh | None = None) -> Tensor | Mean:
    """Return ``module(**batch).loss``, as transformers' models define it.

    With `weigh`, it is a `Mean` over the labels that are not ignored, so that microbatches with more padding have less
    weight. If the outputs have further losses, it is a plain number. Raises a LossError if the batch is not a mapping,
    has the key `DIVISOR` or names that the model does not take, or the model computes no loss from it.
    """
    if not isinstance(batch, Mapping):
        raise LossError(
            f"from_module: the batch is {type(batch).__name__}; without a criterion it is passed as keyword arguments: "
            "needs a dict, or a criterion(model, batch)"
        )
    if DIVISOR in batch:
        raise LossError(
            f"from_module: the batch has {DIVISOR}, by which {type(module).__name__} divides its loss instead of the "
            "number of labels, so that microbatches would be weighted twice; remove it from the batch"
        )
    weight = weigh(batch) if weigh else None
    inputs = batch if weight is None else with_any_label(batch, weight)
    if getattr(getattr(module, "config", None), "apply_spec_augment", False):
        # SpecAugment masks the spectrogram in place.
        inputs = {name: leaf.clone() if _is_float(leaf) else leaf for name, leaf in inputs.items()}
    outputs = _called(module, inputs)
    loss: Tensor | None = getattr(outputs, "loss", None)
    if loss is None:
        raise LossError(
            f"from_module: {type(module).__name__}(**batch) has no .loss; add labels to the batch (it has "
            f"{', '.join(batch)}) or give a criterion(model, batch)"
        )
    if weight is None or not isinstance(loss, Tensor) or loss.ndim or _has_other_losses(outputs):
        return loss
    # In the dtype of a narrow loss, the count would be rounded or infinite.
    weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
    return Mean((loss * weight).masked_fill(weight == 0, 0), weight)


def _called(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        return module(**inputs)
    except TypeError as error:
        try:
            inspect.signature(module.forward).bind(**inputs)
        except TypeError:
            raise LossError(
                f"from_module: {type(module).__name__}(**batch) cannot be called: {error}; without a criterion the "
                f"batch (it has {', '.join(inputs)}) is passed as keyword arguments: name its leaves as the model "
                "names its inputs, or give a criterion(model, batch)"
            ) from error
        raise


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _has_other_losses(outputs: Any) -> bool:
    # The losses of routers do not count: the weight is the number of labels with them too.
    names = [name for name in outputs if "loss" in name] if isinstance(outputs, Mapping) else []
    return any(name != "loss" and not name.endswith(OF_ROUTERS) for name in names)


def to_module(module: nn.Module, state: TrainState) -> nn.Module:
    """Copy the parameters and buffers of a state into a module, in place, and return it.

    A module that donated its memory to a state gets new tensors, on the device of this state. A state that is divided
    over ranks is gathered; then every rank must call this.

    Raises:
        StructureError: when names or shapes differ; the module is then unchanged. When `state` is not a state.
        RankError: when another rank does not call it.
    """
    require_state("to_module", state)
    tensors = tree.overlay(state.params, state.frozen)
    tensors = tensors if isinstance(tensors, dict) else {}
    tensors = {**tensors, **(state.buffers or {})}
    original = _torch.original(module)
    expected = dict(named_tensors(original))
    unexpected = [f"{name}: unexpected" for name in tensors if name not in expected]
    if problems := mismatches(tensors, expected) + unexpected:
        if any("lora_" in name for name in tensors):
            problems.insert(
                0, "these are adapters: merge them first, ft.to_module(module, ft.adapters.merge(step, state))"
            )
        raise StructureError(f"to_module: the state does not fit {type(module).__name__}:{first_lines(problems)}")
    require_to_gather("to_module", tensors)
    fill(original, tensors)
    return module


def module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """Return the parameters and buffers of a module, detached, and the names of the trainable parameters.

    Raises a StructureError if a parameter is lazy and has no shape yet, was donated, has hooks, or is a DTensor, or a
    trainable one shares memory with another tensor; a LossError if the module is in a step of another thread.
    """
    require_no_other_thread(module)
    for owner, part in module.named_modules():
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if is_lazy(tensor):
                raise StructureError(
                    f"Step.init: {owner + '.' if owner else ''}{name} of {type(part).__name__} has no shape yet; run "
                    "the module once on an example before step.init()"
                )
            if tensor.is_meta and is_donated(module):
                raise StructureError(
                    f"Step.init: {owner + '.' if owner else ''}{name} of {type(part).__name__} has a shape but no "
                    "values: it was donated to another state; fill the module first (ft.to_module(module, state) puts "
                    "weights back)"
                )
    for name, param in module.named_parameters():
        if _torch.has_hooks(param):
            raise StructureError(
                f"Step.init: {name} of {type(module).__name__} has a hook (Tensor.register_hook), which steps "
                "would not call, because they run on the tensors of the state. Remove the hook; to change gradients "
                "use ft.optim.chain or a wrapper of your own (ft.OnGrad); hooks of modules are called"
            )
        if dtensor.is_dtensor(param):
            raise StructureError(
                f"Step.init: {name} of {type(module).__name__} is a DTensor, as after fully_shard or "
                "parallelize_module; pass the module without it: ft.sharded(mesh, level=3) shards the state (tensor "
                "parallelism is not supported)"
            )
    params = {name: param.detach() for name, param in module.named_parameters()}
    buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}
    trainable = {name for name, param in module.named_parameters() if param.requires_grad}
    for pair in overlaps(dict(named_tensors(module))):
        if trainable.intersection(pair):
            raise StructureError(
                f"Step.init: {pair[0]} and {pair[1]} of {type(module).__name__} share memory, but in a state they are "
                "separate, and would be trained separately. Use one parameter for both (a.weight = b.weight), of which "
                "the module computes a view if it needs one, or copy one of them (clone)"
            )
    return params, buffers, trainable


def _missing(text: str, name: str) -> LossError:
    return LossError(
        f"{text}: {name!r} of the module is neither in params nor in buffers; make the state with step.init()"
    )


def _surplus(text: str, names: list[str]) -> LossError:
    return LossError(
        f"{text}: params has {listed(names)}, which the module does not have. If these are adapters (ft.lora), "
        "evaluate the step's own loss, ft.eval_step(step.loss), or merge them into the weights, "
        "ft.adapters.merge(step, state)"
    )


def _criterion_name(criterion: Criterion | None, module: nn.Module) -> str:
    name = getattr(criterion, "__name__", type(criterion).__name__) if criterion else "hf_loss"
    return f"{'loss' if name == '<lambda>' else name}({type(module).__name__})"
