"""SGD and AdamW of ftrain and of torch with the same options, and the parameters and gradients they are compared on."""

import functools

import torch

import ftrain as ft
from ftrain import tree
from tests.parity.fifty_steps import F64, STEPS, TIGHT

LR = 0.05
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


SGD = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "momentum-decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "nesterov-decay": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}
ADAMW = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "betas": {"b1": 0.8, "b2": 0.95},
    "no-first-moment": {"b1": 0.0, "b2": 0.9},
    "eps": {"eps": 1e-2, "weight_decay": 0.1},
}
CASES = [("sgd", name) for name in SGD] + [("adamw", name) for name in ADAMW]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def make_params(dtype=F64, *, turned=False):
    """Return parameters of ranks 0 to 4, contiguous or channels-last, or with one transposed if `turned`."""
    draw = generator(0)

    def randn(*shape):
        return torch.randn(shape, generator=draw, dtype=F64).to(dtype)

    return {
        "scalar": randn(),
        "vector": randn(5),
        "matrix": randn(4, 3),
        "transposed": randn(3, 5).t() if turned else randn(3, 5).t().contiguous(),
        "image": randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "nested": [randn(6, 2), (randn(3, 3), randn(7))],
        "empty": randn(0),
        "hollow": randn(0, 3),
    }


@functools.cache
def make_grads(step, dtype=F64):
    """Return the gradients of a step in all layouts that autograd makes: transposed, expanded, strided, contiguous."""
    draw = generator(1000 + step)

    def randn(*shape):
        return torch.randn(shape, generator=draw, dtype=F64).to(dtype)

    return {
        "scalar": randn(),
        "vector": randn(10)[::2],
        "matrix": randn(3, 4).t(),
        "transposed": randn(5, 3),
        "image": randn(2, 3, 4, 4),
        "nested": [randn(6, 1).expand(6, 2), (randn().expand(3, 3), randn(1).expand(7))],
        "empty": randn(0),
        "hollow": randn(3, 0).t(),
    }


def make_optimizer(family, case, lr=LR):
    return ft.optim.sgd(lr, **SGD[case]) if family == "sgd" else ft.optim.adamw(lr, **ADAMW[case])


def torch_options(family, case, *, decay):
    """Return the options of a case for a parameter group of torch, with weight decay or without."""
    if family == "sgd":
        return dict(SGD[case])
    options = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0, **ADAMW[case]}
    betas = options.pop("b1"), options.pop("b2")
    return {**options, "betas": betas, "weight_decay": options["weight_decay"] if decay else 0.0}


def make_theirs(family, case, leaves, **more):
    """Return the optimizer of torch; under AdamW, parameters with fewer than two axes do not decay, as usual."""
    optimizer_class = torch.optim.SGD if family == "sgd" else torch.optim.AdamW
    groups = [
        {"params": [leaf for leaf in leaves if (leaf.ndim >= 2) == decay], **torch_options(family, case, decay=decay)}
        for decay in (True, False)
    ]
    return optimizer_class(groups, lr=LR, **more)


def trainable_leaves(params):
    """Return copies of the leaves that require gradients."""
    return [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]


def set_grads(leaves, grads):
    """Set the gradients of parameters of torch to those of a tree."""
    for leaf, grad in zip(leaves, tree.leaves(grads), strict=True):
        leaf.grad = grad


def assert_equals_theirs(params, leaves, tolerance=TIGHT):
    """Assert that a tree has the values of the parameters of torch."""
    torch.testing.assert_close(tree.leaves(params), [leaf.detach() for leaf in leaves], **tolerance)


def train_theirs(family, case, *, dtype=F64, steps=STEPS, **more):
    """Train with the optimizer of torch, and return the parameters and the state of each."""
    leaves = trainable_leaves(make_params(dtype))
    optimizer = make_theirs(family, case, leaves, **more)
    for step in range(steps):
        set_grads(leaves, make_grads(step, dtype))
        optimizer.step()
    return leaves, [optimizer.state[leaf] for leaf in leaves]
