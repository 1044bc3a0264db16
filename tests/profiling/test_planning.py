"""Plans for ranks that do not exist: the memory and the collectives are those that real ranks measure."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain._torch import dtensor
from ftrain.errors import ComposeError, OptionError
from ftrain.step.flops import CONTRACTION
from tests.parallel.ranks import run, seeded
from tests.profiling.live_memory import LivePeak
from tests.profiling.models import WRAPPERS, transformer


def make(wrapper, optimizer=None):
    with seeded(0):
        loss = transformer(causal=True)[0]
    return ft.compose(ft.train_step(loss, optimizer or optim.adamw(1e-3)), *WRAPPERS[wrapper])


class WithCollectives(LivePeak):
    """Also records the collectives of a real run: the name, and the bytes that the rank sends."""

    def __init__(self, trees):
        self.calls = []
        super().__init__(trees)

    def add(self, trees):
        leaves = tree.leaves(trees)
        super().add([dtensor.local_part(leaf) if dtensor.is_dtensor(leaf) else leaf for leaf in leaves])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            # In an all-to-all, the first rank does not send the first part of its vector: that part is for itself.
            not_sent = args[2][0] * args[0].itemsize if name == "all_to_all_single" else 0
            self.calls.append((name.removesuffix("_"), args[0].nbytes - not_sent))
        return super().__torch_dispatch__(func, types, args, kwargs)


def run_on_ranks(make_step, batch, replicate, shard, level, reduce="fp32"):
    """Return a peak and the collectives of one step on real ranks.

    The peak is the smallest one of the ranks that have as many examples as the first rank; the collectives are those of
    the first rank.
    """

    def rank(_):
        mesh = ft.parallel.mesh(replicate=replicate, shard=shard)
        step = ft.sharded(mesh, level, reduce=reduce)(make_step())
        state, _ = step(step.init(), batch)  # The first step also compares batches.
        recorder = WithCollectives((state.params, state.frozen, state.buffers, state.opt_state, state.slots, batch))
        with recorder:
            step(state, batch)
        return recorder.peak, recorder.calls

    results = run(replicate * shard, rank)
    # If the ranks do not divide the batch, the first ones have one example more.
    largest = len(batch["x"]) % len(results) or len(results)
    # The smallest peak, because for a moment a thread may hold memory that another one is about to free.
    return min(peak for peak, _ in results[:largest]), results[0][1]


CHOSEN = {
    ("clip", (2, 1), 0),
    ("accumulate", (2, 2), 1),
    ("bf16", (1, 2), 2),
    ("all", (2, 2), 3),
}
MESHES_AND_LEVELS = [((1, 2), level) for level in range(4)] + [
    ((2, 1), 0),
    ((1, 3), 3),
    ((1, 4), 3),
    ((2, 2), 1),
    ((2, 2), 3),
]


@pytest.mark.parametrize(
    ("wrapper", "mesh", "level"),
    [
        pytest.param(*case, marks=[] if case in CHOSEN else pytest.mark.exhaustive)
        for case in [
            (wrapper, mesh, level)
            for wrapper in ("plain", "clip", "bf16", "remat", "accumulate", "all")
            for mesh, level in MESHES_AND_LEVELS
        ]
    ],
)
def test_plans_equal_the_measurements_of_ranks(wrapper, mesh, level):
    batch = transformer(causal=True)[1]
    peak, calls = run_on_ranks(lambda: make(wrapper), batch, *mesh, level)
    planned = ft.anatomy(make(wrapper), None, batch, mesh=mesh, level=level)
    assert planned.peak == pytest.approx(peak, rel=0.1)
    assert [(call.operation, call.nbytes) for call in planned.timeline.collectives] == calls


OPTIMIZERS = {
    "adafactor": lambda: optim.adafactor(1e-3),
    "adamw_8bit": lambda: optim.adamw_8bit(1e-3),
    "lamb": lambda: optim.lamb(1e-3),
    "muon": lambda: optim.partition(
        {"matrices": optim.muon(1e-3), "rest": optim.adamw(1e-3)},
        lambda name, leaf: "matrices" if leaf.ndim == 2 and "blocks" in name else "rest",
    ),
    "adamw": lambda: optim.adamw(1e-3),
}
REDUCTIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "powersgd": ft.parallel.powersgd(2),
    "sign": ft.parallel.sign(),
}
CHOSEN_WITH_COMPRESSION = [("muon", "powersgd", (2, 2), 1)]
TO_MOVE = [(name, "fp32", (1, 2), level) for name in ("adafactor", "adamw_8bit", "lamb", "muon") for level in (1, 3)]
TO_MOVE += [("adamw", name, (2, 1), level) for name in ("bf16", "fp16", "powersgd", "sign") for level in (0, 2)]
TO_MOVE += [("adamw_8bit", "sign", (2, 2), 3), ("lamb", "bf16", (2, 2), 2), ("adafactor", "fp16", (2, 2), 3)]


@pytest.mark.parametrize(
    ("optimizer", "reduce", "mesh", "level"),
    [pytest.param(*case, marks=pytest.mark.exhaustive) for case in TO_MOVE] + CHOSEN_WITH_COMPRESSION,
)
def test_optimizers_that_need_whole_leaves_and_compressed_gradients_are_planned(optimizer, reduce, mesh, level):
    batch, method = transformer(causal=True)[1], REDUCTIONS[reduce]
    peak, calls = run_on_ranks(lambda: make("plain", OPTIMIZERS[optimizer]()), batch, *mesh, level, method)
    step = ft.sharded(ft.parallel.mesh(), 1, reduce=method)(make("plain", OPTIMIZERS[optimizer]()))
    planned = ft.anatomy(step, None, batch, mesh=mesh, level=level)
    torch.distributed.destroy_process_group()
    assert planned.peak == pytest.approx(peak, rel=0.1)
    assert [(call.operation, call.nbytes) for call in planned.timeline.collectives] == calls


def bytes_sent(planned):
    return {(row.kind, row.axis): row.sent for row in planned.traffic}


def test_the_bytes_sent_equal_those_computed_by_hand():
    """Each rank sends about the size of two gradients, at level 3 of up to three; copies exchange shards."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(4)))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step, batch = ft.train_step(loss, optim.adamw(1e-3)), torch.empty(512, 64, device="meta")
    size, scalars = 4 * 4 * 64 * 64, 256

    def planned(mesh, level, wrappers=()):
        return bytes_sent(ft.anatomy(ft.compose(step, *wrappers), None, batch, mesh=mesh, level=level))

    assert planned((1, 8), 0)["all-reduce", "all"] == pytest.approx(2 * 7 / 8 * size, abs=scalars)
    assert planned((4, 1), 1)["all-reduce", "replicate"] == pytest.approx(2 * 3 / 4 * size, abs=scalars)
    for wrappers in ((), (ft.accumulate(4),)):
        once = planned((4, 8), 1, wrappers)
        assert once["all-gather", "shard"] == once["reduce-scatter", "shard"] == pytest.approx(7 / 8 * size)
        assert once["all-reduce", "replicate"] == pytest.approx(2 * 3 / 4 * size / 8, abs=scalars)
    blocks = planned((4, 8), 3)
    # The backward pass of the first block does not need its weight, because no layer before it trains.
    assert blocks["all-gather", "shard"] == pytest.approx((2 - 1 / 4) * 7 / 8 * size)
    assert blocks["reduce-scatter", "shard"] == pytest.approx(7 / 8 * size)
    assert blocks["all-reduce", "replicate"] == pytest.approx(2 * 3 / 4 * size / 8, abs=scalars)
    microbatches = planned((4, 8), 3, (ft.accumulate(4),))
    assert microbatches["all-gather", "shard"] == 4 * blocks["all-gather", "shard"]


