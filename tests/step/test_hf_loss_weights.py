"""The loss that a model of transformers computes itself, weighted by the labels that count."""

import logging

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from ftrain.step.hf_loss_weights import CLASSES, LOSS_TYPES
from tests.step.hf_models import (
    BERT,
    IGNORED,
    LENGTH,
    LLAMA,
    MODELS,
    ROWS,
    T5,
    VOCABULARY,
    XLNET,
    HandWritten,
    bert,
    build_model,
    declare_loss,
    ids,
    llama,
    run_step,
    speech,
    text,
    text_with_token_labels,
    transformers,
    uneven,
    wav2vec2,
)


def test_every_loss_type_has_a_model():
    assert set(LOSS_TYPES) <= set(MODELS)


def test_the_classes_with_a_known_loss_exist_in_transformers():
    assert set(CLASSES) <= set(dir(transformers))


def warnings_of(caplog):
    """Return the records of ftrain only: packages that transformers imports log warnings of their own."""
    return [record for record in caplog.records if record.name.split(".")[0] == "ftrain"]


@pytest.mark.parametrize("name", MODELS)
def test_microbatches_with_uneven_labels_are_the_full_batch(name, caplog):
    build, make_batch = MODELS[name]
    model, batch = build_model(build), make_batch()
    with caplog.at_level(logging.WARNING, "ftrain"):
        expected, expected_metrics = run_step(model, batch)
    assert not warnings_of(caplog)
    assert float(expected_metrics["loss"]) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
    state, metrics = run_step(model, batch, ft.accumulate(ROWS))
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-6)
    # Some models cast their logits to float32 for the loss.
    torch.testing.assert_close(state.params, expected.params, rtol=1e-6, atol=1e-7)


def xlnet_for_answers():
    return transformers.XLNetForQuestionAnswering(transformers.XLNetConfig(**XLNET, end_n_top=2))


