"""The bytes that `Step.lower` counts on one of 8 ranks equal formulas; the other 7 ranks do not exist."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftrain as ft
from ftrain.parallel.mesh import Group, groups
from ftrain.step.traffic import KINDS
from tests.parallel.collectives import Recorder

WIDTH, BLOCKS = 8, 3
BLOCK = 4 * BLOCKS * (WIDTH + 1) * WIDTH
"""Bytes of the parameters of blocks; the model has no others."""
NUMBERS = 4 * 4
"""An upper bound of the bytes of the loss, its weight and other single numbers."""


@pytest.fixture(autouse=True)
def eight_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def sent(mesh, level, *wrappers):
    """Return the bytes that each rank sends, by kind and axis, and the lowered step."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(
        ft.train_step(loss, ft.optim.adamw(1e-3)),
        *wrappers,
        ft.sharded(ft.parallel.mesh(**mesh), level),
        ft.compiled(lowering="whole", backend="eager"),
    )
    lowered = step.lower(step.init(), {"x": torch.randn(16, WIDTH)})
    return {(row.kind, row.axis): row.sent for row in lowered.traffic}, lowered


def test_level_0_sums_the_gradient():
    for axis, mesh in (("shard", {}), ("replicate", {"shard": 1})):
        actual, _ = sent(mesh, 0)
        assert actual == {("all-reduce", axis): pytest.approx(2 * 7 / 8 * BLOCK, abs=2 * NUMBERS)}


def test_level_1_gathers_the_parameters_and_scatters_the_gradient():
    actual, _ = sent({}, 1)
    assert actual.pop(("all-reduce", "shard")) <= 2 * NUMBERS
    assert actual == {("all-gather", "shard"): 7 / 8 * BLOCK, ("reduce-scatter", "shard"): 7 / 8 * BLOCK}


def test_level_3_gathers_twice_and_scatters_once():
    actual, _ = sent({}, 3)
    assert actual.pop(("all-reduce", "shard")) <= 2 * NUMBERS
    # The backward pass of the first block needs no weight, because its input needs no gradient.
    assert actual == {
        ("all-gather", "shard"): pytest.approx((2 - 1 / BLOCKS) * 7 / 8 * BLOCK),
        ("reduce-scatter", "shard"): 7 / 8 * BLOCK,
    }


def test_ranks_without_a_reduce_scatter_send_as_much_in_exchanges(monkeypatch):
    """As with gloo. A rank does not send its own part to itself."""
    group = Group.__init__

    def without_reduce_scatter(self, name, size, rank, has_reduce_scatter=True):
        group(self, name, size, rank, has_reduce_scatter=False)

    monkeypatch.setattr(Group, "__init__", without_reduce_scatter)
    for level, gathers in ((1, 1), (3, 2 - 1 / BLOCKS)):
        actual, _ = sent({}, level)
        assert actual.pop(("all-reduce", "shard")) <= 2 * NUMBERS
        assert actual == {("all-to-all", "shard"): pytest.approx((gathers + 1) * 7 / 8 * BLOCK)}


def test_between_copies_of_the_state_one_shard_of_the_gradient_is_sent():
    actual, _ = sent({"replicate": 2}, 3, ft.clip(1.0))
    assert actual["all-gather", "shard"] == pytest.approx((2 - 1 / BLOCKS) * 3 / 4 * BLOCK)
    assert actual["reduce-scatter", "shard"] == 3 / 4 * BLOCK
    assert actual["all-reduce", "replicate"] == 2 * 1 / 2 * BLOCK / 4
    assert actual["all-reduce", "shard"] + actual["all-reduce", "all"] <= 4 * NUMBERS


def test_accumulation_sums_once_per_step():
    plain, _ = sent({}, 0)
    accumulated, _ = sent({}, 0, ft.accumulate(2))
    assert accumulated["all-reduce", "shard"] == pytest.approx(plain["all-reduce", "shard"], abs=2 * NUMBERS)


def test_the_bytes_sent_are_printed():
    _, lowered = sent({}, 1)
    assert "sends     756 B in 1 all-gather (shard)\n" in f"{lowered}\n"


class GPTBlock(nn.Module):
    """A transformer block."""

    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def of_tokens(model, tokens):
    return ft.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


