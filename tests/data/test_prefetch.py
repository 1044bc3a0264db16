"""Prefetch: the same batches, read ahead; the position is that after the batches that were yielded."""

import dataclasses
import itertools
from collections import UserDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft
from ftrain import data, tree
from ftrain.backends import registry
from ftrain.data import device_prefetch
from ftrain.errors import DataError, DeviceError, OptionError

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]


def make_loader(size=20, **options):
    return data.loader(data.arrays({"x": torch.arange(size)}), 4, **options)


def values_of(batches):
    return [batch["x"].tolist() for batch in batches]


@pytest.mark.parametrize("device", DEVICES)
@given(length=st.integers(0, 7), depth=st.integers(1, 9))
def test_the_batches_are_the_same(device, length, depth):
    batches = [{"x": torch.arange(i, i + 3), "name": "a"} for i in range(length)]
    prefetched = data.prefetch(batches, device, depth)
    for _ in range(2):
        actual = list(prefetched)
        assert values_of(actual) == values_of(batches)
        assert all(batch["x"].device.type == device and batch["name"] == "a" for batch in actual)
    assert len(prefetched) == length


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 50])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_position_is_that_after_the_batches_that_were_yielded(device, depth, num_workers):
    whole = make_loader()
    passes = [values_of(whole) for _ in range(3)]
    loader = make_loader(num_workers=num_workers)
    prefetched = data.prefetch(loader, device, depth)
    for epoch in range(2):
        for stop in range(len(passes[epoch]) + 1):
            iterator = iter(prefetched)
            assert values_of(next(iterator) for _ in range(stop)) == passes[epoch][:stop]
            state = data.position(prefetched)
            assert (state["epoch"], state["window"]) == (epoch, stop)
            resumed = data.prefetch(make_loader(), device, depth)
            data.seek(resumed, state)
            assert data.position(resumed) == state
            assert values_of(resumed) == passes[epoch][stop:]
            assert values_of(resumed) == passes[epoch + 1]
        # After an unfinished epoch, the same epoch starts again, however far it was read ahead.
        assert values_of(prefetched) == passes[epoch]
    assert data.position(prefetched)["epoch"] == 2


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=cuda)])
def test_objects_that_move_themselves_stay_on_the_host(device, monkeypatch):
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    ft.backends.register(dataclasses.replace(ft.backends.get("cpu"), name="meta"))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(4, 3), torch.ones(2, 3)])
    (actual,) = data.prefetch([{"x": torch.ones(1), "p": packed}], device)
    assert (actual["x"].device.type, actual["p"].data.device.type) == (device, "cpu")
    assert tree.to(actual, device)["p"].data.device.type == device


def test_depth_batches_are_read_ahead():
    read = []

    class Source:
        def __iter__(self):
            for i in range(10):
                read.append(i)
                yield {"x": torch.tensor(i)}

    iterator = iter(data.prefetch(Source(), "cpu", depth=3))
    assert read == []
    next(iterator)
    assert read == [0, 1, 2, 3]
    next(iterator)
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory", ["host", "device", pytest.param("pinned", marks=cuda)])
def test_data_may_fill_its_tensors_again(device, memory):
    def source():
        options = {"device": device} if memory == "device" else {"pin_memory": memory == "pinned"}
        batch = torch.empty(1 << 20, dtype=torch.int64, **options)
        for number in range(5):
            yield {"x": batch.fill_(number)}

    actual = list(data.prefetch(source(), device))
    assert [batch["x"].unique().tolist() for batch in actual] == [[number] for number in range(5)]


class Stream:
    """Stands for a stream of a device, whose copies take some time; notes whether the host waits for it."""

    def __init__(self):
        self.waited = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        self.waited = True


@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_host_waits_only_for_copies_of_memory_that_the_data_has_pinned(monkeypatch, is_pinned):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    stream = Stream()
    device_prefetch._copy({"x": torch.zeros(2)}, torch.device("cpu"), stream)
    assert stream.waited == is_pinned