def test_shards_of_unequal_length_are_padded_before_they_are_sent():
    loss = ft.from_module(nn.Linear(5, 9, bias=False), lambda model, batch: model(batch).square().mean())
    planned = ft.anatomy(ft.train_step(loss, optim.sgd(0.1)), None, torch.zeros(8, 5), mesh=(1, 4), level=1)
    # The four shards have 3, 3, 3 and 0 rows, and each is sent as 3 rows to 3 ranks.
    assert bytes_sent(planned)["all-gather", "shard"] == 3 * 3 * 5 * 4
    assert planned.at_rest["parameters"] == 3 * 5 * 4


@pytest.mark.parametrize("level", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_plan_does_not_depend_on_where_the_state_is(level):
    step, batch = make("clip"), transformer(causal=True)[1]
    divided = ft.sharded(ft.parallel.mesh(), 1)(step)
    steps_and_states = (step, None), (step, step.init()), (divided, divided.init()), (divided, None)
    expected, *plans = (
        ft.anatomy(planned, state, batch, mesh=(2, 4), level=level, measure=False).as_dict()
        for planned, state in steps_and_states
    )
    for plan in plans:
        assert plan == expected
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", [0, 3])
def test_a_mean_whose_weight_is_a_python_number_is_planned(level):
    def loss(params, batch):
        return ft.Mean((batch @ params["w"]).square().sum(), torch.tensor(float(len(batch))))

    step, batch = ft.train_step(loss, optim.sgd(0.1)), torch.zeros(8, 4)
    planned = ft.anatomy(step, step.init({"w": torch.zeros(4, 4)}), batch, mesh=(1, 4), level=level)
    with_tensor = ft.train_step(lambda params, batch: replace(loss(params, batch), weight=batch.sum()), optim.sgd(0.1))
    expected = ft.anatomy(with_tensor, with_tensor.init({"w": torch.zeros(4, 4)}), batch, mesh=(1, 4), level=level)
    assert planned.traffic == expected.traffic != []


def test_a_sharded_step_is_measured_on_its_own_mesh_and_planned_for_another():
    step, batch = ft.sharded(ft.parallel.mesh(), 1)(make("plain")), transformer(causal=True)[1]
    state = step.init()
    anatomy = ft.anatomy(step, state, batch)
    assert anatomy.layout == (1, 1, 1)
    assert anatomy.measured_ratio == pytest.approx(1, abs=0.05)
    assert not anatomy.traffic
    planned = ft.anatomy(step, state, batch, mesh=(2, 4))
    assert planned.layout == (2, 4, 1)
    assert planned.measured is None
    torch.distributed.destroy_process_group()


def test_a_plan_needs_neither_the_memory_of_the_model_nor_the_ranks():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(30_000, 30_000, bias=False)) for _ in range(10)))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), ft.donated())
    batch = torch.empty(8192, 30_000, device="meta")
    planned = ft.anatomy(step, None, batch, mesh=(64, 64))
    assert planned.params == 9 * 10**9
    assert planned.at_rest["parameters"] == pytest.approx(9e9 * 4 / 64, rel=0.01)
    assert planned.at_rest["optimizer state"] == pytest.approx(9e9 * 8 / 64, rel=0.01)
    # A few blocks are gathered at a time, not the whole model.
    assert 3.6e9 <= planned.most["gathered parameters"] < 36e9 / 2
    # Each rank has two examples.
    assert planned.flops[CONTRACTION] == pytest.approx(6 * 9e9 * 2, rel=0.1)


