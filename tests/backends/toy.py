"""A PrivateUse1 device in host memory, written in Python, so that a machine without any accelerator has one.

Its kernels are the CPU's, on the same bytes, so its results must have the bits of the CPU's. It is registered by
`torch.utils.backend_registration._setup_privateuseone_for_python_backend`, once for a whole process.
"""

import functools
import weakref

import optree
import torch

AUTOCAST_OPS = "linear", "matmul", "mm", "addmm", "bmm"
HOST = torch.device("cpu")

# Torch removes the kernels of a library that is garbage collected.
_libraries = []


class Module:
    """The module ``torch.<name>``, with the functions that torch and ftrain need."""

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
    """Register the device with torch, and return its module."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module = Module(name)
    _setup_privateuseone_for_python_backend(name, module)
    all_ops = torch.library.Library("_", "IMPL")
    all_ops.fallback(lambda op, *args, **kwargs: _run(module, op, args, kwargs), "PrivateUse1")
    all_ops.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    autocast_ops = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for op in AUTOCAST_OPS:
        autocast_ops.impl(op, _under_autocast(name, getattr(torch.ops.aten, op).default))
    _libraries.extend([all_ops, autocast_ops])
    return module


def _is_on_toy(leaf):
    return isinstance(leaf, torch.Tensor) and _is_toy(leaf.device)


def _is_toy(device):
    return device.type == torch._C._get_privateuse1_backend_name()


def _run(module, op, args, kwargs):
    """Run an operation: the host's kernel on host tensors of the same memory."""
    module.ops.add(str(op))
    leaves, spec = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    host_leaves = [_on_host(leaf) for leaf in leaves]
    _refuse_float64(module, host_leaves)
    host_args, host_kwargs = optree.tree_unflatten(spec, host_leaves)
    if _takes_generator(op) and host_kwargs.get("generator") is None:
        host_kwargs["generator"] = module.generator
    with torch._C._AutoDispatchBelowAutograd():
        if op is torch.ops.aten._copy_from.default:
            host_args[1].copy_(host_args[0])
            return args[1]
        # A number in the place of a tensor reaches Python as a number, for which there is another overload.
        has_number = any(
            type(host_args[index]) in (int, float, bool) for index in _tensor_arguments(op) if index < len(host_args)
        )
        outputs = (op.overloadpacket if has_number else op)(*host_args, **host_kwargs)
    pairs = [(leaf, host) for leaf, host in zip(leaves, host_leaves, strict=True) if _is_on_toy(leaf)]
    for leaf, host in pairs:
        _update(module, leaf, host)
    outputs, spec = optree.tree_flatten(outputs, none_is_leaf=True)
    _refuse_float64(module, outputs)
    return optree.tree_unflatten(spec, [_on_device(module, output, pairs) for output in outputs])


@functools.cache
def _takes_generator(op):
    return any(argument.name == "generator" for argument in op._schema.arguments)


@functools.cache
def _tensor_arguments(op):
    """Return the indices of the arguments that are tensors."""
    arguments = op._schema.arguments
    return [index for index, argument in enumerate(arguments) if isinstance(argument.type, torch.TensorType)]


def _refuse_float64(module, leaves):
    if not module.float64 and any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves):
        raise TypeError("toy: there is no float64 here")


def _on_host(leaf):
    """Return an argument for the host's kernel: a tensor of the same memory, or the host for the device."""
    if _is_on_toy(leaf):
        memory = leaf.untyped_storage().memory
        return torch.empty(0, dtype=leaf.dtype).set_(memory, leaf.storage_offset(), leaf.shape, leaf.stride())
    return HOST if isinstance(leaf, torch.device) and _is_toy(leaf) else leaf


def _on_device(module, output, pairs):
    """Return the device's tensor for an output of a kernel.

    The output may be an argument, a view of an argument, or new. `pairs` are the arguments on the device and the host.
    """
    if not isinstance(output, torch.Tensor):
        return output
    storage = None
    for leaf, host in pairs:
        if output is host:
            return leaf
        if output.untyped_storage()._cdata == host.untyped_storage()._cdata:
            storage = leaf.untyped_storage()
    return _place(torch._C._acc.create_empty_tensor([0], output.dtype), storage or _storage(module, output), output)


def _update(module, leaf, host):
    """Update an argument of the device, since an operation may have given it another shape or memory on the host."""
    memory = leaf.untyped_storage().memory
    if memory._cdata != host.untyped_storage()._cdata or memory.nbytes() != leaf.untyped_storage().nbytes():
        _place(leaf, _storage(module, host), host)
    elif host.shape != leaf.shape or host.stride() != leaf.stride():
        _place(leaf, leaf.untyped_storage(), host)


def _storage(module, host):
    """Return a storage of the device on the memory of a tensor of the host, which it keeps alive."""
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device(module.name, 0), memory.nbytes()
    )
    storage.memory = memory
    module.take(memory.nbytes())
    weakref.finalize(storage, module.take, -memory.nbytes())
    return storage


def _place(leaf, storage, host):
    """Set the storage of a tensor of the device, with the offset, shape and strides of a tensor of the host."""
    # The host's kernel reads shapes only, and takes tensors of any device.
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
        leaf,
        storage,
        host.storage_offset(),
        host.shape,
        host.stride(),
    )


def _under_autocast(name, op):
    """Return the operation as autocast runs it: float32 tensors are cast to the dtype of autocast."""

    def is_float32(leaf):
        return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32

    def run(*args):
        dtype = torch.get_autocast_dtype(name)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*[leaf.to(dtype) if is_float32(leaf) else leaf for leaf in args])

    return run
