"""The loss that a model of transformers computes itself, weighted by the labels that count."""

import logging
import math
import warnings

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from ftrain.step.hf_loss_weights import CLASSES, LOSS_TYPES
from ftrain.training.oom_retry import split_step

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()

ROWS, LENGTH, VOCABULARY = 4, 6, 17
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 4,
    "patch_size": 2,
}


def ids(seed=0, high=VOCABULARY, shape=(ROWS, LENGTH)):
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def uneven(labels, ignored=-100):
    """Keep 6, 3, 2 and 0 labels of the four rows; of the third row, one is left once labels are shifted by one."""
    kept = torch.tensor([LENGTH, LENGTH // 2, 2, 0])
    return labels.masked_fill(torch.arange(LENGTH) >= kept[:, None], ignored)


def text(**labels):
    return {"input_ids": ids(), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64), **labels}


def images(channels=3, size=4):
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bert(class_name, **options):
    return lambda: getattr(transformers, class_name)(transformers.BertConfig(**BERT, **options))


def llava():
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=8)
    language = transformers.LlamaConfig(**LLAMA)
    config = transformers.LlavaConfig(vision_config=vision, text_config=language, image_token_id=VOCABULARY - 1)
    return transformers.LlavaForConditionalGeneration(config)


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        patch_sizes=[3],
        strides=[2],
        num_attention_heads=[2],
        decoder_hidden_size=8,
        num_labels=3,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
    )
    model = transformers.SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = nn.Identity()
    return model


def wav2vec2(**options):
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        conv_dim=(8,),
        conv_kernel=(4,),
        conv_stride=(2,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        **options,
    )
    return transformers.Wav2Vec2ForCTC(config)


MODELS = {
    "ForCausalLM": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
        lambda: text(labels=uneven(ids(1))),
    ),
    "GPT2LMHeadModel": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=8,
                n_layer=1,
                n_head=2,
                n_positions=12,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        lambda: text(labels=uneven(ids(1))),
    ),
    "BartForCausalLM": (
        lambda: transformers.BartForCausalLM(
            transformers.BartConfig(
                vocab_size=VOCABULARY,
                d_model=8,
                decoder_layers=1,
                decoder_attention_heads=2,
                decoder_ffn_dim=8,
                max_position_embeddings=12,
                dropout=0.0,
            )
        ),
        lambda: text(labels=uneven(ids(1))),
    ),
    "XLNetLMHeadModel": (
        lambda: transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=8, n_layer=1, n_head=2, d_inner=8, dropout=0.0)
        ),
        lambda: text(labels=uneven(ids(1))),
    ),
    "ForMaskedLM": (bert("BertForMaskedLM"), lambda: text(labels=uneven(ids(1)))),
    "ForTokenClassification": (
        bert("BertForTokenClassification", num_labels=3),
        lambda: text(labels=uneven(ids(1, high=3))),
    ),
    "ForMultipleChoice": (
        bert("BertForMultipleChoice"),
        lambda: {"input_ids": ids(shape=(ROWS, 2, LENGTH)), "labels": torch.tensor([0, 1, 1, -100])},
    ),
    "ForNextSentencePrediction": (
        bert("BertForNextSentencePrediction"),
        lambda: text(labels=torch.tensor([0, 1, 1, -100])),
    ),
    "ForSequenceClassification": (
        bert("BertForSequenceClassification", num_labels=3),
        lambda: text(labels=torch.tensor([0, 2, 1, -100])),
    ),
    "regression": (
        bert("BertForSequenceClassification", num_labels=1),
        lambda: text(labels=torch.randn(ROWS, dtype=torch.float64)),
    ),
    "several labels": (
        bert("BertForSequenceClassification", num_labels=3),
        lambda: text(labels=torch.rand(ROWS, 3, dtype=torch.float64)),
    ),
    "ForQuestionAnswering": (
        bert("BertForQuestionAnswering"),
        lambda: text(
            start_positions=torch.tensor([1, 0, LENGTH, LENGTH]), end_positions=torch.tensor([2, 1, 99, LENGTH])
        ),
    ),
    "ForConditionalGeneration": (llava, lambda: text(labels=uneven(ids(1)))),
    "ForConditionalGeneration with an encoder": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
        lambda: text(labels=uneven(ids(1))),
    ),
    "ForImageClassification": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3)),
        lambda: {"pixel_values": images(), "labels": torch.tensor([0, 2, 1, -100])},
    ),
    "ForVideoClassification": (
        lambda: transformers.VideoMAEForVideoClassification(
            transformers.VideoMAEConfig(**VISION, num_frames=2, num_labels=3)
        ),
        lambda: {"pixel_values": images()[:, None].expand(-1, 2, -1, -1, -1), "labels": torch.tensor([0, 2, 1, -100])},
    ),
    "ForAudioClassification": (
        lambda: transformers.ASTForAudioClassification(
            transformers.ASTConfig(
                **{**VISION, "image_size": None},
                frequency_stride=2,
                time_stride=2,
                max_length=4,
                num_mel_bins=4,
                num_labels=3,
            )
        ),
        lambda: {"input_values": images()[:, 0], "labels": torch.tensor([0, 2, 1, -100])},
    ),
    "ForSemanticSegmentation": (
        segformer,
        lambda: {"pixel_values": images(size=LENGTH), "labels": uneven(ids(1, 3), 255)[:, None].expand(-1, LENGTH, -1)},
    ),
    "ForCTC": (
        lambda: wav2vec2(ctc_loss_reduction="mean"),
        lambda: {
            "input_values": torch.randn(ROWS, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
            "labels": uneven(ids(1)),
        },
    ),
}


