"""Which cases of a test only `make test-all` runs."""

import pytest


def exhaustive(cases):
    """Mark each case, a value of one argument, as more of what the other cases prove."""
    return [pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def exhaustive_rows(rows):
    """Mark each case, a value of each of several arguments, as more of what the other cases prove."""
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


def choose(cases, chosen):
    """Mark the cases that are not among the chosen ones.

    Raises:
        ValueError: when one of the chosen is no case.
    """
    unknown = [case for case in chosen if case not in cases]
    if unknown:
        raise ValueError(f"choose: {unknown} are not among the cases")
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]
