"""What the tests of optimizers with moments or parameters in 16 or 8 bits share: updates, and comparisons."""

import torch

from ftrain import random, tree
from ftrain.optim.grouping import BLOCK

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
PATHS = ["eager", "donated", "unfused", "unread", "graph"]


def randn(shape, seed, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(optimizer, params, path="eager", steps=4, size=1.0, seed=0):
    """Make `steps` updates with gradients and keys that depend on the step alone; return parameters and state."""
    params, state = tree.clone(params), optimizer.init(params)
    for step in range(steps):
        grads = {
            name: size * randn(leaf.shape, 100 * step + i, leaf.dtype) for i, (name, leaf) in enumerate(params.items())
        }
        rate = torch.tensor(0.01, dtype=F64) if path == "graph" else 0.01
        hyper = {"lr": rate, "rng": random.fold_in(random.key(seed), step)}
        params, state = optimizer.update(grads, state, params, hyper, donate=path == "donated")
    return params, state


def make_params(dtype=F32):
    shapes = {"long": (BLOCK + 5,), "matrix": (70, 90), "odd": (61, 71), "vector": (130,), "one": (1,), "empty": (0, 3)}
    return {name: randn(shape, index, dtype) for index, (name, shape) in enumerate(shapes.items())}


def assert_bitwise(actual, expected):
    for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def adamw_reference(p, g, m, v, t, *, store, decay=0.0):
    """Return parameter and moments after step `t` of AdamW (Loshchilov and Hutter 2019), computed in float64.

    `store(name, value)` rounds each of them to the dtype in which it is stored.
    """
    p, g, m, v = (x.double() for x in (p, g, m, v))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    p = p - 0.01 * decay * p - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return store("p", p), store("mu", m), store("nu", v)


def assert_rounded(actual, expected, share=0.01):
    """Assert that bfloat16 values or codes are equal, but for a share that was rounded in the other direction."""
    assert actual.dtype == expected.dtype
    assert int((actual != expected).sum()) <= share * actual.numel()
    if actual.dtype == BF16:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-7)
