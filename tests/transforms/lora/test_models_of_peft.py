"""A model of peft is a module: methods that `ft.lora` does not have train in it as in a loop of torch."""

import copy
from dataclasses import replace

import pytest
import torch

import ftrain as ft
from tests.laws.models import make_batch
from tests.transforms.lora.adapter_files import without_warnings
from tests.transforms.lora.test_peft import llama, logits_loss

METHODS = {
    "rank_pattern": ("LoraConfig", {"r": 2, "rank_pattern": {"v_proj": 3}, "target_modules": ["q_proj", "v_proj"]}),
    "pissa": ("LoraConfig", {"r": 2, "init_lora_weights": "pissa", "target_modules": ["q_proj"]}),
    "bias": ("LoraConfig", {"r": 2, "bias": "lora_only", "target_modules": ["q_proj"]}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 2, "task_type": "CAUSAL_LM"}),
}


def criterion(model, batch):
    # Prompt tuning puts its virtual tokens before those of the batch.
    logits = model(input_ids=batch["tokens"]).logits[:, -batch["tokens"].shape[1] :]
    return ft.losses.cross_entropy(logits, batch["labels"])


def train_by_hand(model, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.0)
    for index in range(steps):
        criterion(model, make_batch(index)).value.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_peft_trains_as_in_a_loop_by_hand(method, peft, tmp_path):
    config, options = METHODS[method]
    with without_warnings(), torch.random.fork_rng():
        torch.manual_seed(0)
        base = llama().float()  # PiSSA refuses float64.
        model = peft.get_peft_model(
            copy.deepcopy(base), getattr(peft, config)(**options), autocast_adapter_dtype=False
        ).double()
    by_hand = copy.deepcopy(model).train()
    train_by_hand(by_hand, 4)
    step = ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(0.05))
    state = step.init()
    for index in range(4):
        state, _ = step(state, make_batch(index))
    expected = {name: p.detach() for name, p in by_hand.named_parameters() if p.requires_grad}
    trained = {name: leaf for name, leaf in state.params.items() if leaf is not None}
    torch.testing.assert_close(trained, expected, rtol=1e-12, atol=1e-12)
    ft.to_module(model, state)
    with without_warnings():
        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).double()
    with torch.no_grad():
        torch.testing.assert_close(
            criterion(loaded.eval(), make_batch(9)).value, criterion(by_hand.eval(), make_batch(9)).value
        )


def test_another_rate_for_b():
    """LoRA+ (arXiv:2402.12354): the adapters in groups of a `partition`, by their names."""
    loss_fn = ft.from_module(llama(), logits_loss)
    groups = ft.optim.partition({"a": ft.optim.sgd(0.1), "b": ft.optim.sgd(1.6)}, {"b": ["*.lora_B.*"]})
    plain, grouped = (
        ft.lora(2, targets=["*.q_proj"])(ft.train_step(loss_fn, optimizer)) for optimizer in (ft.optim.sgd(0.1), groups)
    )
    start, others = plain.init(seed=0), grouped.init(seed=0)
    # B is zero at first, and A has no gradient then: the second step moves both.
    for index in range(2):
        before = others.params
        start = replace(start, params=before)
        (start, _), (others, _) = plain(start, make_batch(index)), grouped(others, make_batch(index))
        for name, leaf in before.items():
            if leaf is not None:
                factor = 16 if ".lora_B." in name else 1
                torch.testing.assert_close(others.params[name] - leaf, factor * (start.params[name] - leaf))
