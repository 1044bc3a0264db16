"""What trains beside adapters, in the files of peft: whole modules, with their buffers, and weights that are tied."""

import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ftrain as ft
from ftrain.errors import StructureError
from tests.bits import assert_same_bits
from tests.transforms.lora.adapter_files import (
    DIGESTS,
    WEIGHTS,
    load_with_peft,
    read_config,
    update_config,
    without_warnings,
)
from tests.transforms.lora.models import make_model, make_step

TOKENS = torch.arange(12).view(4, 3) % 7
CLASSIFICATION_BATCH = {"tokens": TOKENS, "labels": torch.arange(4) % 3}
NEXT_TOKEN_BATCH = {"tokens": TOKENS, "labels": TOKENS.roll(1)}


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.dense(x))))


class Classifier(nn.Module):
    """Has names like those of models of transformers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(7, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.pre_classifier, self.out, self.classifier = nn.Linear(6, 6), nn.Linear(6, 6), Head()

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.classifier(self.out(self.pre_classifier(x)))


class LanguageModel(nn.Module):
    """Its embedding and its head are one weight, or two of the same value."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed, self.middle = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 7, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(self.embed.weight)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(torch.tanh(self.middle(self.embed(tokens))))


def loss(model, batch):
    return ft.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def seeded(build, *args, **options):
    torch.manual_seed(1)
    return build(*args, **options).double()


def make_adapted_step(model, trainable, targets=("layers.*",)):
    lora = ft.lora(2, targets=list(targets))
    return make_step(model, lora, criterion=loss, optimizer=ft.optim.adamw(0.1), trainable=trainable)


def save_trained_classifier(directory, trainable, task_type=None):
    """Save the adapters of a classifier after training, and return its step and state."""
    step = make_adapted_step(seeded(Classifier), trainable)
    state = step.init()
    for _ in range(2):
        state, _ = step(state, CLASSIFICATION_BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "adapters.save: training has changed buffers")
        ft.adapters.save(directory, step, state, task_type=task_type)
    return step, state


@pytest.mark.parametrize(
    ("trainable", "modules"),
    [
        (["classifier.dense.*", "classifier.last.*"], ["classifier.dense", "classifier.last"]),
        (["classifier.*", "pre_classifier.*"], ["classifier", "pre_classifier"]),
        (["embed.*", "pre_classifier.*"], ["embed", "pre_classifier"]),
    ],
)
def test_the_outermost_modules_are_saved(trainable, modules, tmp_path):
    step, state = save_trained_classifier(tmp_path / "adapter", trainable)
    assert read_config(tmp_path / "adapter")["modules_to_save"] == modules
    assert_same_bits(ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1)).params, state.params)


@pytest.mark.parametrize(
    ("trainable", "targets", "message"),
    [
        (["head.bias"], ["embed"], r"parameters of head train, and head\.weight is frozen"),
        (["head.*"], ["head"], "parameters of head train, and have adapters too"),
    ],
)
def test_a_module_that_is_not_trained_as_a_whole_is_refused(trainable, targets, message, tmp_path):
    step = make_step(make_model(), ft.lora(3, targets=targets), trainable=trainable)
    with pytest.raises(StructureError, match=message):
        ft.adapters.save(tmp_path / "adapter", step, step.init())


def test_a_saved_module_must_train_in_the_step_that_loads_it(tmp_path):
    lora = ft.lora(3, targets=["blocks.0.down"])
    step = make_step(make_model(), lora, trainable=["blocks.0.up.*"])
    ft.adapters.save(tmp_path / "adapter", step, step.init())
    assert read_config(tmp_path / "adapter")["modules_to_save"] == ["blocks.0.up"]
    frozen = make_step(make_model(), lora)
    with pytest.raises(StructureError, match=r"up\.bias: unexpected .* it trained beside the adapters: name it in"):
        ft.adapters.load(tmp_path / "adapter", frozen, frozen.init())


def test_a_name_that_ends_as_that_of_another_module_is_refused(tmp_path):
    """Peft looks for modules whose names end with those in the file."""
    with pytest.raises(StructureError, match="parameters of classifier train, and peft would take pre_classifier for"):
        save_trained_classifier(tmp_path / "adapter", ["classifier.*"])
    with pytest.raises(StructureError, match=r"and peft would take layers\.0\.lora_dropout for it"):
        save_trained_classifier(tmp_path / "adapter", ["out.*"])


def test_a_list_of_modules_is_saved_by_its_members(tmp_path):
    step = make_adapted_step(seeded(Classifier), ["layers.*"], targets=["out"])
    ft.adapters.save(tmp_path / "adapter", step, step.init())
    assert read_config(tmp_path / "adapter")["modules_to_save"] == ["layers.0", "layers.1"]


def test_a_task_needs_its_head_in_the_files(tmp_path):
    trainable = ["pre_classifier.*", "classifier.*"]
    save_trained_classifier(tmp_path / "whole head", trainable, "SEQ_CLS")
    save_trained_classifier(tmp_path / "task without a head", ["embed.*"], "CAUSAL_LM")
    for too_few in (["pre_classifier.*"], ["pre_classifier.*", "classifier.last.*"]):
        with pytest.raises(StructureError, match="with task_type='SEQ_CLS' peft needs all of classifier in the files"):
            save_trained_classifier(tmp_path / "refused", too_few, "SEQ_CLS")


