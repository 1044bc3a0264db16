"""What trains beside adapters, in the files of peft: whole modules, with their buffers, and weights that are tied."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ftrain as ft
from ftrain.errors import StructureError
from tests.laws.pipelines import assert_equal

WEIGHTS, CONFIG, DIGESTS = "adapter_model.safetensors", "adapter_config.json", "ftrain_digests.json"


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.dense(x))))


class Net(nn.Module):
    """Classifies, with names as those of models of transformers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(7, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.pre_classifier, self.out, self.classifier = nn.Linear(6, 6), nn.Linear(6, 6), Head()

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.classifier(self.out(self.pre_classifier(x)))


class Tied(nn.Module):
    """Predicts tokens; embedding and head are one weight, or two of the same value."""

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


def step_with_adapters(model, trainable, targets=("layers.*",)):
    step = ft.train_step(ft.from_module(model.double(), loss), ft.optim.adamw(0.1), trainable=trainable)
    return ft.lora(2, targets=targets)(step)


def seeded(build):
    torch.manual_seed(1)
    return build()


def batch_of(labels_like_tokens=False):
    tokens = torch.arange(12).view(4, 3) % 7
    return {"tokens": tokens, "labels": tokens.roll(1) if labels_like_tokens else torch.arange(4) % 3}


def saved(directory, trainable, task_type=None):
    """Return a step and its trained state, whose adapters are in the directory."""
    step = step_with_adapters(seeded(Net), trainable)
    state = step.init()
    for _ in range(2):
        state, _ = step(state, batch_of())
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
    step, state = saved(tmp_path / "adapter", trainable)
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["modules_to_save"] == modules
    assert_equal(ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1)).params, state.params)


def test_peft_looks_for_the_ends_of_names(tmp_path):
    with pytest.raises(StructureError, match="parameters of classifier train, and peft would take pre_classifier for"):
        saved(tmp_path / "adapter", ["classifier.*"])
    with pytest.raises(StructureError, match=r"and peft would take layers\.0\.lora_dropout for it"):
        saved(tmp_path / "adapter", ["out.*"])


def test_a_list_of_modules_is_saved_by_its_members(tmp_path):
    step = step_with_adapters(seeded(Net), ["layers.*"], targets=["out"])
    ft.adapters.save(tmp_path / "adapter", step, step.init())
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["modules_to_save"] == ["layers.0", "layers.1"]


def test_a_task_needs_its_head_in_the_files(tmp_path):
    trainable = ["pre_classifier.*", "classifier.*"]
    saved(tmp_path / "adapter", trainable, "SEQ_CLS")
    saved(tmp_path / "another", ["embed.*"], "CAUSAL_LM")
    for trained in (trainable[:1], [*trainable[:1], "classifier.last.*"]):
        with pytest.raises(StructureError, match="with task_type='SEQ_CLS' peft needs all of classifier in the files"):
            saved(tmp_path / "none", trained, "SEQ_CLS")


def test_buffers_of_whole_modules_are_in_the_files(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Nothing is lost.
        step, state = saved(tmp_path / "adapter", ["pre_classifier.*", "classifier.*"])
    assert "base_model.model.classifier.norm.running_mean" in load_file(tmp_path / "adapter" / WEIGHTS)
    loaded = ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1))
    assert_equal((loaded.params, loaded.buffers), (state.params, state.buffers))
    assert not torch.equal(loaded.buffers["classifier.norm.running_mean"], torch.zeros(6))


def test_modules_to_save_are_the_ends_of_names(tmp_path):
    step, state = saved(tmp_path / "adapter", ["classifier.*", "pre_classifier.*"])
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps({**config, "modules_to_save": ["classifier"]}))
    (tmp_path / "adapter" / DIGESTS).unlink()
    assert_equal(ft.adapters.load(tmp_path / "adapter", step, step.init(seed=1)).params, state.params)


