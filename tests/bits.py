"""Trees that are equal to the bit."""

import torch

from ftrain import tree


def assert_same_bits(actual, expected):
    """Check that two trees have the same structure, and each leaf the same type, dtype, shape, device and bits.

    So NaN equals itself, and -0.0 does not equal 0.0.
    """
    leaves, structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert structure == expected_structure
    triples = zip(tree.leaf_names(expected), leaves, expected_leaves, strict=True)
    different = [name for name, leaf, expected_leaf in triples if bits(leaf) != bits(expected_leaf)]
    assert not different, f"these leaves differ: {different}"


def bits(leaf):
    """Return a value that is equal for leaves of the same bits."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    numbers = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return leaf.dtype, leaf.shape, leaf.device, numbers.view(torch.uint8).cpu().numpy().tobytes()
