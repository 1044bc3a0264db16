"""`Step.init` of a module on the device meta: the same values on any mesh, and no rank holds the whole."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ftrain as ft
from ftrain.checkpoint.lazy_safetensors import StoredTensor
from ftrain.errors import CheckpointError, StructureError
from ftrain.step.initialise import initialised
from tests.bits import assert_same_bits
from tests.parallel.ranks import run
from tests.parallel.transformers_models import TINY


class Block(nn.Module):
    """A block with a `reset_parameters` that writes its own parameter and buffer, and zeros into one of its layers."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2), nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.register_buffer("table", torch.empty(3, dtype=torch.int64), persistent=False)

    def reset_parameters(self):
        nn.init.zeros_(self.out.weight)
        nn.init.trunc_normal_(self.scale)
        self.table = torch.arange(3, device=self.table.device)


class Model(nn.Module):
    """Blocks, a head that is tied to the embedding, and one that is tied across blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head.weight = self.embed.weight
        self.blocks[2].attention.in_proj_weight = self.blocks[0].attention.in_proj_weight

    def forward(self, x):
        return self.head(self.embed(x))


def on_meta(build):
    with torch.device("meta"):
        return build()


def state_of(module, *wrappers, **options):
    loss = ft.from_module(module, lambda model, batch: model(batch).square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.adamw(1e-3)), *wrappers).init(**options)


@pytest.fixture(scope="module")
def state_without_mesh():
    """Return the state of a step without a mesh."""
    return state_of(on_meta(Model), ft.ema(0.9), seed=3)


def test_modules_within_and_around_a_block_write_its_values(state_without_mesh):
    params, buffers = state_without_mesh.params, state_without_mesh.buffers
    assert not any(leaf.is_meta for leaf in ft.tree.leaves(state_without_mesh))
    assert all(torch.equal(buffers[f"blocks.{k}.table"], torch.arange(3)) for k in range(3))
    assert params["blocks.1.out.weight"].eq(0).all()
    assert params["blocks.1.out.bias"].ne(0).any()
    assert params["blocks.0.scale"].ne(params["blocks.1.scale"]).all()
    assert 0.5 < params["embed.weight"].std() < 1.5
    assert_same_bits(state_without_mesh.slots["ema"], params)


@pytest.mark.parametrize(
    ("size", "level", "shape"), [(1, 3, {}), (3, 3, {}), (4, 1, {"replicate": 2}), (2, 0, {})], ids=str
)
def test_values_depend_on_the_seed_alone(state_without_mesh, size, level, shape):
    def rank(_):
        module, before = on_meta(Model), torch.get_rng_state()
        state = state_of(module, ft.ema(0.9), ft.sharded(ft.parallel.mesh(**shape), level), seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        return ft.parallel.whole(state)

    for state in run(size, rank):
        assert_same_bits(state, state_without_mesh)
    other = state_of(on_meta(Model), seed=4)
    assert not torch.equal(other.params["blocks.0.scale"], state_without_mesh.params["blocks.0.scale"])


def test_a_rank_holds_one_block_at_a_time_and_keeps_its_part():
    def rank(_):
        state = state_of(on_meta(Model), ft.sharded(ft.parallel.mesh()))
        return sum(leaf.to_local().numel() for leaf in state.params.values())

    blocks = [set(tensors) for tensors in initialised(on_meta(Model), 0, torch.device("cpu"), {})]
    assert [{name.split(".")[1] for name in names} for names in blocks[:3]] == [{"0"}, {"1"}, {"2"}]
    assert blocks[3] == {"embed.weight"}
    parts = run(4, rank)
    assert sum(parts) == run(1, rank)[0]
    assert max(parts) < 0.35 * sum(parts)


def test_a_module_around_a_block_writes_into_it():
    """The method of `nn.Transformer` draws all matrices more widely than those of its layers."""
    state = state_of(on_meta(lambda: nn.Transformer(16, 2, 2, 2, 64, batch_first=True)))
    assert state.params["encoder.layers.1.linear1.weight"].abs().max() > 16**-0.5


def test_tensors_that_have_values_keep_them():
    module = on_meta(Model)
    module.blocks[1].norm = nn.BatchNorm1d(8)
    nn.init.constant_(module.blocks[1].norm.weight, 5.0)
    state = state_of(module)
    assert state.params["blocks.1.norm.weight"].eq(5).all()
    assert module.blocks[1].norm.weight.eq(5).all()
    assert state.params["blocks.0.norm.weight"].eq(1).all()


def test_a_tensor_that_nothing_writes_is_an_error_that_names_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    with pytest.raises(StructureError, match=r"scale of Scaled .* no reset_parameters\(\) of Scaled .*from a file"):
        state_of(on_meta(Scaled))


@pytest.mark.filterwarnings("ignore:lora. .* is tied to:UserWarning")
def test_adapters_are_those_of_the_same_model_with_values():
    def adapters(module):
        state = state_of(module, ft.lora(2, targets=["blocks.*.out", "embed"]), seed=3)
        return {name: leaf for name, leaf in state.params.items() if "lora_" in name}

    torch.testing.assert_close(adapters(on_meta(Model)), adapters(Model()), rtol=0, atol=0)


@pytest.mark.parametrize("name", TINY)
def test_models_of_transformers_draw_as_when_they_are_built(name):
    torch.manual_seed(0)
    built, drawn = TINY[name](), state_of(on_meta(TINY[name]))
    for key, tensor in drawn.buffers.items():
        torch.testing.assert_close(tensor, built.get_buffer(key))
    assert len(drawn.params) == len(dict(built.named_parameters()))
    for key, tensor in built.named_parameters():
        actual, expected = (weight.double().std(unbiased=False) for weight in (drawn.params[key], tensor))
        torch.testing.assert_close(actual, expected, rtol=0.3, atol=1e-6, msg=key)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_state_from_the_files_of_a_model_reads_on_each_rank_its_parts(name, level, tmp_path, monkeypatch):
    model = TINY[name]()
    model.save_pretrained(tmp_path, max_shard_size="40kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    elements = []
    narrow = StoredTensor.narrow

    def counted(*arguments):
        elements.append(narrow(*arguments).numel())
        return narrow(*arguments)

    monkeypatch.setattr(StoredTensor, "narrow", counted)

    def rank(_):
        state = state_of(on_meta(TINY[name]), ft.sharded(ft.parallel.mesh(), level), params=str(tmp_path))
        return ft.parallel.whole(state)

    for state in run(4, rank):
        for key, tensor in model.named_parameters():
            assert torch.equal(state.params[key], tensor)
    assert sum(elements) == (0 if level == 0 else model.num_parameters())


def test_tensors_of_a_file_that_a_module_does_not_have_are_named(tmp_path, caplog):
    model, file = nn.Linear(3, 2), tmp_path / "model.safetensors"
    save_file(dict(model.state_dict()), file)
    state_of(model, params=file)
    assert not caplog.records
    save_file({**model.state_dict(), "scale": torch.ones(2)}, file)
    torch.testing.assert_close(state_of(model, params=file).params, dict(model.named_parameters()))
    assert "has 1 tensors that Linear does not have, and that are left out: scale" in caplog.text


def test_files_that_do_not_fit_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is neither model.safetensors nor"):
        state_of(on_meta(Model), params=tmp_path)
    model = Model()
    for block in model.blocks:
        block.reset_parameters()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "head" not in name}
    del tensors["blocks.2.attention.in_proj_weight"]
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    torch.testing.assert_close(state_of(on_meta(Model), params=tmp_path).params, dict(model.named_parameters()))
    tensors["blocks.0.scale"] = torch.ones(3)
    del tensors["blocks.1.out.weight"]
    save_file(tensors, file)
    with pytest.raises(
        StructureError, match=r"blocks.0.scale: found \[3\], needs \[8\]\n *blocks.1.out.weight: missing"
    ):
        state_of(on_meta(Model), params=file)
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read as safetensors"):
        state_of(on_meta(Model), params=file)


def test_values_of_a_file_that_are_not_those_of_one_tensor_are_errors(tmp_path):
    model, file = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), tmp_path / "model.safetensors"
    apart = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model[1].weight = model[0].weight
    save_file(apart, file)
    with pytest.raises(StructureError, match=r"0\.weight: found 0\.weight and 1\.weight with different values"):
        state_of(model, params=file)
    save_file({**apart, "1.weight": apart["0.weight"].clone()}, file)
    assert torch.equal(state_of(model, params=file).params["0.weight"], apart["0.weight"])
    for dtype, code in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        quantised = {"0.weight": torch.ones(3, 3).to(dtype), "0.bias": apart["0.bias"], "1.bias": apart["1.bias"]}
        save_file({**quantised, "0.weight_scale": torch.ones(3)}, file)
        with pytest.raises(StructureError, match=rf"0\.weight: found {code}, needs float32; quantised"):
            state_of(model, params=file)
    save_file({name: tensor.double() for name, tensor in apart.items() if name != "1.weight"}, file)
    assert torch.equal(state_of(model, params=file).params["0.weight"], apart["0.weight"])
