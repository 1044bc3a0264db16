"""Mark the cases of a test that only `make test-all` runs."""

import pytest


def exhaustive(cases):
    """Return the cases of one argument, each marked: they prove the same as the cases that are not marked."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def exhaustive_rows(rows):
    """Return the cases of several arguments, each a row of values, and each marked."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


def choose(cases, chosen):
    """Return the cases, of which those that are not chosen are marked.

    Raises:
        ValueError: when a chosen case is not among the cases.
    """
    unknown = [case for case in chosen if case not in cases]
    if unknown:
        raise ValueError(f"choose: {unknown} are not among the cases")
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
