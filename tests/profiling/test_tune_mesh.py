"""Tuning for ranks that need not exist: which layouts are planned, which one is chosen, and the errors."""

import collections

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import BatchError, DeviceError, OptionError
from ftrain.profiling.anatomy.planned import MeshLayout
from ftrain.profiling.tuning.mesh_search import _MeshSearch
from ftrain.profiling.tuning.record import FLOPS, FULL, NETWORK, NO_REMAT, NODE, MeshTrial
from tests.profiling.problem import batch, make

WIDTH = 16


def rows(trials):
    return {(row.layout.level, row.policy): row for row in trials.rows}


def test_with_enough_memory_the_trial_of_least_time_is_chosen():
    step, inputs = make(ft.clip(1.0)), batch(2, WIDTH)
    trials = ft.trials(step, None, inputs, memory="1GB", mesh=(1, 2))
    assert rows(trials).keys() == {(level, policy) for level in range(4) for policy in ("none", "full")}
    estimates = [row.estimate for row in trials.rows]
    assert estimates == sorted(estimates)
    best = trials.rows[0]
    assert (best.policy, best.microbatches, best.verdict) == ("none", 1, "<- least time")
    assert best.layout.level < 3  # Level 3 gathers parameters twice.
    assert f"sharded({best.layout.replicate}x{best.layout.shard}, level={best.layout.level})" in repr(trials.step)
    with pytest.raises(OptionError, match=r"sharded: the 2 ranks of this step are planned, and do not exist; start as"):
        trials.step.init()
    planned = ft.anatomy(step, None, inputs, mesh=best.layout[:2], level=best.layout.level)
    assert (best.predicted, best.sent) == (planned.peak, sum(row.sent for row in planned.traffic))
    assert best.estimate == pytest.approx(best.flops / FLOPS + best.sent / NODE)
    assert repr(ft.anatomy(trials.step, None, inputs)) == repr(planned)
    assert best.between == 0
    text = repr(trials)
    for part in ("1 x 2 ranks, 2 examples, each rank within 953.7 MiB", "without overlap", "<- least time", "x1.00"):
        assert part in text


def test_a_trial_has_the_fewest_microbatches_that_fit(monkeypatch):
    search, layout = _MeshSearch(make(), None, batch(32, WIDTH), 100, (1, 2)), MeshLayout(1, 2, 3)
    tried = []

    def predict(layout, choice, pieces):
        tried.append(pieces)
        peak = 50 + 200 // pieces
        fits = peak <= search.memory
        verdict = "" if fits else "does not fit"
        return MeshTrial(pieces, choice, None, peak, fits=fits, verdict=verdict, layout=layout)

    monkeypatch.setattr(search, "_predict", predict)
    for memory, fewest in ((250, 1), (100, 4), (99, 8), (62, 16)):
        search.memory = memory
        row = search._fewest(layout, NO_REMAT)
        assert (row.microbatches, row.verdict) == (fewest, "")
    search.memory, tried[:] = 61, []
    assert search._fewest(layout, NO_REMAT).verdict == "does not fit"
    assert tried == [16]


@pytest.mark.parametrize(("level", "choice"), [pytest.param(1, NO_REMAT, marks=pytest.mark.exhaustive), (3, FULL)])
def test_the_memory_and_traffic_of_many_microbatches_follow_from_two(level, choice):
    step, inputs = make(ft.clip(1.0), width=32), batch(32, 32)
    search, layout = _MeshSearch(step, None, inputs, 10**9, (2, 2)), MeshLayout(2, 2, level)
    row = search._predict(layout, choice, 8)
    planned = ft.anatomy(row.step, None, inputs)
    assert "accumulate(8)" in repr(row.step)
    assert row.predicted == pytest.approx(planned.peak, rel=2e-3)
    assert row.sent == pytest.approx(sum(traffic.sent for traffic in planned.traffic), rel=1e-3)
    assert row.flops == pytest.approx(sum(planned.flops.values()), rel=0.01)
    sent = collections.Counter()
    for traffic in planned.traffic:
        sent[traffic.axis] += traffic.sent
    # Copies of the state are on different nodes, and the two ranks of a node share the traffic of all ranks.
    assert row.between == pytest.approx(sent["replicate"] + sent["all"] / 2, rel=1e-2)
    seconds = row.flops / FLOPS + (row.sent - row.between) / NODE + row.between / NETWORK
    assert row.estimate == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("layout", "devices", "shares"),
    [
        (MeshLayout(1, 8, 3), 8, (0, 0, 0)),
        (MeshLayout(4, 8, 3), 8, (1, 0, 1 / 8)),
        (MeshLayout(1, 32, 3), 8, (0, 1 / 8, 1 / 8)),
        (MeshLayout(32, 1, 0), 8, (1 / 8, 0, 1 / 8)),
        (MeshLayout(8, 4, 1), 8, (1 / 2, 0, 1 / 8)),
        (MeshLayout(2, 16, 1), 8, (1, 1 / 8, 1 / 8)),
    ],
)
def test_the_share_of_the_traffic_between_nodes(layout, devices, shares):
    assert tuple(layout.between_nodes(devices).values()) == shares