def test_the_table_of_a_plan():
    planned = ft.anatomy(make("clip"), None, transformer(causal=True)[1], mesh=(2, 4), level=1)
    text = repr(planned)
    for expected in (
        "at the peak of one of 8 ranks (replicate=2, shard=4, level=1), predicted\n",
        "  gathered parameters",
        "MiB sent by each rank per step, if collectives are rings\n",
        "  all-gather, shard",
        "  reduce-scatter, shard",
        "  all-reduce, replicate",
        "1 calls",
    ):
        assert expected in text
    numbers = json.loads(json.dumps(planned.as_dict()))
    assert numbers["layout"] == {"replicate": 2, "shard": 4, "level": 1}
    assert sum(row["sent"] for row in numbers["traffic"]) == sum(row.sent for row in planned.traffic) > 0


@pytest.mark.parametrize("mesh", [8, (8,), (0, 8), (2, -1), (2, 4, 1), (True, 2), (2.0, 4), "28"])
def test_an_invalid_mesh_is_refused(mesh):
    message = r"anatomy: mesh is .*; needs \(replicate, shard\), two positive whole numbers"
    with pytest.raises(OptionError, match=message):
        ft.anatomy(make("plain"), None, transformer(causal=True)[1], mesh=mesh)


def test_invalid_levels_and_split_compilation_are_refused():
    step, batch = make("plain"), transformer(causal=True)[1]
    with pytest.raises(OptionError, match=r"anatomy: level is 1, but the step is on one device; pass mesh="):
        ft.anatomy(step, None, batch, level=1)
    for level in (7, "2", 2.0):
        with pytest.raises(OptionError, match=f"sharded: level is {level!r}"):
            ft.anatomy(step, None, batch, mesh=(1, 2), level=level)
    with pytest.raises(ComposeError, match="compiles the loss alone"):
        ft.anatomy(ft.compiled(lowering="split")(step), None, batch, mesh=(1, 2))
