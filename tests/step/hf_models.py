"""Small models of transformers without dropout, and batches whose rows have different numbers of labels."""

import warnings

import pytest
import torch
from torch import nn

import ftrain as ft

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()

ROWS, LENGTH, VOCABULARY = 4, 6, 17
IGNORED = -100

# Options of the configurations.
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
XLNET = {"vocab_size": VOCABULARY, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8, "dropout": 0.0}
VISION = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "image_size": 4,
    "patch_size": 2,
}


def bert(class_name, **options):
    """Return a function that builds a model of BERT."""
    return lambda: getattr(transformers, class_name)(transformers.BertConfig(**BERT, **options))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def gpt2():
    config = transformers.GPT2Config(
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
    return transformers.GPT2LMHeadModel(config)


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=8,
        max_position_embeddings=12,
        dropout=0.0,
    )
    return transformers.BartForCausalLM(config)


def xlnet():
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**XLNET))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))


def llava():
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=8)
    language = transformers.LlamaConfig(**LLAMA)
    config = transformers.LlavaConfig(vision_config=vision, text_config=language, image_token_id=VOCABULARY - 1)
    return transformers.LlavaForConditionalGeneration(config)


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3))


def videomae():
    config = transformers.VideoMAEConfig(**VISION, num_frames=2, num_labels=3)
    return transformers.VideoMAEForVideoClassification(config)


def audio_spectrogram_transformer():
    options = {"frequency_stride": 2, "time_stride": 2, "max_length": 4, "num_mel_bins": 4, "num_labels": 3}
    config = transformers.ASTConfig(**{**VISION, "image_size": None}, **options)
    return transformers.ASTForAudioClassification(config)


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
    # Its statistics would be those of each microbatch.
    model.decode_head.batch_norm = nn.Identity()
    return model


def wav2vec2(ctc_loss_reduction="mean"):
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
        ctc_loss_reduction=ctc_loss_reduction,
    )
    return transformers.Wav2Vec2ForCTC(config)


def ids(seed=0, high=VOCABULARY, shape=(ROWS, LENGTH)):
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def uneven(labels, ignored=IGNORED):
    """Keep 6, 3, 2 and 0 labels of the four rows; of the third row, one is left once labels are shifted by one."""
    kept = torch.tensor([LENGTH, LENGTH // 2, 2, 0])
    return labels.masked_fill(torch.arange(LENGTH) >= kept[:, None], ignored)


def text(**labels):
    return {"input_ids": ids(), "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64), **labels}


def text_with_token_labels():
    return text(labels=uneven(ids(1)))


def images(channels=3, size=4):
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def speech():
    waves = torch.randn(ROWS, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"input_values": waves, "labels": uneven(ids(1))}


MODELS = {
    "ForCausalLM": (llama, text_with_token_labels),
    "GPT2LMHeadModel": (gpt2, text_with_token_labels),
    "BartForCausalLM": (bart, text_with_token_labels),
    "XLNetLMHeadModel": (xlnet, text_with_token_labels),
    "ForMaskedLM": (bert("BertForMaskedLM"), text_with_token_labels),
    "ForTokenClassification": (
        bert("BertForTokenClassification", num_labels=3),
        lambda: text(labels=uneven(ids(1, high=3))),
    ),
    "ForMultipleChoice": (
        bert("BertForMultipleChoice"),
        lambda: {"input_ids": ids(shape=(ROWS, 2, LENGTH)), "labels": torch.tensor([0, 1, 1, IGNORED])},
    ),
    "ForNextSentencePrediction": (
        bert("BertForNextSentencePrediction"),
        lambda: text(labels=torch.tensor([0, 1, 1, IGNORED])),
    ),
    "ForSequenceClassification": (
        bert("BertForSequenceClassification", num_labels=3),
        lambda: text(labels=torch.tensor([0, 2, 1, IGNORED])),
    ),
    "regression": (
        bert("BertForSequenceClassification", num_labels=1),
        lambda: text(labels=torch.randn(ROWS, dtype=torch.float64)),
    ),
    "several labels": (
        bert("BertForSequenceClassification", num_labels=3),
        lambda: text(labels=torch.rand(ROWS, 3, dtype=torch.float64)),
    ),
    # Positions after the text are ignored.
    "ForQuestionAnswering": (
        bert("BertForQuestionAnswering"),
        lambda: text(
            start_positions=torch.tensor([1, 0, LENGTH, LENGTH]), end_positions=torch.tensor([2, 1, 99, LENGTH])
        ),
    ),
    "ForConditionalGeneration": (llava, text_with_token_labels),
    "ForConditionalGeneration with an encoder": (t5, text_with_token_labels),
    "ForImageClassification": (
        vit,
        lambda: {"pixel_values": images(), "labels": torch.tensor([0, 2, 1, IGNORED])},
    ),
    "ForVideoClassification": (
        videomae,
        lambda: {
            "pixel_values": images()[:, None].expand(-1, 2, -1, -1, -1),
            "labels": torch.tensor([0, 2, 1, IGNORED]),
        },
    ),
    "ForAudioClassification": (
        audio_spectrogram_transformer,
        lambda: {"input_values": images()[:, 0], "labels": torch.tensor([0, 2, 1, IGNORED])},
    ),
    "ForSemanticSegmentation": (
        segformer,
        lambda: {"pixel_values": images(size=LENGTH), "labels": uneven(ids(1, 3), 255)[:, None].expand(-1, LENGTH, -1)},
    ),
    "ForCTC": (wav2vec2, speech),
}
"""Loss type or class -> function that builds a model, function that makes a batch."""


class HandWritten(nn.Module):
    """Divides its loss by the number of labels: the loss and the gradients are NaN if there are none."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(LENGTH, VOCABULARY))

    def forward(self, labels):
        is_kept = labels != IGNORED
        log_probs = self.logits.log_softmax(-1).expand(len(labels), -1, -1)
        losses = -log_probs.gather(2, labels.clamp_min(0)[..., None])[..., 0]
        return transformers.modeling_outputs.MaskedLMOutput(loss=(losses * is_kept).sum() / is_kept.sum())


def declare_loss(model):
    """Return a model outside transformers with the attributes by which models of transformers declare their loss."""
    model.config, model.loss_type = transformers.PretrainedConfig(), "ForMaskedLM"
    model.loss_function = lambda *inputs: None
    model.loss_function.__module__ = "transformers.loss"
    return model


def hand_written_with_declared_loss():
    return declare_loss(HandWritten())


def build_model(build):
    """Return a model in float64, with the same weights each time."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Deprecations inside of transformers and what it imports are not ours to fix.
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return build().double()


def run_step(model, batch, *wrappers):
    """Return the state and the metrics after a first step."""
    step = ft.compose(ft.train_step(ft.from_module(model), ft.optim.sgd(0.1), allow_unused=True), *wrappers)
    return step(step.init(), batch)
