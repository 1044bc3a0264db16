"""One contract for the records of all platforms: the real device where there is one, else its stand-in."""

import contextlib
import dataclasses
import importlib
import itertools

import pytest
import torch

import ftrain as ft
from ftrain.backends import registry
from ftrain.errors import DeviceError
from tests.backends import standins

ALL = ["cpu", "cuda", "rocm", "xpu", "mps", "hpu", "npu", "mlu", "musa", "xla", "private_use"]

# The TF32 switch of each, as the vendor documents it.
SWITCHES = {
    "cuda": lambda: torch.get_float32_matmul_precision() == "high",
    "xpu": lambda: torch.backends.mkldnn.allow_tf32 and torch.get_float32_matmul_precision() == "high",
    "mlu": lambda: torch.backends.mlu.matmul.allow_tf32,
    "musa": lambda: torch.backends.mudnn.allow_tf32,
}


@dataclasses.dataclass
class Platform:
    """A record, and the stand-in for the vendor's module; None for a device of this machine."""

    key: str
    record: ft.backends.Backend
    device: object = None

    @property
    def real(self):
        return self.device is None

    def draw(self):
        return torch.rand(3, device=self.record.device) if self.real else self.device.draw()

    def assert_called_once(self, name):
        assert self.real or self.device.calls.count(name) == 1, self.device.calls


def is_on_this_machine(key):
    return key == "cpu" or (key == ("rocm" if torch.version.hip else "cuda") and torch.cuda.is_available())


def assemble(key, monkeypatch):
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    if key == "private_use":
        module = standins.Npu()
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
        return Platform(key, ft.backends.private_use("privateuseone"), module)
    record = importlib.import_module(f"ftrain.backends.{key}").BACKEND
    device = None if is_on_this_machine(key) else standins.install(key, monkeypatch)
    ft.backends.register(record)
    return Platform(key, record, device)


@pytest.fixture(params=ALL)
def platform(request, monkeypatch):
    return assemble(request.param, monkeypatch)


# The contract


def test_every_field_has_its_type(platform):
    record = platform.record
    for name in ("pinned_memory", "fused_optimizers", "float64", "caches_memory", "immediate"):
        assert type(getattr(record, name)) is bool
    for name in ("name", "distributed", "compile_backend", "platform", "package", "install"):
        assert isinstance(getattr(record, name), str)
    for name in ("empty_cache", "recorder"):
        assert getattr(record, name) is None or callable(getattr(record, name))
    assert record.name == {"rocm": "cuda", "private_use": "privateuseone"}.get(platform.key, platform.key)
    assert record.package == standins.PACKAGES.get(platform.key, "")
    assert bool(record.install) == bool(record.package)
    assert record.platform or platform.key == "cpu"


def test_a_device_is_available_on_a_machine_that_has_it_and_on_no_other(platform):
    record = platform.record
    assert record.available() is True
    assert record.present is True
    if platform.key == "private_use":
        ft.backends.register(record)
    assert ft.backends.get(record.name) is record
    if platform.real:
        return
    platform.device.is_present = False
    assert record.available() is False
    with pytest.raises(DeviceError, match=f"this machine has no '{record.name}' device; available are"):
        ft.backends.get(record.name)


def test_a_device_with_an_index_must_be_the_current_one(platform):
    if platform.key == "private_use":
        ft.backends.register(platform.record)
    name = platform.record.name
    if not registry._is_device(name):
        pytest.skip("torch does not know the device before the vendor's package is there")
    assert ft.backends.resolve(f"{name}:0") == torch.device(name, 0)
    with pytest.raises(
        DeviceError, match=rf"'{name}:first' is not the name of a device; write '{name}', or '{name}:0'"
    ):
        ft.backends.resolve(f"{name}:first")
    if hasattr(platform.device, "current_device"):
        with pytest.raises(DeviceError, match=rf"{name}:1 is not the current device \({name}:0\).*set_device\(1\)"):
            ft.backends.resolve(f"{name}:1")
        platform.device.is_present = False
        ft.backends.require_current(torch.device(name, 1))


def test_a_record_describes_the_hardware(platform):
    assert platform.record.describe().strip()