class StartsOver:
    """An iterator that starts again after its end, as some loaders of other libraries do."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count = (self.count + 1) % 4
        if not self.count:
            raise StopIteration
        return {"x": torch.tensor(self.count)}


def test_an_iterator_that_starts_over_ends_each_epoch():
    prefetched = data.prefetch(StartsOver(), "cpu")
    assert [values_of(itertools.islice(prefetched, 9)) for _ in range(2)] == [[1, 2, 3]] * 2


def test_an_error_of_the_data_is_raised_after_the_batches_before_it():
    class Source:
        def __iter__(self):
            yield {"x": torch.tensor(0)}
            yield {"x": torch.tensor(1)}
            raise KeyError("third")

    iterator, actual = iter(data.prefetch(Source(), "cpu", depth=5)), []
    with pytest.raises(KeyError, match="third"):
        actual.extend(int(batch["x"]) for batch in iterator)
    assert actual == [0, 1]


def test_after_an_error_the_position_is_that_of_the_last_good_batch():
    class Rows:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            if index == 5:
                raise OSError("gone")
            return {"x": index}

    prefetched = data.prefetch(data.loader(Rows(), 2, shuffle=False), "cpu")
    with pytest.raises(DataError, match="sample 5"):
        list(prefetched)
    assert data.position(prefetched)["window"] == 2


def test_data_without_a_position():
    prefetched = data.prefetch([{"x": torch.tensor(1)}], "cpu")
    assert data.position(prefetched) is None
    next(iter(prefetched))
    assert data.position(prefetched) is None
    with pytest.raises(DataError, match="list has neither"):
        data.seek(prefetched, {})


def test_other_mappings_become_dicts():
    (actual,) = data.prefetch([UserDict(x=torch.tensor(1))], "cpu")
    assert type(actual) is dict


def test_wrong_arguments_are_errors_that_name_them():
    with pytest.raises(OptionError, match="prefetch: depth is 0"):
        data.prefetch([], "cpu", 0)
    for source in (3, None, {"x": torch.ones(2)}, torch.ones(2)):
        with pytest.raises(DataError, match=f"prefetch: data is a {type(source).__name__}; needs an iterable"):
            data.prefetch(source, "cpu")
    with pytest.raises(DeviceError, match="no backend 'abacus'"):
        data.prefetch([], "abacus")
    with pytest.raises(TypeError, match="list_iterator"):
        len(data.prefetch(iter([]), "cpu"))


def test_num_dropped_is_that_of_the_loader():
    step = ft.eval_step(lambda params, batch: (params["w"] * batch["x"]).mean())
    state = ft.train_step(step.loss, ft.optim.sgd(0.1)).init({"w": torch.ones(())})
    with pytest.warns(UserWarning, match="leaves out 2 samples"):
        ft.evaluate(step, state, data.prefetch(make_loader(10), "cpu"))
    assert data.prefetch([], "cpu").num_dropped == 0


def test_an_unfinished_epoch_starts_again_where_it_began():
    """Also if a batch of the loader was looked at before, after which its next pass starts at the first batch."""
    loader = make_loader(shuffle=False)
    next(iter(loader))
    prefetched = data.prefetch(loader, "cpu")
    assert [values_of([next(iter(prefetched))]) for _ in range(2)] == [[[0, 1, 2, 3]]] * 2


def test_a_prefetched_iterator_has_one_epoch():
    step = ft.train_step(lambda params, batch: (params["w"] * batch["x"]).mean(), ft.optim.sgd(0.1))
    state = step.init({"w": torch.ones(())})
    with pytest.raises(
        DataError, match=r"the data ended at step 1, and cannot be iterated again.*fewer steps or epochs"
    ):
        ft.fit(step, state, data.prefetch(iter([{"x": torch.ones(2)}]), "cpu"), epochs=2, progress=False)


def test_a_fit_on_prefetched_batches_is_resumed(tmp_path):
    def run(steps, directory=None):
        loss = lambda params, batch: (batch["x"] * params["w"] - 1).square().mean()  # noqa: E731
        step = ft.train_step(loss, ft.optim.sgd(1e-4))
        checkpoints = None if directory is None else ft.Checkpoints(directory, every=1)
        prefetched = data.prefetch(make_loader(), "cpu")
        return ft.fit(
            step,
            step.init({"w": torch.ones(3, dtype=torch.float64).sum()}),
            prefetched,
            steps=steps,
            checkpoints=checkpoints,
            progress=False,
        )

    whole, _ = run(12)
    run(7, tmp_path)
    resumed, history = run(12, tmp_path)
    assert history["step"] == list(range(1, 13))
    assert torch.equal(resumed.params["w"], whole.params["w"])


@cuda
def test_copies_overlap_with_work_and_are_waited_for():
    big = [{"x": torch.full((1 << 22,), float(i))} for i in range(8)]
    for i, batch in enumerate(data.prefetch(big, "cuda", depth=3)):
        busy = torch.ones(2048, 2048, device="cuda")
        for _ in range(5):
            busy = busy @ busy * 0
        assert batch["x"].device.type == "cuda"
        assert float((batch["x"] + busy.sum()).mean()) == i
        del batch, busy