@pytest.mark.parametrize(
    ("level", "gathers", "scatters", "layers"),
    [
        pytest.param(0, 0, 0, 1, id="level-0-1"),
        pytest.param(1, 1, 1, 1, id="level-1-1"),
        pytest.param(3, 5, 3, 2, id="level-3-2"),
        pytest.param(0, 0, 0, 2, id="level-0-2", marks=pytest.mark.exhaustive),
        pytest.param(1, 1, 1, 2, id="level-1-2", marks=pytest.mark.exhaustive),
        pytest.param(3, 7, 4, 3, id="level-3-3", marks=pytest.mark.exhaustive),
    ],
)
def test_the_number_of_collectives_in_the_compiled_step_of_a_gpt(layers, level, gathers, scatters):
    """There are three sums: of the weights, of the losses, and of the gradients at level 0, else of the norms.

    At level 3 each block is gathered for both passes, and the parameters outside of the blocks once.
    """
    model = nn.Sequential(
        nn.Embedding(16, WIDTH), *(GPTBlock() for _ in range(layers)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
    )
    step = ft.compose(
        ft.train_step(ft.from_module(model, of_tokens), ft.optim.adamw(1e-3)),
        ft.clip(1.0),
        ft.sharded(ft.parallel.mesh(), level),
        ft.compiled(lowering="whole", backend="eager"),
    )
    lowered = step.lower(step.init(), torch.randint(16, (16, 9)))
    calls = {row.kind: row.calls for row in lowered.traffic}
    assert calls == {"all-reduce": 3} | ({"all-gather": gathers, "reduce-scatter": scatters} if level else {})


LOSS, SUMS = "all-reduce of the loss", "all-reduce of gradients"
GATHERS, SCATTERS = "all-gather of parameters", "reduce-scatter of gradients"
FACTORS = "all-reduce of factors; reduce-scatter of other gradients"


@pytest.mark.parametrize(
    ("mesh", "level", "options", "wrappers", "sent"),
    [
        ({}, 0, {}, [ft.clip()], (LOSS, SUMS, "")),
        ({"shard": 1}, 3, {}, [ft.clip()], (LOSS, SUMS, "")),
        ({}, 1, {}, [], (f"{GATHERS}; {LOSS}", SCATTERS, "all-to-all of leaves")),
        ({}, 2, {}, [ft.clip()], (f"{GATHERS}; {LOSS}", f"{SCATTERS}; all-reduce of norms", "all-to-all of leaves")),
        (
            {"shard": 2},
            3,
            {},
            [ft.skip_spikes()],
            (
                f"all-gather of blocks, twice; {LOSS}",
                f"{SCATTERS}; all-reduce of their parts; all-reduce of norms",
                "all-to-all of leaves",
            ),
        ),
        ({}, 0, {"reduce": "bf16"}, [], (LOSS, f"{SUMS} in bf16", "")),
        (
            {},
            1,
            {"reduce": "fp16"},
            [],
            (f"{GATHERS}; {LOSS}", f"all-reduce of scales; {SCATTERS} in fp16", "all-to-all of leaves"),
        ),
        ({}, 2, {"reduce": ft.parallel.powersgd(1)}, [], (f"{GATHERS}; {LOSS}", FACTORS, "all-to-all of leaves")),
        (
            {"shard": 2},
            1,
            {"reduce": ft.parallel.sign()},
            [],
            (f"{GATHERS}; {LOSS}", f"{SCATTERS}; all-gather of signs", "all-to-all of leaves"),
        ),
    ],
    ids=[
        *("level 0", "level 3 of copies", "level 1", "level 2 and norms", "level 3 of shards and copies"),
        *("bf16", "fp16", "powersgd", "sign"),
    ],
)
def test_every_line_of_the_pipeline_shows_its_collectives(mesh, level, options, wrappers, sent):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    ranks = ft.parallel.mesh(**mesh)
    step = ft.compose(ft.train_step(loss, ft.optim.lamb(0.1)), *wrappers, ft.sharded(ranks, level, **options))
    *lines, last = repr(step).splitlines()
    assert tuple(line.partition(" [")[2].removesuffix("]") for line in lines) == sent
    assert last == "step    eager"
    # The kinds of collectives that are shown are those of a later step.
    batch = {"x": torch.randn(16, WIDTH)}
    state, _ = step(step.init(), batch)
    with Recorder(groups(ranks)) as recorder:
        step(state, batch)
    issued = {KINDS[collective.operation.removesuffix("_")] for collective in recorder.collectives}
    assert {kind for kind in KINDS.values() if f"{kind} of" in "; ".join(sent)} == issued