def make(build):
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Deprecations inside of transformers and what it imports are not ours to fix.
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return build().double()


def trained(model, batch, *wrappers):
    step = ft.compose(ft.train_step(ft.from_module(model), ft.optim.sgd(0.1), allow_unused=True), *wrappers)
    return step(step.init(), batch)


def test_every_loss_type_has_a_model():
    assert set(LOSS_TYPES) <= set(MODELS)


def test_the_classes_with_a_known_loss_exist_in_transformers():
    assert {*CLASSES} <= {*dir(transformers)}


def warnings_of(caplog):
    """Return the records of ftrain only: packages that transformers imports log warnings of their own."""
    return [record for record in caplog.records if record.name.split(".")[0] == "ftrain"]


@pytest.mark.parametrize("name", MODELS)
def test_microbatches_with_uneven_labels_are_the_full_batch(name, caplog):
    build, batch = MODELS[name]
    model, batch = make(build), batch()
    with caplog.at_level(logging.WARNING, "ftrain"):
        full, metrics = trained(model, batch)
    assert not warnings_of(caplog)
    assert float(metrics["loss"]) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)
    state, metrics_of_pieces = trained(model, batch, ft.accumulate(ROWS))
    assert float(metrics_of_pieces["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    # Some models cast their logits to float32 for the loss.
    torch.testing.assert_close(state.params, full.params, rtol=1e-6, atol=1e-7)


def xlnet():
    sizes = {"vocab_size": VOCABULARY, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}
    return transformers.XLNetForQuestionAnswering(transformers.XLNetConfig(**sizes, dropout=0.0, end_n_top=2))


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
    return ids(1).masked_fill(torch.arange(LENGTH) > torch.arange(ROWS)[:, None], -100)


PLAIN = {
    "two losses": (
        bert("BertForPreTraining"),
        lambda: text(labels=uneven(ids(1), 0), next_sentence_label=torch.tensor([0, 1, 1, 0])),
    ),
    "sum": (lambda: wav2vec2(ctc_loss_reduction="sum"), MODELS["ForCTC"][1]),
    "replaced": (lambda: replaced(bert("BertForMaskedLM")()), lambda: text(labels=ids(1))),
    "XLNetForQuestionAnswering": (
        xlnet,
        lambda: text(start_positions=torch.tensor([1, 0, 2, 3]), end_positions=torch.tensor([2, 1, 3, 5])),
    ),
    "ProphetNetForConditionalGeneration": (prophetnet, lambda: text(labels=growing_labels())),
    "LukeForMaskedLM": (luke, lambda: text(labels=growing_labels(), **entities())),
    "none of transformers": (lambda: HandWritten(), lambda: {"labels": ids(1)}),
}


class HandWritten(nn.Module):
    """Divides its loss by the number of labels: the loss and the gradients are NaN if there are none."""

    def __init__(self, **declared):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(LENGTH, VOCABULARY))
        vars(self).update(declared)

    def forward(self, labels):
        kept = labels != -100
        losses = -self.logits.log_softmax(-1).expand(len(labels), -1, -1).gather(2, labels.clamp_min(0)[..., None])
        return transformers.modeling_outputs.MaskedLMOutput(loss=(losses[..., 0] * kept).sum() / kept.sum())


def declared():
    """Return a model outside transformers that names its loss as the models of transformers do."""
    function = lambda *inputs: None  # noqa: E731
    function.__module__ = "transformers.loss"
    return HandWritten(loss_type="ForMaskedLM", loss_function=function, config=transformers.PretrainedConfig())


def replaced(model):
    model.loss_function = lambda *inputs, **options: None
    return model


@pytest.mark.parametrize("name", PLAIN)
def test_a_loss_that_is_not_known_is_a_plain_number_and_logged_once(name, caplog):
    build, batch = PLAIN[name]
    model = make(build).float()
    batch = {key: value.float() if value.is_floating_point() else value for key, value in batch().items()}
    with caplog.at_level(logging.WARNING, "ftrain"):
        _, metrics = trained(model, batch, ft.accumulate(ROWS))
    (record,) = warnings_of(caplog)
    assert f"loss of {type(model).__name__} is not known" in record.message
    assert "returns a Mean" in record.message
    rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(ROWS)]
    expected = sum(float(model.train()(**row).loss.detach()) for row in rows) / ROWS
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-6)