def test_a_sharded_step_keeps_its_compression_in_other_layouts(monkeypatch):
    monkeypatch.setattr(_MeshSearch, "_layouts", lambda self: [MeshLayout(2, 2, 3), MeshLayout(1, 4, 3)])
    inputs = batch(4, WIDTH)
    step = ft.sharded(ft.parallel.mesh(), 1, reduce=ft.parallel.powersgd(2), batches="rows")(make())
    trials = ft.trials(step, step.init(), inputs, memory="1GB", mesh=(2, 2))
    torch.distributed.destroy_process_group()
    refused = {row.layout for row in trials.rows if "sharded: reduce is powersgd(2) at level 3" in row.verdict}
    assert refused == {MeshLayout(1, 4, 3)}
    row = trials.rows[0]
    planned = ft.anatomy(row.step, None, inputs)
    assert "reduce=powersgd(2))" in repr(row.step)
    assert row.sent == pytest.approx(sum(traffic.sent for traffic in planned.traffic), abs=2)
    assert row.predicted == planned.peak


def test_the_number_of_microbatches_of_the_step_may_change(monkeypatch):
    monkeypatch.setattr(_MeshSearch, "_layouts", lambda self: [MeshLayout(2, 1, 0)])
    step, inputs = make(ft.accumulate(2)), batch(4, WIDTH)
    trials = ft.trials(step, None, inputs, memory="1GB", mesh=(1, 2))
    assert "accumulate" not in repr(trials.step)


def test_clipped_microbatches_and_models_without_blocks_do_not_change():
    model = nn.Linear(WIDTH, WIDTH)
    loss = ft.from_module(model, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.clip(1.0), ft.accumulate(2))
    trials = ft.trials(step, step.init(), batch(8, WIDTH), memory="1GB", mesh=(1, 2))
    assert "value_and_grad <- clip(norm<=1) <- accumulate(2)" in repr(trials.step)
    refused = [row for row in trials.rows if row.policy == "full"]
    assert all("Linear has no repeated children" in row.verdict for row in refused)
    assert len(refused) == 4


def test_the_error_when_nothing_fits_says_what_could_not_be_predicted():
    """The least bytes of other layouts, which are a lower bound, do not hide an error of the loss."""
    loss = ft.from_module(nn.Linear(64, 64), lambda model, batch: model(batch["x"]).mean() * batch["y"].sum().item())
    step = ft.train_step(loss, ft.optim.adamw(1e-3))
    reason = r"does not apply: tune: .* reads a value \(aten\._local_scalar_dense"
    with pytest.raises(DeviceError, match=f"nothing could be predicted: {reason}"):
        ft.tune(step, None, batch(8, 64), memory="1GB", mesh=(1, 2))
    some = rf"nothing fits into 30\.0 KiB per rank; .* is at least .*, and .*, remat=none and 1 x 2, level 3 {reason}"
    with pytest.raises(DeviceError, match=some):
        ft.tune(step, None, batch(8, 64), memory="30KiB", mesh=(1, 2))


def test_the_error_when_nothing_fits_shows_the_smallest_trial():
    step, inputs = make(width=64), batch(8, 64)
    smallest = r"tune: nothing fits into 400\.0 KiB per rank; with microbatches=4, remat=full and 1 x 2, level 3"
    with pytest.raises(DeviceError, match=smallest) as caught:
        ft.tune(step, None, inputs, memory="400KiB", mesh=(1, 2))
    assert "at the peak of one of 2 ranks (replicate=1, shard=2, level=3), predicted" in str(caught.value)
    advice = r"nothing fits into 10\.0 KiB per rank; .* the peak is at least .* More ranks divide the state further$"
    with pytest.raises(DeviceError, match=advice):
        ft.tune(step, None, inputs, memory="10KiB", mesh=(1, 2))


def test_invalid_meshes_and_batches_are_refused():
    step, inputs = make(), batch(6, WIDTH)
    with pytest.raises(OptionError, match="tune: the ranks of a mesh may not exist; pass the memory of each"):
        ft.tune(step, None, inputs, mesh=(1, 2))
    with pytest.raises(OptionError, match=r"tune: mesh is 8; needs \(nodes, devices\), two positive"):
        ft.tune(step, None, inputs, memory="1GB", mesh=8)
    with pytest.raises(BatchError, match="4 ranks do not divide a batch of 6 examples; add 2 examples"):
        ft.tune(step, None, inputs, memory="1GB", mesh=(2, 2))
    with pytest.raises(
        BatchError, match=r"^tune: the tensors of the batch do not say how many examples it has, and ranks"
    ):
        ft.tune(step, None, {"x": torch.ones(())}, memory="1GB", mesh=(2, 2))
