"""Models of transformers train as in a plain torch loop, with dropout and tied weights, and change no batch."""

import copy
import warnings

import pytest
import torch

import ftrain as ft
from tests.step.modules import STEPS, make_step, seed_as_step, train
from tests.step.states import assert_same_bits, assert_unchanged, snapshot

transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()


def make_model(name):
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Deprecations inside of transformers and what it imports are not ours to fix.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(0)
        if name == "bert":
            config = transformers.BertConfig(
                vocab_size=17,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=12,
                num_labels=3,
            )
            return transformers.BertForSequenceClassification(config)
        config = transformers.GPT2Config(
            vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)


def make_batch(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(17, (4, 6), generator=generator)
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [2]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (4,), generator=generator)}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_transformers_trains_with_the_bits_of_a_plain_loop(name, dtype):
    model = make_model(name).to(dtype)
    before = snapshot(model)
    expected = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    step = ft.train_step(ft.from_module(model), ft.optim.adamw(0.01))
    state = step.init(seed=5)
    for index in range(STEPS):
        batch = make_batch(name, index)
        with torch.random.fork_rng():
            seed_as_step(index, seed=5)
            loss = expected(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == loss.item()
    # Tied weights, such as `lm_head.weight` of GPT-2, are one parameter of both.
    assert_same_bits(state.params, dict(expected.named_parameters()))
    assert_unchanged(model, before)


def gpt2_batch(seed):
    return make_batch("gpt2", seed)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_of_a_model_of_transformers_changes_no_bit(policy):
    model = make_model("gpt2")
    step = make_step(model, None, ft.remat(policy))
    assert "blocks=2" in repr(step)
    assert_same_bits(train(step, gpt2_batch).params, train(make_step(model, None), gpt2_batch).params)


def test_gradient_checkpointing_of_transformers_changes_no_bit():
    expected = train(make_step(make_model("gpt2"), None), gpt2_batch)
    model = make_model("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_bits(train(make_step(model, None), gpt2_batch).params, expected.params)


def whisper():
    """Return a model that masks a part of its input in place."""
    config = transformers.WhisperConfig(
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=1,
        decoder_attention_heads=1,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        d_model=8,
        vocab_size=17,
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
    return transformers.WhisperForConditionalGeneration(config)


def test_a_model_that_masks_its_input_in_place_does_not_change_the_batch():
    step = ft.train_step(ft.from_module(whisper()), ft.optim.adamw(1e-3))
    spectrogram = torch.randn(4, 4, 16)
    batch = {"input_features": spectrogram.clone(), "labels": torch.randint(1, 17, (4, 6))}
    _, metrics = step(step.init(), batch)
    assert metrics["loss"].isfinite()
    assert torch.equal(batch["input_features"], spectrogram)