def mixtral():
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    config = transformers.MixtralConfig(**LLAMA, **sizes, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def switch():
    sparse = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(**{**T5, **sparse}, router_jitter_noise=0.0)
    return transformers.SwitchTransformersForConditionalGeneration(config)


@pytest.mark.parametrize(("build", "first"), [(mixtral, 1), (switch, 0)])
def test_a_loss_with_that_of_a_router_is_weighted_by_the_labels(build, first, caplog):
    model = make(build).float()  # The routers multiply in float32.
    batch = text(labels=growing_labels(), output_router_logits=True)
    batch["labels"][0] = ids(1, shape=(LENGTH,))
    with caplog.at_level(logging.WARNING, "ftrain"):
        _, metrics = trained(model, batch, ft.accumulate(ROWS))
    assert not warnings_of(caplog)
    weights = (batch["labels"][:, first:] != -100).sum(1)
    assert len(weights.unique()) > 2
    outputs = []
    for row in range(ROWS):
        inputs = {key: value if value is True else value[row : row + 1] for key, value in batch.items()}
        outputs.append(model.train()(**inputs))
    for output in outputs:
        assert float(sum(output[name] for name in output if "aux_loss" in name).detach()) > 0
    losses = torch.stack([output.loss.detach() for output in outputs])
    expected = (losses * weights).sum() / weights.sum()
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)


NOTHING = {"labels": torch.full((2, LENGTH), -100)}
HALF = {"labels": torch.cat([ids(1, shape=(2, LENGTH)), NOTHING["labels"]])}
SOME = {"labels": HALF["labels"][:2]}
COMPILED = [ft.compiled(lowering=lowering, backend="eager") for lowering in ("whole", "split")]


NAMES = ["plain", "skip_nonfinite", "fp16", "update_in_backward", "whole", "split"]


@pytest.mark.parametrize("name", ["bert", "one token", *NAMES])
def test_a_batch_without_a_label_changes_nothing(name):
    wrappers = {
        # It raises an error at the first step whose loss or gradient is not finite.
        **dict.fromkeys(("skip_nonfinite", "one token"), ft.skip_nonfinite(1)),
        "fp16": ft.with_amp("fp16"),
        "update_in_backward": ft.update_in_backward(),
        **dict(zip(("whole", "split"), COMPILED, strict=True)),
    }
    model, inputs = make(declared).float(), {}
    if name == "bert":
        model, inputs = make(MODELS["ForMaskedLM"][0]), {"input_ids": ids(shape=(2, LENGTH))}
    nothing = {**NOTHING, **inputs}
    if name == "one token":  # A causal model does not predict the first token, so that its label does not count.
        model, inputs = make(MODELS["GPT2LMHeadModel"][0]), {"input_ids": ids(shape=(2, LENGTH))}
        nothing = {"input_ids": ids(shape=(2, 1)), "labels": ids(shape=(2, 1))}
    step = ft.train_step(ft.from_module(model), ft.optim.sgd(0.1), allow_unused=True)
    step = wrappers[name](step) if name in wrappers else step
    state = step.init()
    after, metrics = step(state, nothing)
    for name, leaf in state.params.items():
        assert torch.equal(after.params[name], leaf), name
    assert torch.isnan(metrics["loss"])
    assert all(int(slot.get("skipped", 0)) == 0 for slot in after.slots.values() if isinstance(slot, dict))
    after, metrics = step(state, {**SOME, **inputs})
    assert torch.isfinite(metrics["loss"])
    assert any(not torch.equal(after.params[name], leaf) for name, leaf in state.params.items())