def test_autocast_dtypes_have_16_bits_and_bfloat16_comes_first(platform):
    dtypes = platform.record.autocast_dtypes()
    assert dtypes in {(torch.bfloat16, torch.float16), (torch.bfloat16,), (torch.float16,)}
    if platform.real:
        for dtype in dtypes:
            with torch.autocast(platform.record.name, dtype=dtype):
                ones = torch.ones(2, 2, device=platform.record.device)
                assert (ones @ ones).dtype == dtype


def test_seeded_draws_the_same_numbers_and_restores_the_generators(platform):
    """Also when the context ends with an error."""
    # Not torch.manual_seed, which seeds the device as well.
    torch.default_generator.manual_seed(5)
    before = torch.get_rng_state()
    draws = {}
    for seed, error in itertools.product((1, 2, 2**63 - 1), (None, ZeroDivisionError)):
        with contextlib.suppress(ZeroDivisionError), platform.record.seeded(seed):
            draws[seed, error] = torch.rand(3), platform.draw()
            if error is not None:
                raise error
        assert torch.equal(torch.get_rng_state(), before)
    first, again, of_other_seed = draws[1, None], draws[1, ZeroDivisionError], draws[2, None]
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, of_other_seed))
    if not platform.real:
        never_seeded = type(platform.device)()
        assert torch.equal(platform.draw(), never_seeded.draw())


def test_seeded_may_be_nested(platform):
    with platform.record.seeded(1):
        first = platform.draw()
        with platform.record.seeded(2):
            platform.draw()
        second = platform.draw()
    with platform.record.seeded(1):
        assert torch.equal(platform.draw(), first)
        assert torch.equal(platform.draw(), second)


def test_generators_are_saved_and_restored(platform):
    torch.default_generator.manual_seed(5)
    restore = platform.record.generators()
    draws = torch.rand(3), platform.draw()
    for _ in range(2):
        restore()
        assert all(map(torch.equal, (torch.rand(3), platform.draw()), draws))


def test_synchronize_waits_once(platform):
    assert platform.record.synchronize() is None
    platform.assert_called_once("synchronize")


def test_memory_is_counted_in_bytes(platform):
    memory = platform.record.memory()
    assert type(memory.current) is type(memory.peak) is int
    assert 0 < memory.current <= memory.peak
    if not platform.real:
        assert memory.current == 1000
        assert memory.peak in {3000, 4000}


def test_the_cache_is_emptied_on_devices_that_have_one(platform):
    assert (platform.record.empty_cache is None) == (platform.key in {"cpu", "hpu", "xla"})
    if platform.record.empty_cache is not None:
        platform.record.empty_cache()
        platform.assert_called_once("empty_cache")


def test_all_devices_but_the_host_cache_freed_memory(platform):
    """Also those whose cache cannot be emptied."""
    assert platform.record.caches_memory == (platform.key != "cpu")


def test_only_on_the_host_reading_a_value_never_waits(platform):
    assert platform.record.immediate == (platform.key == "cpu")


def test_tf32_is_switched_on_and_restored(platform):
    """Also when the context ends with an error."""
    if platform.key not in SWITCHES:
        assert platform.record.tf32() is None
        return
    is_on = SWITCHES[platform.key]
    for error in (None, ZeroDivisionError):
        context = platform.record.tf32()
        if context is None:
            assert platform.real
            return
        assert not is_on()
        with contextlib.suppress(ZeroDivisionError), context:
            assert is_on()
            if error is not None:
                raise error
        assert not is_on()


def test_work_is_recorded_once_and_replayed(platform):
    with_graphs = {"cuda", "rocm", "xpu", "npu", "mlu", "musa"}
    if platform.record.recorder is None:
        assert platform.key not in with_graphs
        return
    if platform.real:
        pytest.skip("tests/test_cuda.py replays on the real device")
    record, output = platform.record.recorder(), torch.ones(2)

    def work():
        platform.device.calls.append("work")
        return [output]

    for _ in range(2):
        replay, outputs = record(work)
        assert outputs[0] is output
    replay()
    # An empty graph keeps the pool alive.
    empty, recording = ["new graph", "capture", "captured"], ["new graph", "capture", "work", "captured"]
    assert platform.device.calls == ["pool", *empty, *recording, *recording, "replay"]