def test_weights_that_are_tied_here_and_not_in_the_file(tmp_path):
    apart = step_with_adapters(seeded(lambda: Tied(tied=False)), ["embed.*", "lm_head.*"], targets=["middle"])
    start = apart.init()
    ft.adapters.save(tmp_path / "same", apart, start)
    ft.adapters.save(tmp_path / "apart", apart, apart(start, batch_of(True))[0])
    tied = step_with_adapters(seeded(lambda: Tied(tied=True)), ["embed.*"], targets=["middle"])
    with pytest.raises(StructureError, match=r"lm_head\.weight: trained apart from embed\.weight, to which it is tied"):
        ft.adapters.load(tmp_path / "apart", tied, tied.init(seed=1))
    loaded = ft.adapters.load(tmp_path / "same", tied, tied.init(seed=1))
    torch.testing.assert_close(loaded.params["embed.weight"], start.params["lm_head.weight"], rtol=0, atol=0)
    one = step_with_adapters(seeded(lambda: Tied(tied=False)), ["embed.*"], targets=["middle"])
    ft.adapters.save(tmp_path / "one", one, one(one.init(), batch_of(True))[0])
    with pytest.raises(StructureError, match=r"lm_head\.weight: trained apart from embed\.weight"):
        ft.adapters.load(tmp_path / "one", tied, tied.init(seed=1))


@pytest.fixture(scope="module")
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="peft loads what ftrain has written")


def test_peft_loads_a_head_with_its_buffers(peft, tmp_path):
    step, state = saved(tmp_path / "adapter", ["pre_classifier.*", "classifier.*"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(seeded(Net).double(), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = loss(theirs, batch_of())
    actual = ft.eval_step(step.loss)(state, batch_of())["loss"]
    torch.testing.assert_close(actual.value, expected.value, rtol=0, atol=1e-12)


def classifier():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = RobertaConfig(**sizes, vocab_size=7, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return RobertaForSequenceClassification(config).double().eval()


def test_a_classifier_of_transformers_goes_to_peft_and_back(peft, tmp_path):
    tokens = {"input_ids": torch.arange(12).view(4, 3) % 7, "labels": torch.arange(4) % 3}
    step = ft.train_step(ft.from_module(seeded(classifier)), ft.optim.adamw(0.1), trainable=["classifier.*"])
    step = ft.lora(2, targets=["*.query"])(step)
    state, _ = step(step.init(), tokens)
    ft.adapters.save(tmp_path / "ours", step, state, task_type="SEQ_CLS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(seeded(classifier), tmp_path / "ours").eval()
        theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(**tokens).loss
    back = ft.adapters.load(tmp_path / "theirs", step, step.init(seed=1))
    for each in (state, back):
        actual = ft.eval_step(step.loss)(each, tokens)["loss"]
        torch.testing.assert_close(actual.value, expected, rtol=0, atol=1e-12)


def test_a_tied_embedding_that_peft_has_trained(peft, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(**sizes, vocab_size=7, tie_word_embeddings=True)
    tokens = {"input_ids": torch.arange(12).view(4, 3) % 7, "labels": torch.arange(12).view(4, 3) % 7}

    def of_peft(**options):
        options = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(seeded(lambda: LlamaForCausalLM(config)), peft.LoraConfig(r=2, **options))
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * torch.randn_like(param) * param.requires_grad)
        return model

    step = ft.train_step(
        ft.from_module(seeded(lambda: LlamaForCausalLM(config))), ft.optim.adamw(0.1), trainable=["*.embed_tokens.*"]
    )
    together = of_peft(ensure_weight_tying=True)
    together.save_pretrained(tmp_path / "together")
    step = ft.adapters.like(tmp_path / "together")(step)
    state = ft.adapters.load(tmp_path / "together", step, step.init(seed=1))
    with torch.no_grad():
        expected = float(together(**tokens).loss)
    assert float(ft.eval_step(step.loss)(state, tokens)["loss"]) == pytest.approx(expected, rel=1e-6)
    of_peft().save_pretrained(tmp_path / "apart")
    with pytest.raises(StructureError, match=r"lm_head\.weight: trained apart from model\.embed_tokens\.weight"):
        ft.adapters.load(tmp_path / "apart", step, step.init(seed=1))