LAST, FIRST = (0, 1, 2, 3), (2, 3, 0, 1)


@pytest.mark.parametrize(
    ("order", "wrappers"),
    [
        (FIRST, ()),
        (LAST, ()),
        (LAST, (ft.skip_nonfinite(1),)),
        (FIRST, (ft.clip(100.0), *COMPILED[:1])),
        (LAST, COMPILED[1:]),
    ],
    ids=["first", "last", "skip_nonfinite", "whole", "split"],
)
def test_a_microbatch_without_a_label_leaves_the_others_as_they_are(order, wrappers):
    model, batch = make(declared), {"labels": HALF["labels"][list(order)]}
    expected, expected_metrics = trained(model, SOME)
    state, metrics = trained(model, batch, ft.accumulate(2), *wrappers)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-12, atol=0)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-12)


def test_an_evaluation_leaves_out_batches_without_a_label():
    loss = ft.from_module(make(declared))
    step, state = ft.eval_step(loss), ft.train_step(loss, ft.optim.sgd(0.1)).init()
    expected = ft.evaluate(step, state, [SOME])["loss"]
    assert ft.evaluate(step, state, [NOTHING, SOME, NOTHING])["loss"] == pytest.approx(expected, rel=1e-12)
    with pytest.warns(UserWarning, match="mean of loss is NaN.*no labels that count"):
        assert math.isnan(ft.evaluate(step, state, [NOTHING])["loss"])


def test_a_batch_split_for_memory_leaves_out_pieces_without_a_label():
    model = make(declared)
    step = ft.train_step(ft.from_module(model), ft.optim.sgd(0.1))
    expected, _ = step(step.init(), SOME)
    for batch in (HALF, {"labels": HALF["labels"][:3]}):
        state, _ = split_step(step, 2)(step.init(), batch)
        torch.testing.assert_close(state.params, expected.params, rtol=1e-12, atol=0)


def test_the_labels_of_a_loss_in_float16_are_counted_exactly():
    """The largest number of float16 is 65,504."""

    class Narrow(nn.Module):
        loss_type, config = "ForMaskedLM", transformers.PretrainedConfig()
        loss_function = staticmethod(declared().loss_function)

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, labels):
            return transformers.modeling_outputs.MaskedLMOutput(loss=self.scale.to(torch.float16))

    loss = ft.from_module(Narrow())
    mean, _, _ = loss.fn(dict(loss.module.named_parameters()), {"labels": torch.ones(70_001)}, rng=None, buffers={})
    assert mean.plain
    labels = torch.ones(70_001, dtype=torch.int64)
    mean, _, _ = loss.fn(dict(loss.module.named_parameters()), {"labels": labels}, rng=None, buffers={})
    assert (float(mean.weight), float(mean.value.detach())) == (70_001.0, 2.0)


def test_a_batch_with_num_items_in_batch_is_refused():
    # The model divides by it, so that the loss of a microbatch is no mean, and weighting by labels would be wrong.
    model, batch = make(MODELS["ForCausalLM"][0]), MODELS["ForCausalLM"][1]()
    with pytest.raises(LossError, match=r"from_module: the batch has num_items_in_batch, .* remove it"):
        trained(model, {**batch, "num_items_in_batch": torch.tensor(9)})


def test_a_model_that_masks_its_input_in_place_does_not_change_the_batch():
    config = transformers.WhisperConfig(
        **{f"{part}_{each}": 1 for part in ("encoder", "decoder") for each in ("layers", "attention_heads")},
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        d_model=8,
        vocab_size=VOCABULARY,
        max_source_positions=8,
        max_target_positions=8,
        num_mel_bins=4,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        apply_spec_augment=True,
        mask_time_prob=0.5,
        mask_time_length=2,
    )
    step = ft.train_step(ft.from_module(transformers.WhisperForConditionalGeneration(config)), ft.optim.adamw(1e-3))
    spectrogram = torch.randn(ROWS, 4, 16)
    batch = {"input_features": spectrogram.clone(), "labels": torch.randint(1, VOCABULARY, (ROWS, LENGTH))}
    _, metrics = step(step.init(), batch)
    assert metrics["loss"].isfinite()
    assert torch.equal(batch["input_features"], spectrogram)
