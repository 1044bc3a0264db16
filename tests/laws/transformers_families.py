"""Small models of many families of transformers, a batch for each, and the lowering of a step of each."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def causal(config, model, **options):
    """Return a model by the names of its classes, with the sizes of `SMALL` and these options of its config."""
    config = getattr(transformers, config)(**{**SMALL, **options})
    return getattr(transformers, model)(config)


def zeros(*names):
    """Return options of a config that are 0, such as its dropout probabilities."""
    return dict.fromkeys(names, 0.0)


def of_tokens(length=8, **more):
    tokens = torch.randint(3, 40, (2, length))
    return {"input_ids": tokens, "labels": tokens, **more}


def bart():
    sizes = {f"{part}_{count}": 1 for part in ("encoder", "decoder") for count in ("layers", "attention_heads")}
    sizes |= {f"{part}_ffn_dim": 24 for part in ("encoder", "decoder")}
    dropouts = zeros("dropout", "attention_dropout", "activation_dropout")
    common = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 16, "decoder_start_token_id": 2}
    config = transformers.BartConfig(**common, **sizes, **dropouts, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.BartForConditionalGeneration(config)


def t5():
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def patch_tst():
    sizes = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8}
    more = {"num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 12, "prediction_length": 4, "loss": "mse"}
    dropouts = zeros(*(f"{layer}_dropout" for layer in ("attention", "ff", "positional", "head", "path")))
    return transformers.PatchTSTForPrediction(transformers.PatchTSTConfig(**sizes, **more, **dropouts))


def gpt2():
    dropouts = zeros("resid_pdrop", "embd_pdrop", "attn_pdrop")
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=2))


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, layer_type="basic"))


def of_images():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}


def of_series():
    return {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}


HIDDEN = "hidden_dropout_prob", "attention_probs_dropout_prob"
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
STATE_SPACE = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "conv_kernel": 2}


def mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(**STATE_SPACE, expand=2, time_step_rank=2))


def mamba2():
    sizes = {"expand": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**STATE_SPACE, **sizes))


def gemma2():
    return causal("Gemma2Config", "Gemma2ForCausalLM", num_key_value_heads=1, head_dim=8, sliding_window=4)


def qwen3_moe():
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", num_key_value_heads=1, num_hidden_layers=1, **experts)


def bert():
    return causal("BertConfig", "BertForMaskedLM", **zeros(*HIDDEN))


def deberta():
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    return causal("DebertaV2Config", "DebertaV2ForMaskedLM", **relative, **zeros(*HIDDEN))


def wav2vec2():
    convolutions = {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (2,), "num_conv_pos_embeddings": 4}
    convolutions |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "ctc_loss_reduction": "mean"}
    layers = "hidden", "activation", "attention", "feat_proj", "final"
    dropouts = zeros(*(f"{layer}_dropout" for layer in layers), "layerdrop")
    return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**TINY, **convolutions, **dropouts, vocab_size=17))


def whisper():
    sizes = {f"{part}_{count}": 1 for part in ("encoder", "decoder") for count in ("layers", "attention_heads")}
    sizes |= {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    lengths = {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4}
    tokens = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    tokens |= {"suppress_tokens": [], "begin_suppress_tokens": []}
    config = transformers.WhisperConfig(**sizes, **lengths, **tokens, dropout=0.0, vocab_size=40, d_model=8)
    return transformers.WhisperForConditionalGeneration(config)


def convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes, num_labels=3))


def segformer():
    sizes = {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [8], "patch_sizes": [3]}
    more = {"strides": [2], "num_attention_heads": [2], "decoder_hidden_size": 8, "num_labels": 3}
    config = transformers.SegformerConfig(**sizes, **more, **zeros("drop_path_rate", "classifier_dropout_prob"))
    return transformers.SegformerForSemanticSegmentation(config)


def vit():
    config = transformers.ViTConfig(**TINY, **zeros(*HIDDEN), image_size=16, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def swin():
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    config = transformers.SwinConfig(**sizes, **zeros(*HIDDEN, "drop_path_rate"), num_labels=3)
    return transformers.SwinForImageClassification(config)


def detr():
    backbone = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    backbone = transformers.ResNetConfig(**backbone, out_features=["stage2"])
    sizes = {f"{part}_{count}": 1 for part in ("encoder", "decoder") for count in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 8, "num_queries": 4, "num_labels": 3}
    options = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = transformers.DetrConfig(**sizes, **options, backbone_config=backbone, dropout=0.0)
    return transformers.DetrForObjectDetection(config)


def yolos():
    sizes = {"image_size": [16, 16], "patch_size": 4, "num_detection_tokens": 4, "num_labels": 3}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**TINY, **sizes, **zeros(*HIDDEN)))


def of_sounds():
    return {"input_values": torch.randn(2, 40), "labels": torch.randint(1, 17, (2, 4))}


def of_spectra():
    return {"input_features": torch.randn(2, 4, 16), "labels": torch.randint(3, 40, (2, 6))}


def of_pixels():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 3, (2, 16, 16))}


def of_boxes():
    boxes = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])} for _ in range(2)]
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": boxes}


FAMILIES = {
    "t5": (t5, of_tokens, "whole"),
    "bart": (bart, of_tokens, "whole"),
    "llama": (lambda: causal("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1), of_tokens, "whole"),
    "gpt2": (gpt2, of_tokens, "whole"),
    "gemma2": (gemma2, of_tokens, "whole"),
    "bert": (bert, of_tokens, "whole"),
    "deberta": (deberta, of_tokens, "whole"),
    "mamba": (mamba, lambda: of_tokens(4), "whole"),
    "mamba2": (mamba2, of_tokens, "whole"),
    "qwen3 moe": (qwen3_moe, of_tokens, "whole"),
    "resnet": (resnet, of_images, "whole"),
    "convnext": (convnext, of_images, "whole"),
    "vit": (vit, of_images, "whole"),
    "swin": (swin, of_images, "whole"),
    "segformer": (segformer, of_pixels, "whole"),
    "detr": (detr, of_boxes, "split"),
    "yolos": (yolos, of_boxes, "eager"),
    "wav2vec2": (wav2vec2, of_sounds, "split"),
    "whisper": (whisper, of_spectra, "whole"),
    "patch tst": (patch_tst, of_series, "whole"),
}
"""Name -> function that makes the model, function that makes a batch, and what ``lowering="auto"`` chooses."""