def test_buffers_of_whole_modules_are_in_the_files(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # No buffer is lost.
        step, state = save_trained_classifier(tmp_path / "adapter", ["pre_classifier.*", "classifier.*"])
    assert "base_model.model.classifier.norm.running_mean" in load_file(tmp_path / "adapter" / WEIGHTS)
    loaded = ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1))
    assert_same_bits((loaded.params, loaded.buffers), (state.params, state.buffers))
    assert loaded.buffers["classifier.norm.running_mean"].any()


def test_modules_to_save_may_be_the_ends_of_names(tmp_path):
    step, state = save_trained_classifier(tmp_path / "adapter", ["classifier.*", "pre_classifier.*"])
    update_config(tmp_path / "adapter", modules_to_save=["classifier"])
    (tmp_path / "adapter" / DIGESTS).unlink()
    assert_same_bits(ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1)).params, state.params)


# Weights that are tied in a model and not in the file


@pytest.fixture
def tied_step():
    return make_adapted_step(seeded(LanguageModel, tied=True), ["embed.*"], targets=["middle"])


def make_untied_step(trainable):
    return make_adapted_step(seeded(LanguageModel, tied=False), trainable, targets=["middle"])


def test_two_equal_weights_are_loaded_into_a_tied_one(tied_step, tmp_path):
    step = make_untied_step(["embed.*", "lm_head.*"])
    state = step.init()
    ft.adapters.save(tmp_path / "adapter", step, state)
    loaded = ft.adapters.load(tmp_path / "adapter", tied_step, tied_step.init(seed=1))
    torch.testing.assert_close(loaded.params["embed.weight"], state.params["lm_head.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("trainable", [["embed.*", "lm_head.*"], ["embed.*"]], ids=["both train", "one trains"])
def test_two_weights_that_differ_are_not_loaded_into_a_tied_one(trainable, tied_step, tmp_path):
    step = make_untied_step(trainable)
    state, _ = step(step.init(), NEXT_TOKEN_BATCH)
    ft.adapters.save(tmp_path / "adapter", step, state)
    with pytest.raises(StructureError, match=r"lm_head\.weight: trained apart from embed\.weight, to which it is tied"):
        ft.adapters.load(tmp_path / "adapter", tied_step, tied_step.init(seed=1))


# With peft


def test_peft_loads_a_head_with_its_buffers(peft, tmp_path):
    step, state = save_trained_classifier(tmp_path / "adapter", ["pre_classifier.*", "classifier.*"])
    peft_model = load_with_peft(peft, seeded(Classifier), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = loss(peft_model, CLASSIFICATION_BATCH)
    actual = ft.eval_step(step.loss)(state, CLASSIFICATION_BATCH)["loss"]
    torch.testing.assert_close(actual.value, expected.value, rtol=0, atol=1e-12)


def roberta():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = RobertaConfig(**sizes, vocab_size=7, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return RobertaForSequenceClassification(config).eval()


def test_a_classifier_of_transformers_goes_to_peft_and_back(peft, tmp_path):
    batch = {"input_ids": TOKENS, "labels": torch.arange(4) % 3}
    step = ft.train_step(ft.from_module(seeded(roberta)), ft.optim.adamw(0.1), trainable=["classifier.*"])
    step = ft.lora(2, targets=["*.query"])(step)
    state, _ = step(step.init(), batch)
    ft.adapters.save(tmp_path / "ftrain", step, state, task_type="SEQ_CLS")
    peft_model = load_with_peft(peft, seeded(roberta), tmp_path / "ftrain").eval()
    with without_warnings():
        peft_model.save_pretrained(tmp_path / "peft")
    with torch.no_grad():
        expected = peft_model(**batch).loss
    loaded = ft.adapters.load(tmp_path / "peft", step, step.init(seed=1))
    evaluate = ft.eval_step(step.loss)
    torch.testing.assert_close(evaluate(state, batch)["loss"].value, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(evaluate(loaded, batch)["loss"].value, expected, rtol=0, atol=1e-12)


def tied_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=7, tie_word_embeddings=True))


def save_embedding_with_peft(peft, directory, **options):
    """Save a model of peft whose trained parameters are random, its embedding among them, and return it."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], **options)
    with without_warnings():
        model = peft.get_peft_model(seeded(tied_llama), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(directory)
    return model


def test_a_tied_embedding_that_peft_has_trained(peft, tmp_path):
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    peft_model = save_embedding_with_peft(peft, tmp_path / "tied", ensure_weight_tying=True)
    loss_fn = ft.from_module(seeded(tied_llama))
    step = ft.train_step(loss_fn, ft.optim.adamw(0.1), trainable=["*.embed_tokens.*"])
    step = ft.adapters.like(tmp_path / "tied")(step)
    state = ft.adapters.load(tmp_path / "tied", step, step.init(seed=1))
    with torch.no_grad():
        expected = float(peft_model(**batch).loss)
    assert float(ft.eval_step(step.loss)(state, batch)["loss"]) == pytest.approx(expected, rel=1e-6)
    save_embedding_with_peft(peft, tmp_path / "untied")
    with pytest.raises(StructureError, match=r"lm_head\.weight: trained apart from model\.embed_tokens\.weight"):
        ft.adapters.load(tmp_path / "untied", step, step.init(seed=1))
