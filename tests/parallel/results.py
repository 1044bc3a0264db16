"""Compare what ranks have trained with what one rank trains."""

import pytest
import torch

from ftrain import tree

NARROW = 2e-3
"""The tolerance for wrappers that compute in 16 bits: sums over ranks round differently than one sum."""


def assert_near(results, expected, tolerance=1e-12):
    """Check the whole state and the history of every rank against those of one rank, as `models.train` returns them."""
    expected_state, expected_history = expected
    for state, history in results:
        for part in ("params", "frozen", "buffers", "opt_state", "slots"):
            assert_leaves_near(getattr(state, part), getattr(expected_state, part), tolerance)
        assert_histories_near(history, expected_history, tolerance)


def assert_leaves_near(actual, expected, tolerance=1e-12):
    """Check that two trees have the same structure and dtypes, and the same numbers within a tolerance."""
    leaves, structure = tree.flatten(actual)
    expected_leaves, expected_structure = tree.flatten(expected)
    assert structure == expected_structure
    torch.testing.assert_close(leaves, expected_leaves, rtol=tolerance, atol=tolerance)


def assert_histories_near(history, expected, tolerance=1e-12):
    """Check that the same steps have the same metrics, and the same numbers within a tolerance; NaN equals itself."""
    assert len(history) == len(expected)
    for metrics, expected_metrics in zip(history, expected, strict=True):
        assert metrics == pytest.approx(expected_metrics, rel=tolerance, abs=tolerance, nan_ok=True)
