"""A device of host memory, a toy: what torch asks of a PrivateUse1 device, in Python, so that a machine without any
accelerator has one. Its kernels are the CPU's, on the same bytes: what it computes must equal the CPU to the bit.

Registered by `torch.utils.backend_registration._setup_privateuseone_for_python_backend`; once, for a whole process.
"""

import functools
import weakref

import optree
import torch

LOWERED = "linear", "matmul", "mm", "addmm", "bmm"
HOST = torch.device("cpu")

# Libraries of kernels are gone when nobody holds them.
_libraries = []


class Module:
    """What vendors put at torch.<name>, as far as torch and ftrain ask for it."""

    def __init__(self, name):
        self.name, self.generator = name, torch.Generator()
        self.ops, self.float64 = set(), True
        self.current = self.peak = 0

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def _is_in_bad_fork(self):
        return False

    def get_device_name(self, device=None):
        return "Toy"

    def manual_seed_all(self, seed):
        self.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        return self.generator.get_state()

    def set_rng_state(self, state, device=None):
        self.generator.set_state(state)

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device=None):
        self.ops.add("synchronize")

    def memory_allocated(self, device=None):
        return self.current

    def max_memory_allocated(self, device=None):
        return self.peak

    def take(self, count):
        self.current += count
        self.peak = max(self.peak, self.current)


def register(name="toy"):
    """Make torch know the device, and return its module."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = Module(name)
    _setup_privateuseone_for_python_backend(name, module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: _run(module, op, args, kwargs), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    lowered = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for op in LOWERED:
        lowered.impl(op, _lower(name, getattr(torch.ops.aten, op).default))
    _libraries.extend([everything, lowered])
    return module


def _on_ours(leaf):
    return isinstance(leaf, torch.Tensor) and _is_ours(leaf.device)


def _is_ours(device):
    return device.type == torch._C._get_privateuse1_backend_name()


def _run(module, op, args, kwargs):
    """One operation: the host's kernel on the host's view of the same memory."""
    module.ops.add(str(op))
    leaves, spec = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    hosted = [_host(leaf) for leaf in leaves]
    _refuse_float64(module, hosted)
    given, named = optree.tree_unflatten(spec, hosted)
    if _takes_generator(op) and named.get("generator") is None:
        named["generator"] = module.generator
    with torch._C._AutoDispatchBelowAutograd():
        if op is torch.ops.aten._copy_from.default:
            given[1].copy_(given[0])
            return args[1]
        # Numbers that stand for tensors reach Python as numbers: the overload for those is meant.
        numbers = any(type(given[place]) in (int, float, bool) for place in _tensors(op) if place < len(given))
        outputs = (op.overloadpacket if numbers else op)(*given, **named)
    ours = [(leaf, host) for leaf, host in zip(leaves, hosted, strict=True) if _on_ours(leaf)]
    for leaf, host in ours:
        _follow(module, leaf, host)
    outputs, spec = optree.tree_flatten(outputs, none_is_leaf=True)
    _refuse_float64(module, outputs)
    return optree.tree_unflatten(spec, [_wrap(module, output, ours) for output in outputs])


@functools.cache
def _takes_generator(op):
    return any(each.name == "generator" for each in op._schema.arguments)


@functools.cache
def _tensors(op):
    """Places of the arguments that are tensors."""
    return [place for place, each in enumerate(op._schema.arguments) if isinstance(each.type, torch.TensorType)]


def _refuse_float64(module, leaves):
    if not module.float64 and any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves):
        raise TypeError("toy: there is no float64 here")


def _host(leaf):
    """What the host's kernel gets for an argument."""
    if _on_ours(leaf):
        memory = leaf.untyped_storage().memory
        return torch.empty(0, dtype=leaf.dtype).set_(memory, leaf.storage_offset(), leaf.shape, leaf.stride())
    return HOST if isinstance(leaf, torch.device) and _is_ours(leaf) else leaf


def _wrap(module, output, ours):
    """The device's tensor for what a kernel has returned: an argument, a view of one, or something new."""
    if not isinstance(output, torch.Tensor):
        return output
    storage = None
    for leaf, host in ours:
        if output is host:
            return leaf
        if output.untyped_storage()._cdata == host.untyped_storage()._cdata:
            storage = leaf.untyped_storage()
    return _place(torch._C._acc.create_empty_tensor([0], output.dtype), storage or _storage(module, output), output)


def _follow(module, leaf, host):
    """An operation may have given its argument another shape or memory."""
    memory = leaf.untyped_storage().memory
    if memory._cdata != host.untyped_storage()._cdata or memory.nbytes() != leaf.untyped_storage().nbytes():
        _place(leaf, _storage(module, host), host)
    elif host.shape != leaf.shape or host.stride() != leaf.stride():
        _place(leaf, leaf.untyped_storage(), host)


def _storage(module, host):
    """A storage of the device on the memory of a tensor of the host, which it keeps."""
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(module.name, 0), memory.nbytes()
    )
    storage.memory = memory
    module.take(memory.nbytes())
    weakref.finalize(storage, module.take, -memory.nbytes())
    return storage


def _place(leaf, storage, host):
    """Let a tensor of the device see its storage as one of the host sees its own."""
    # The host's kernel looks at shapes only, and takes tensors of any device.
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
        leaf,
        storage,
        host.storage_offset(),
        host.shape,
        host.stride(),
    )


def _lower(name, op):
    """In autocast: the operation in the narrow dtype."""

    def lowered(*args):
        dtype = torch.get_autocast_dtype(name)
        wide = lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32  # noqa: E731
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*[leaf.to(dtype) if wide(leaf) else leaf for leaf in args])

    return lowered
