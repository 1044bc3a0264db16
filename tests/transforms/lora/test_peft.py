"""Files of adapters between ftrain and peft: both compute the same losses and gradients from them."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import ftrain as ft
from ftrain.errors import StructureError
from tests.laws.models import make_batch
from tests.transforms.lora.adapter_files import WEIGHTS, load_with_peft, without_warnings
from tests.transforms.lora.models import VARIANTS, loss, make_model, make_step, train


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**options, vocab_size=7, max_position_embeddings=8)).double()


def logits_loss(model, batch):
    return ft.losses.cross_entropy(model(batch["tokens"]).logits, batch["labels"])


class Case(NamedTuple):
    """A model: the function that builds it, the names of its targets in peft, and what trains beside them."""

    build: Any
    target_modules: list[str]
    criterion: Any
    trainable: list[str] | None

    @property
    def targets(self):
        """The same targets, as `ft.lora` names them."""
        return [f"*{name}" for name in self.target_modules]

    def make_model(self):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.build()


CASES = {
    "net": Case(lambda: make_model(0.0), ["embed", "up", "down", "head"], loss, None),
    "gpt2": Case(gpt2, ["c_attn", "c_proj", "wte"], logits_loss, ["*.ln_f.*"]),
    "llama": Case(llama, ["q_proj", "v_proj", "down_proj"], logits_loss, ["lm_head.*"]),
}
cases = pytest.mark.parametrize("name", CASES)
# The embedding of GPT-2 is its head; peft adapts the embedding alone, too.
may_be_tied = pytest.mark.filterwarnings("ignore:lora. .* is tied to lm_head.weight:UserWarning")


def make_case(name, variant):
    """Return the model, the loss and the step with adapters of a case."""
    case = CASES[name]
    model = case.make_model()
    lora = ft.lora(3, 5, targets=case.targets, **VARIANTS[variant])
    step = make_step(model, lora, criterion=case.criterion, trainable=case.trainable)
    return model, case.criterion, step


def evaluate(step, state):
    return ft.eval_step(step.loss)(state, make_batch(9))["loss"]


@may_be_tied
@cases
@pytest.mark.parametrize("variant", VARIANTS)
def test_peft_computes_what_ftrain_has_trained(name, variant, peft, tmp_path):
    model, criterion, step = make_case(name, variant)
    state, _ = train(step)
    ft.adapters.save(tmp_path / "adapter", step, state)
    peft_model = load_with_peft(peft, model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = criterion(peft_model, make_batch(9))
    actual = evaluate(step, state)
    torch.testing.assert_close(actual.value, expected.value, rtol=0, atol=1e-12)
    # Training has changed the loss.
    assert float(actual) != pytest.approx(float(evaluate(step, step.init())), abs=1e-3)


def name_in_peft(name, peft_names):
    """Return peft's name of a parameter: an adapter, or one of a whole module that is trained."""
    name_of_adapter = f"base_model.model.{name}"
    if name.endswith("lora_magnitude_vector"):
        name_of_adapter += ".weight"
    if name_of_adapter in peft_names:
        return name_of_adapter
    module, _, param = name.rpartition(".")
    return f"base_model.model.{module}.modules_to_save.{param}"


@may_be_tied
@cases
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_gradients_are_those_of_peft(name, variant, peft, tmp_path):
    model, criterion, step = make_case(name, variant)
    state, _ = train(step, 2)
    ft.adapters.save(tmp_path / "adapter", step, state)
    peft_model = load_with_peft(peft, model, tmp_path / "adapter", is_trainable=True).train()
    criterion(peft_model, make_batch(5)).value.backward()
    peft_params = {name.replace(".default", ""): param for name, param in peft_model.named_parameters()}
    expected = {name: param.grad for name, param in peft_params.items() if param.grad is not None}
    # A step of gradient descent at the rate 1 moves the parameters by their gradients.
    sgd_step = make_step(
        model, step.wrappers[0], criterion=criterion, trainable=step.trainable, optimizer=ft.optim.sgd(1.0)
    )
    before = ft.adapters.load(tmp_path / "adapter", sgd_step, sgd_step.init())
    after, _ = sgd_step(before, make_batch(5))
    gradients = {name: leaf - after.params[name] for name, leaf in before.params.items() if leaf is not None}
    assert len(gradients) == len(expected)
    for name, gradient in gradients.items():
        peft_name = name_in_peft(name, expected)
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(gradient, expected[peft_name], rtol=1e-9, atol=1e-13, msg=message)


@may_be_tied
@cases
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_ftrain_computes_what_peft_has_written(name, variant, peft, tmp_path):
    case = CASES[name]
    model = case.make_model()
    options = {f"use_{option}": value for option, value in VARIANTS[variant].items()}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=case.target_modules, init_lora_weights=False, **options)
    with without_warnings(), torch.random.fork_rng():
        torch.manual_seed(2)
        peft_model = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False).double().eval()
        peft_model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = case.criterion(peft_model, make_batch(9)).value
    step = make_step(model, ft.adapters.like(tmp_path / "adapter"), criterion=case.criterion)
    state = ft.adapters.load(tmp_path / "adapter", step, step.init())
    actual = evaluate(step, state)
    torch.testing.assert_close(actual.value, expected, rtol=0, atol=1e-12)
    # The adapters of peft change the loss.
    assert abs(float(actual) - float(evaluate(step, step.init()))) > 1e-3


@may_be_tied
def test_an_embedding_of_the_base_in_a_file_of_peft_must_be_ours(peft, tmp_path):
    case = CASES["gpt2"]
    model = case.make_model()
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=case.target_modules)
    with without_warnings():
        peft_model = peft.get_peft_model(copy.deepcopy(model), config)
        peft_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert any(".base_layer." in name for name in load_file(tmp_path / "adapter" / WEIGHTS))
    step = make_step(model, ft.lora(3, 5, targets=case.targets), criterion=case.criterion)
    ft.adapters.load(tmp_path / "adapter", step, step.init())
    with torch.no_grad():
        model.transformer.wte.weight.add_(1e-3)
    with pytest.raises(StructureError, match=r"another base, with other values in lm_head\.weight and 1 more"):
        ft.adapters.load(tmp_path / "adapter", step, step.init())
