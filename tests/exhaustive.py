"""Mark the cases of a test that only `make test-all` runs."""

import pytest


def exhaustive(cases):
    """Mark each case, a value of one argument: it proves the same as the cases that are not marked."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def exhaustive_rows(rows):
    """Mark each case, a row with a value for each of several arguments."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


def choose(cases, chosen):
    """Mark the cases that are not among the chosen ones.

    Raises:
        ValueError: when a chosen case is not among the cases.
    """
    unknown = [case for case in chosen if case not in cases]
    if unknown:
        raise ValueError(f"choose: {unknown} are not among the cases")
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
