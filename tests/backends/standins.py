"""Stand-ins for the modules of vendors: the functions that each documents, and no more. They log their calls.

They have a generator, memory counts and switches as documented (the records in `ftrain.backends` name the sources), and
compute nothing.
"""

import sys
import types
from contextlib import contextmanager

import torch


class Graph:
    def __init__(self, calls):
        self._calls = calls

    def replay(self):
        self._calls.append("replay")


class Module:
    """The functions of `torch.cuda` that vendors copy."""

    graph_name = ""
    device_name = "Stand-in"

    def __init__(self):
        self.calls, self.is_present, self.generator = [], True, torch.Generator().manual_seed(17)
        if self.graph_name:
            setattr(self, self.graph_name, lambda: self.calls.append("new graph") or Graph(self.calls))

    def is_available(self):
        return self.is_present

    def device_count(self):
        return int(self.is_present)

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return self.device_name

    def synchronize(self, device=None):
        self.calls.append("synchronize")

    def memory_allocated(self, device=None):
        return 1000

    def max_memory_allocated(self, device=None):
        return 3000

    def empty_cache(self):
        self.calls.append("empty_cache")

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, new_state, device=None):
        self.generator.set_state(new_state)

    def draw(self):
        return torch.rand(3, generator=self.generator)


class Graphs:
    stream = "the default stream"

    def graph_pool_handle(self):
        self.calls.append("pool")
        return (0, 7)

    def Stream(self):  # noqa: N802
        return object()

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    @contextmanager
    def graph(self, graph, pool=None, stream=None):
        """As torch does, stay on its stream when the recording fails."""
        assert isinstance(graph, Graph)
        assert pool == (0, 7)
        previous, self.stream = self.stream, stream
        self.calls.append("capture")
        yield
        self.calls.append("captured")
        self.stream = previous


class Cuda(Graphs, Module):
    graph_name, capability = "CUDAGraph", (9, 0)

    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        assert capture_error_mode == "thread_local"
        return super().graph(graph, pool, stream)

    def __init__(self):
        super().__init__()
        self.default_generators = (self.generator,)

    def get_device_capability(self, device=None):
        return self.capability


class Xpu(Graphs, Module):
    graph_name, bf16, tensor_float = "XPUGraph", True, True

    def is_bf16_supported(self, including_emulation=True):
        return self.bf16

    def is_tf32_supported(self):
        return self.tensor_float


class Mps(Module):
    """One device, without a name and without a count of peak memory."""

    get_device_name = memory_allocated = max_memory_allocated = property()

    def current_allocated_memory(self):
        return 1000

    def driver_allocated_memory(self):
        return 4000


class Hpu(Module):
    """The functions of the generator are in a submodule, and there is no empty_cache."""

    device_name = "GAUDI2"
    empty_cache = manual_seed = get_rng_state = set_rng_state = property()

    def __init__(self):
        super().__init__()
        self.random = types.SimpleNamespace(
            manual_seed=self.generator.manual_seed,
            get_rng_state=self.generator.get_state,
            set_rng_state=self.generator.set_state,
        )

    def mark_step(self, device_str="", sync=False):
        self.calls.append("mark_step")


class Npu(Graphs, Module):
    graph_name, bf16 = "NPUGraph", True

    def get_amp_supported_dtype(self):
        return [torch.float16, *([torch.bfloat16] if self.bf16 else []), torch.float32]


class Mlu(Graphs, Module):
    graph_name, bf16 = "MLUGraph", True

    def is_bf16_supported(self):
        return self.bf16


class Musa(Graphs, Module):
    graph_name, bf16 = "MUSAGraph", True

    def get_amp_supported_dtype(self):
        return [torch.float16, *([torch.bfloat16] if self.bf16 else [])]


class Xla:
    """A package, not a module `torch.xla`. The state of its generator is an integer."""

    def __init__(self):
        self.calls, self.is_present, self.state = [], True, 17

    def device_count(self):
        return int(self.is_present)

    def sync(self, wait=False, reset_scope=True):
        self.calls.append("synchronize" if wait else "sync")

    def get_rng_state(self, device=None):
        return self.state

    def set_rng_state(self, seed, device=None):
        assert 0 <= seed < 2**64
        self.state = seed

    def get_memory_info(self, device=None):
        return {"bytes_used": 1000, "bytes_limit": 16000, "peak_bytes_used": 3000}

    def draw(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return torch.tensor(self.state >> 1)


PACKAGES = {
    "hpu": "habana_frameworks.torch",
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "xla": "torch_xla",
}
MODULES = {"cuda": Cuda, "rocm": Cuda, "xpu": Xpu, "mps": Mps, "hpu": Hpu, "npu": Npu, "mlu": Mlu, "musa": Musa}


def install(name, monkeypatch):
    """Install the stand-in where the vendor installs the real module, and return it."""
    if name == "xla":
        standin = Xla()
        for package in ("torch_xla", "torch_xla.core.xla_model"):
            monkeypatch.setitem(sys.modules, package, standin)
        monkeypatch.setitem(sys.modules, "torch_xla.runtime", types.SimpleNamespace(device_type=lambda: "TPU"))
        return standin
    standin = MODULES[name]()
    device = "cuda" if name == "rocm" else name
    if name in {"cuda", "rocm", "xpu", "mps"}:
        # Single functions are replaced, because torch itself needs the others of its module.
        for attribute in dir(standin):
            if not attribute.startswith("_") and not isinstance(getattr(type(standin), attribute, None), property):
                monkeypatch.setattr(getattr(torch, device), attribute, getattr(standin, attribute), raising=False)
        if name == "xpu":
            # Torch warns when this is set in a build without Intel's GPUs.
            mkldnn = types.SimpleNamespace(allow_tf32=False, matmul=types.SimpleNamespace(fp32_precision="none"))
            monkeypatch.setattr(torch.backends, "mkldnn", mkldnn)
        return standin
    get_module = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda of=None: standin if of == device else get_module(of))
    package = PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.core", standin)
    if name == "mlu":
        switch = types.SimpleNamespace(matmul=types.SimpleNamespace(allow_tf32=False))
        monkeypatch.setattr(torch.backends, "mlu", switch, raising=False)
    if name == "musa":
        monkeypatch.setattr(torch.backends, "mudnn", types.SimpleNamespace(allow_tf32=False), raising=False)
    return standin
