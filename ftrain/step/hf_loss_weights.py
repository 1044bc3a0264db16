"""The weight of the loss that a model of transformers computes: the number of labels over which it takes the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Weigh: TypeAlias = Callable[[Mapping[str, Any]], Tensor | None]
"""``batch -> weight``, a 0-d tensor; None if the loss is not a mean over labels."""

Rule: TypeAlias = Callable[[Any, Mapping[str, Any]], Tensor | None]
"""``(configuration of the model, batch) -> weight``, as `Weigh`."""

IGNORED = -100
"""The label that transformers ignores."""

LABELS = ("labels", "start_positions", "end_positions")
"""The names of labels in the batches of transformers."""


def _tokens(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    labels = _integers(batch, "labels")
    return None if labels is None else _count(labels)


def _next_tokens(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    shifted, labels = _integers(batch, "shift_labels"), _integers(batch, "labels")
    if shifted is not None:
        return _count(shifted)
    return None if labels is None else _count(labels[..., 1:])


def _generated(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    configs = (config, getattr(config, "text_config", None))
    has_encoder = any(getattr(each, "is_encoder_decoder", False) for each in configs)
    return _tokens(config, batch) if has_encoder else _next_tokens(config, batch)


def _classified(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        return None
    # Without a problem type, transformers takes integers as classes and all other labels as numbers of a regression.
    are_classes = labels.dtype in (torch.int64, torch.int32) and config.num_labels > 1
    if config.problem_type == "single_label_classification" or (config.problem_type is None and are_classes):
        return _count(labels)
    return _size(labels, labels.numel())


def _pixels(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    labels = _integers(batch, "labels")
    if labels is None:
        return None
    if config.num_labels > 1:
        return _count(labels, config.semantic_loss_ignore_index)
    # With a single class it is a mean over all pixels, in which ignored pixels count as 0.
    return _size(labels, labels.numel())


def _answers(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    start, end = _integers(batch, "start_positions"), _integers(batch, "end_positions")
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    if start is None or end is None or not isinstance(tokens, Tensor):
        return None
    # Positions after the text are ignored. Half of the loss is a mean over starts, half over ends.
    return ((start < tokens.shape[1]).sum() + (end < tokens.shape[1]).sum()) / 2


def _utterances(config: Any, batch: Mapping[str, Any]) -> Tensor | None:
    labels = _integers(batch, "labels")
    return None if labels is None else _size(labels, len(labels))


def _integers(batch: Mapping[str, Any], name: str) -> Tensor | None:
    labels = batch.get(name)
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def _count(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    return (labels != ignored).sum()


def _size(labels: Tensor, size: int) -> Tensor:
    return labels.new_full((), size, dtype=torch.int64)


LOSS_TYPES: Mapping[str, Rule] = {
    "ForCausalLM": _next_tokens,
    "ForMaskedLM": _tokens,
    "ForTokenClassification": _tokens,
    "ForMultipleChoice": _tokens,
    "ForNextSentencePrediction": _tokens,
    "ForConditionalGeneration": _generated,
    "ForSequenceClassification": _classified,
    "ForImageClassification": _classified,
    "ForVideoClassification": _classified,
    "ForAudioClassification": _classified,
    "ForQuestionAnswering": _answers,
    "ForSemanticSegmentation": _pixels,
    "ForCTC": _utterances,
}
"""``model.loss_type``, which is the end of the name of the model's class -> rule."""

CLASSES: Mapping[str, Rule | None] = {
    **dict.fromkeys(
        (
            "BertLMHeadModel",
            "BertGenerationDecoder",
            "CTRLLMHeadModel",
            "GPT2LMHeadModel",
            "OpenAIGPTLMHeadModel",
            "ReformerModelWithLMHead",
        ),
        _next_tokens,
    ),
    # They do not shift their labels.
    **dict.fromkeys(
        (
            "BartForCausalLM",
            "BigBirdPegasusForCausalLM",
            "BlenderbotForCausalLM",
            "BlenderbotSmallForCausalLM",
            "CpmAntForCausalLM",
            "EncoderDecoderModel",
            "FlaubertWithLMHeadModel",
            "MBartForCausalLM",
            "MarianForCausalLM",
            "MarianMTModel",
            "MvpForCausalLM",
            "PLBartForCausalLM",
            "PegasusForCausalLM",
            "SpeechEncoderDecoderModel",
            "TrOCRForCausalLM",
            "VisionEncoderDecoderModel",
            "WhisperForCausalLM",
            "XLMWithLMHeadModel",
            "XLNetLMHeadModel",
        ),
        _tokens,
    ),
    # Their losses are sums, or means over something other than the labels that are not -100.
    **dict.fromkeys(
        (
            "BioGptForTokenClassification",
            "BlipForQuestionAnswering",
            "BrosForTokenClassification",
            "BrosSpadeEEForTokenClassification",
            "BrosSpadeELForTokenClassification",
            "FlaubertForQuestionAnswering",
            "GraniteDoclingForConditionalGeneration",
            "GraniteSpeechForConditionalGeneration",
            "GraniteSpeechPlusForConditionalGeneration",
            "HiggsAudioV2ForConditionalGeneration",
            "LayoutLMv3ForQuestionAnswering",
            "LukeForMaskedLM",
            "LxmertForQuestionAnswering",
            "MraForTokenClassification",
            "MusicgenForCausalLM",
            "MusicgenForConditionalGeneration",
            "MusicgenMelodyForCausalLM",
            "MusicgenMelodyForConditionalGeneration",
            "ProphetNetForCausalLM",
            "ProphetNetForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
            "TapasForQuestionAnswering",
            "VibeVoiceForConditionalGeneration",
            "ViltForQuestionAnswering",
            "VisualBertForQuestionAnswering",
            "XLMForQuestionAnswering",
            "XLMRobertaXLForTokenClassification",
            "XLNetForQuestionAnswering",
            "YosoForTokenClassification",
        )
    ),
}
"""Classes of transformers whose loss type is missing, or is not what they compute."""


def weigher(module: nn.Module) -> Weigh | None:
    """Return the function that weights the loss of a model, or None if the loss is not known to be a mean over labels.

    It depends on the ``loss_type`` of the model, which models of transformers have, its class and its configuration.
    """
    # A model of peft wraps another one.
    base = getattr(module, "get_base_model", None)
    model: Any = base() if callable(base) else module
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "loss_type") or _is_replaced(model):
        return None
    rule = _rule(model, config)
    return None if rule is None else partial(rule, config)


def _rule(model: Any, config: Any) -> Rule | None:
    name = type(model).__name__
    if name in CLASSES:
        return CLASSES[name]
    loss_type = model.loss_type or next((ending for ending in LOSS_TYPES if name.endswith(ending)), "")
    is_sum = loss_type == "ForCTC" and config.ctc_loss_reduction != "mean"
    return None if is_sum else LOSS_TYPES.get(loss_type)


def _is_replaced(model: Any) -> bool:
    """Whether the user replaced the loss function."""
    # Without a loss type, transformers warns when the function is read.
    return bool(model.loss_type) and model.loss_function.__module__.split(".")[0] != "transformers"


def with_any_label(batch: Mapping[str, Any], weight: Tensor) -> Mapping[str, Any]:
    """Return the batch with all labels set to 0 if the weight is 0, so that the loss and its gradient are finite."""
    new_labels = {}
    for name in LABELS:
        labels = _integers(batch, name)
        if labels is not None:
            new_labels[name] = labels.masked_fill(weight == 0, 0)
    return {**batch, **new_labels}
