"""The registry of devices: the fields of a record, how it is looked up, and how other packages add records."""

import dataclasses
import importlib.metadata

import pytest
import torch

import ftrain as ft
from ftrain.backends import cpu, cuda, registry
from ftrain.errors import DeviceError, OptionError

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA device")
without_cuda = pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")

# A device type that torch knows and no machine of these tests has.
OTHER = "privateuseone"


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """Give every test its own registry, and no variable that names the default."""
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    monkeypatch.setattr(registry, "_scanned", False)
    monkeypatch.delenv(registry.DEFAULT_VARIABLE, raising=False)


def record(**fields):
    return dataclasses.replace(cpu.BACKEND, **{"name": OTHER, **fields})


class EntryPoint:
    """The attributes of an entry point that the registry reads; it loads a record, or raises an error."""

    def __init__(self, name, loaded):
        self.name, self.loaded, self.loads = name, loaded, 0

    def load(self):
        self.loads += 1
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture
def installed(monkeypatch):
    """Return the list of the entry points of other packages, to which a test adds."""
    entry_points = []

    def entry_points_of(*, group):
        assert group == "ftrain.backends"
        return entry_points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points_of)
    return entry_points


def test_cpu_and_cuda_are_registered():
    assert {"cpu", "cuda"} <= set(ft.backends.names())
    assert ft.backends.names() == sorted(ft.backends.names())
    assert ft.backends.get("cpu") is cpu.BACKEND
    assert ft.backends.get("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_a_backend_is_found_by_device(device):
    assert ft.backends.of(device) is cpu.BACKEND


@pytest.mark.parametrize("name", ["banana", "tpu", "", "CPU", "cpu:0"])
def test_the_error_of_an_unknown_name_lists_the_registered_ones(name):
    with pytest.raises(DeviceError, match="registered are cpu, cuda") as caught:
        ft.backends.get(name)
    assert repr(name) in str(caught.value)


def test_the_error_of_an_unknown_name_lists_backends_of_other_packages():
    ft.backends.register(record())
    with pytest.raises(DeviceError, match=rf"registered are cpu, cuda \(.*, {OTHER}, xla \(TPU\), "):
        ft.backends.get("banana")


@pytest.mark.parametrize("device", ["mtia", torch.device("meta"), "banana", None, 3])
def test_a_device_without_a_backend(device):
    with pytest.raises(DeviceError, match="registered are cpu, cuda"):
        ft.backends.of(device)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        cpu.BACKEND.name = "gpu"


def test_a_backend_from_outside():
    backend = record()
    ft.backends.register(backend)
    assert ft.backends.get(OTHER) is backend
    assert ft.backends.of(torch.device(OTHER, 1)) is backend
    assert OTHER in ft.backends.names()
    assert backend.device == torch.device(OTHER)


def test_a_backend_from_outside_is_the_default_when_it_is_available():
    ft.backends.register(record(available=lambda: False))
    assert ft.backends.default().name == ("cuda" if HAS_CUDA else "cpu")
    ft.backends.register(record())
    assert ft.backends.default().name == ("cuda" if HAS_CUDA else OTHER)


def test_a_backend_from_outside_trains():
    # On the meta device nothing is computed, but the backend is looked up by device as on any other.
    seeds = []

    def seeded(seed):
        seeds.append(seed)
        return cpu.BACKEND.seeded(seed)

    ft.backends.register(record(name="meta", seeded=seeded, fused_optimizers=False))
    step = ft.compose(ft.train_step(lambda p, b: (p["w"] * b).sum(), ft.optim.sgd(0.1)), ft.clip(1.0), ft.ema(0.9))
    state = step.init({"w": torch.ones(3)}, device="meta")
    assert {leaf.device.type for leaf in ft.tree.leaves((state.params, state.opt_state, state.slots))} == {"meta"}
    state, metrics = step(state, torch.ones(3, device="meta"))
    assert metrics["loss"].device.type == "meta"
    assert len(seeds) == 1


def test_a_record_may_be_replaced():
    ft.backends.register(dataclasses.replace(cpu.BACKEND, describe=lambda: "abacus"))
    assert ft.backends.of("cpu").describe() == "abacus"


def test_a_name_that_torch_does_not_know_cannot_be_registered():
    with pytest.raises(OptionError, match=r"backends\.register.*'banana'"):
        ft.backends.register(record(name="banana"))
    assert "banana" not in ft.backends.names()


@pytest.mark.parametrize("value", [cpu, "cpu", None])
def test_only_a_record_can_be_registered(value):
    with pytest.raises(ft.errors.FtrainError, match=r"backends\.register.*Backend"):
        ft.backends.register(value)


def test_the_environment_variable_names_the_default(monkeypatch):
    ft.backends.register(record())
    monkeypatch.setenv("FTRAIN_BACKEND", "cpu")
    assert ft.backends.default() is cpu.BACKEND
    monkeypatch.setenv("FTRAIN_BACKEND", OTHER)
    assert ft.backends.default().name == OTHER
    monkeypatch.setenv("FTRAIN_BACKEND", "")
    assert ft.backends.default().name == ("cuda" if HAS_CUDA else OTHER)


@pytest.mark.parametrize(("name", "message"), [("banana", "registered are cpu, cuda"), (OTHER, "available are cpu")])
def test_an_environment_variable_that_names_no_available_backend_is_an_error(name, message, monkeypatch):
    ft.backends.register(record(available=lambda: False))
    monkeypatch.setenv("FTRAIN_BACKEND", name)
    with pytest.raises(DeviceError, match=message) as caught:
        ft.backends.default()
    assert name in str(caught.value)
    assert "FTRAIN_BACKEND" in str(caught.value)


def test_another_package_adds_a_backend(installed):
    entry_point = EntryPoint(OTHER, record())
    installed.append(entry_point)
    assert OTHER in ft.backends.names()
    assert ft.backends.get(OTHER).name == OTHER
    assert ft.backends.of(torch.device(OTHER)).name == OTHER
    assert entry_point.loads == 1


@pytest.mark.parametrize(
    "look_up",
    [lambda: ft.backends.get(OTHER), lambda: ft.backends.of(torch.device(OTHER)), ft.backends.default],
    ids=["name", "device", "default"],
)
def test_a_backend_of_another_package_is_found_by_whatever_function_is_called_first(look_up, installed, monkeypatch):
    installed.append(EntryPoint(OTHER, record()))
    monkeypatch.setenv("FTRAIN_BACKEND", OTHER)
    assert look_up().name == OTHER


def test_other_packages_are_loaded_once(installed):
    installed.append(EntryPoint(OTHER, ImportError("no driver")))
    for _ in range(3):
        ft.backends.names()
        ft.backends.default()
    assert installed[0].loads == 1


def test_another_package_cannot_replace_ours_by_being_installed(installed):
    installed.append(EntryPoint("cpu", record(name="cpu")))
    ft.backends.names()
    assert ft.backends.get("cpu") is cpu.BACKEND


def test_a_package_that_does_not_load_is_named(installed):
    installed.append(EntryPoint(OTHER, ImportError("no driver")))
    with pytest.raises(DeviceError, match=OTHER) as caught:
        ft.backends.get(OTHER)
    assert "no driver" in str(caught.value)


def test_a_package_that_does_not_load_leaves_the_other_backends_usable(installed):
    installed.append(EntryPoint(OTHER, ImportError("no driver")))
    assert ft.backends.get("cpu") is cpu.BACKEND
    assert ft.backends.of("cpu") is cpu.BACKEND
    assert "cpu" in ft.backends.names()
    assert ft.backends.default().name == ("cuda" if HAS_CUDA else "cpu")


def test_the_record_of_the_cpu_is_complete():
    backend = cpu.BACKEND
    assert "CPU" in backend.describe()
    assert set(backend.autocast_dtypes()) == {torch.bfloat16, torch.float16}
    assert torch.distributed.is_available()
    assert torch.distributed.is_backend_available(backend.distributed)
    assert backend.compile_backend in {*torch._dynamo.list_backends(None), "inductor"}
    assert backend.pinned_memory is False
    assert backend.fused_optimizers is True


@without_cuda
def test_cuda_is_registered_but_not_available_without_a_device():
    assert cuda.BACKEND.available() is False
    assert cuda.BACKEND.device == torch.device("cuda")
    assert ft.backends.of(torch.device("cuda")) is cuda.BACKEND
    assert ft.backends.default() is cpu.BACKEND


def test_seeded_is_torchs_manual_seed():
    with cpu.BACKEND.seeded(12345):
        actual = torch.rand(4)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        assert torch.equal(torch.rand(4), actual)


@needs_cuda
def test_the_record_of_cuda_works():
    backend = ft.backends.get("cuda")
    assert backend.describe()
    assert torch.float16 in backend.autocast_dtypes()
    ampere = torch.cuda.get_device_capability() >= (8, 0)
    assert (torch.bfloat16 in backend.autocast_dtypes()) == (ampere or torch.version.hip is not None)
    backend.synchronize()
    bytes_before = backend.memory().current
    block = torch.ones(2**20, device="cuda")
    assert backend.memory().current >= bytes_before + 2**22
    assert backend.memory().peak >= backend.memory().current
    del block
    backend.empty_cache()
    if backend.tf32() is not None:
        precision = torch.get_float32_matmul_precision()
        with backend.tf32():
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == precision


@needs_cuda
def test_a_step_on_cuda_reads_nothing_and_agrees_with_the_cpu():
    def loss(params, batch):
        return ((batch["x"] @ params["w"]) ** 2).mean()

    step = ft.compose(
        ft.train_step(loss, ft.optim.adamw(0.1)), ft.accumulate(2), ft.clip(1.0), ft.ema(0.9), ft.skip_nonfinite()
    )
    start, batch = {"w": torch.linspace(-1, 1, 8).unsqueeze(-1)}, {"x": torch.linspace(0, 1, 32).reshape(4, 8)}
    expected, _ = step(step.init(start), batch)
    state = step.init(start, device="cuda")
    moved = ft.tree.to(batch, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state, _ = step(state, moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.params["w"].device.type == "cuda"
    torch.testing.assert_close(state.params["w"].cpu(), expected.params["w"], rtol=1e-4, atol=1e-5)