def test_a_recorder_keeps_its_stream_to_itself_and_an_error_restores_the_current_one(monkeypatch):
    module, streams = standins.install("cuda", monkeypatch), []
    recorder = importlib.import_module("ftrain.backends.cuda").BACKEND.recorder

    def fail():
        streams.append(module.stream)
        raise RuntimeError("operation not permitted when stream is capturing")

    first, second = recorder(), recorder()
    for record in (first, first, second):
        with pytest.raises(RuntimeError, match="not permitted"):
            record(fail)
        assert module.stream == standins.Graphs.stream
    assert streams[0] is streams[1] is not streams[2]


def test_a_package_without_graphs_raises_a_runtime_error(monkeypatch):
    """By a `RuntimeError`, `ReplayedGraph` sees that a device cannot record, and runs without a graph."""
    platform = assemble("npu", monkeypatch)
    del platform.device.NPUGraph
    record = platform.record.recorder()
    with pytest.raises(RuntimeError, match=r"torch\.npu has no NPUGraph"):
        record(list)


def test_the_compiler_and_the_collectives_have_a_name(platform):
    expected = {
        "cpu": ("inductor", "gloo"),
        "cuda": ("inductor", "nccl"),
        "rocm": ("inductor", "nccl"),
        "xpu": ("inductor", "xccl"),
        "mps": ("inductor", "gloo"),
        "hpu": ("hpu_backend", "hccl"),
        "npu": ("inductor", "hccl"),
        "mlu": ("inductor", "cncl"),
        "musa": ("inductor", "mccl"),
        "xla": ("openxla", "xla"),
        "private_use": ("aot_eager", "gloo"),
    }
    assert (platform.record.compile_backend, platform.record.distributed) == expected[platform.key]


@pytest.mark.parametrize("key", [key for key in ALL if key not in {"cpu", "private_use"}])
def test_the_docstring_of_a_record_names_its_source(key):
    docstring = importlib.import_module(f"ftrain.backends.{key}").__doc__
    assert "Source: https://" in docstring
    assert ("Not run on hardware" in docstring) == (key != "cuda")


# Properties of some platforms


@pytest.mark.parametrize(
    ("key", "attributes"),
    [("cuda", {"capability": (7, 5)}), ("xpu", {"bf16": False}), ("npu", {"bf16": False}), ("mlu", {"bf16": False})],
)
def test_an_older_device_has_float16_alone(key, attributes, monkeypatch):
    if is_on_this_machine(key):
        pytest.skip("the device is a real one")
    platform = assemble(key, monkeypatch)
    for name, value in attributes.items():
        monkeypatch.setattr(type(platform.device), name, value)
        monkeypatch.setattr(platform.device, name, value)
    assert platform.record.autocast_dtypes() == (torch.float16,)


def test_the_first_gaudi_has_bfloat16_alone(monkeypatch):
    platform = assemble("hpu", monkeypatch)
    monkeypatch.setattr(platform.device, "device_name", "GAUDI")
    assert platform.record.autocast_dtypes() == (torch.bfloat16,)


def test_tf32_needs_the_hardware(monkeypatch):
    platform = assemble("xpu", monkeypatch)
    monkeypatch.setattr(platform.device, "tensor_float", False)
    assert platform.record.tf32() is None


@pytest.mark.parametrize("mode", ["0", "1", None])
def test_gaudi_marks_the_end_of_a_step_in_lazy_mode_only(mode, monkeypatch):
    platform = assemble("hpu", monkeypatch)
    if mode is None:
        monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    else:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", mode)
    with platform.record.seeded(1):
        assert platform.device.calls == []
    assert platform.device.calls == ["mark_step"] * (mode == "1")


def test_xla_launches_the_queued_operations_at_the_end_of_a_step(monkeypatch):
    platform = assemble("xla", monkeypatch)
    with platform.record.seeded(1):
        assert platform.device.calls == []
    assert platform.device.calls == ["sync"]


def test_xla_without_a_count_of_the_peak(monkeypatch):
    platform = assemble("xla", monkeypatch)
    monkeypatch.setattr(type(platform.device), "get_memory_info", lambda self: {"bytes_used": 5, "bytes_limit": 9})
    assert platform.record.memory() == ft.backends.Memory(5, 5)


def test_the_devices_without_float64():
    missing = {name for name in ft.backends.names() if not registry._records[name].float64}
    assert missing == {"mps", "hpu"}