def prophetnet():
    sizes = {f"{part}_ffn_dim": 8 for part in ("encoder", "decoder")}
    sizes |= {f"num_{part}_layers": 1 for part in ("encoder", "decoder")}
    sizes |= {f"num_{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    no_dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    tokens = {"vocab_size": VOCABULARY, "max_position_embeddings": 12, "decoder_start_token_id": 0}
    config = transformers.ProphetNetConfig(**sizes, **no_dropout, **tokens, hidden_size=8)
    return transformers.ProphetNetForConditionalGeneration(config)


def luke():
    config = transformers.LukeConfig(**BERT, entity_vocab_size=VOCABULARY, entity_emb_size=8)
    return transformers.LukeForMaskedLM(config)


def entities():
    return {
        "entity_ids": ids(2, shape=(ROWS, 2)),
        "entity_attention_mask": torch.ones(ROWS, 2, dtype=torch.int64),
        "entity_position_ids": ids(3, LENGTH, shape=(ROWS, 2, 3)),
        "entity_labels": ids(4, shape=(ROWS, 2)),
    }


def growing_labels():
    """Return labels of which one counts in the first row, and one more in each row after it."""
    return ids(1).masked_fill(torch.arange(LENGTH) > torch.arange(ROWS)[:, None], IGNORED)


def bert_with_a_replaced_loss():
    model = bert("BertForMaskedLM")()
    model.loss_function = lambda *inputs, **options: None
    return model


UNKNOWN_LOSSES = {
    "two losses": (
        bert("BertForPreTraining"),
        lambda: text(labels=uneven(ids(1), 0), next_sentence_label=torch.tensor([0, 1, 1, 0])),
    ),
    "sum": (lambda: wav2vec2(ctc_loss_reduction="sum"), speech),
    "replaced": (bert_with_a_replaced_loss, lambda: text(labels=ids(1))),
    "XLNetForQuestionAnswering": (
        xlnet_for_answers,
        lambda: text(start_positions=torch.tensor([1, 0, 2, 3]), end_positions=torch.tensor([2, 1, 3, 5])),
    ),
    "ProphetNetForConditionalGeneration": (prophetnet, lambda: text(labels=growing_labels())),
    "LukeForMaskedLM": (luke, lambda: text(labels=growing_labels(), **entities())),
    "not of transformers": (HandWritten, lambda: {"labels": ids(1)}),
}


def rows_of(batch):
    """Return a batch for each row; a value that is not a tensor is in all of them."""
    return [
        {name: value[row : row + 1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for row in range(ROWS)
    ]


@pytest.mark.parametrize("name", UNKNOWN_LOSSES)
def test_an_unknown_loss_is_a_mean_over_microbatches_and_logged_once(name, caplog):
    build, make_batch = UNKNOWN_LOSSES[name]
    model, batch = build_model(build).float(), ft.tree.cast(make_batch(), torch.float32)
    with caplog.at_level(logging.WARNING, "ftrain"):
        _, metrics = run_step(model, batch, ft.accumulate(ROWS))
    (record,) = warnings_of(caplog)
    assert f"loss of {type(model).__name__} is not known" in record.message
    assert "returns a Mean" in record.message
    expected = sum(float(model.train()(**row).loss.detach()) for row in rows_of(batch)) / ROWS
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)


def mixtral():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    config = transformers.MixtralConfig(**LLAMA, **sizes, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def switch_transformers():
    sparse = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(**{**T5, **sparse}, router_jitter_noise=0.0)
    return transformers.SwitchTransformersForConditionalGeneration(config)


# Mixtral, a causal model, does not count the label of the first token.
@pytest.mark.parametrize(("build", "first_label"), [(mixtral, 1), (switch_transformers, 0)])
def test_a_loss_with_that_of_a_router_is_weighted_by_the_labels(build, first_label, caplog):
    model = build_model(build).float()  # The routers multiply in float32.
    batch = text(labels=growing_labels(), output_router_logits=True)
    batch["labels"][0] = ids(1, shape=(LENGTH,))
    with caplog.at_level(logging.WARNING, "ftrain"):
        _, metrics = run_step(model, batch, ft.accumulate(ROWS))
    assert not warnings_of(caplog)
    weights = (batch["labels"][:, first_label:] != IGNORED).sum(1)
    assert len(weights.unique()) > 2
    outputs = [model.train()(**row) for row in rows_of(batch)]
    for output in outputs:
        assert float(sum(output[name] for name in output if "aux_loss" in name).detach()) > 0
    losses = torch.stack([output.loss.detach() for output in outputs])
    expected = (losses * weights).sum() / weights.sum()
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)


class LossInFloat16(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, labels):
        return transformers.modeling_outputs.MaskedLMOutput(loss=self.scale.to(torch.float16))


def mean_of(module, labels):
    """Return the Mean that the loss of a module returns."""
    params = dict(module.named_parameters())
    mean, _, _ = ft.from_module(module).fn(params, {"labels": labels}, rng=None, buffers={})
    return mean


def test_the_labels_of_a_loss_in_float16_are_counted_exactly():
    # More than 65,504, the largest number of float16.
    labels = torch.ones(70_001, dtype=torch.int64)
    mean = mean_of(declare_loss(LossInFloat16()), labels)
    assert (float(mean.weight), float(mean.value.detach())) == (70_001.0, 2.0)


def test_a_loss_of_labels_that_are_no_integers_is_a_plain_number():
    assert mean_of(declare_loss(LossInFloat16()), torch.ones(5)).plain


def test_a_batch_with_num_items_in_batch_is_refused():
    # The model divides by it, so that the loss of a microbatch is no mean, and weighting by labels would be wrong.
    model, batch = build_model(llama), text_with_token_labels()
    with pytest.raises(LossError, match=r"from_module: the batch has num_items_in_batch, .* remove it"):
        run_step(model, {**batch, "num_items_in_batch": torch.tensor(9)})
