"""Comparisons of states, and of a module with its snapshot."""

import torch

import ftrain as ft


def assert_same_bits(actual, expected):
    """Check that two trees, such as states or their parameters, have the same leaves."""
    names = ft.tree.leaf_names(expected)
    assert ft.tree.leaf_names(actual) == names
    for name, a, b in zip(names, ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, name


def tensors_of(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def snapshot(module):
    """Return what a step must not change in a module: identities and values of tensors, flags, and attributes."""
    params = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors = tensors_of(module)
    return {
        "ids": {name: id(tensor) for name, tensor in {**params, **buffers}.items()},
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "versions": {name: tensor._version for name, tensor in tensors.items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "grads": {name: tensor.grad for name, tensor in params.items()},
        "training": [part.training for part in module.modules()],
        "attributes": [sorted(vars(part)) for part in module.modules()],
        "absent_buffers": [{key: value is None for key, value in part._buffers.items()} for part in module.modules()],
        "types": [type(part) for part in module.modules()],
    }


def assert_unchanged(module, before):
    """Check a module against its snapshot from before."""
    after = snapshot(module)
    assert_same_bits(after["values"], before["values"])
    for name in before:
        if name != "values":
            assert after[name] == before[name], name
