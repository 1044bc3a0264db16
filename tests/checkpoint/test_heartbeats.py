"""What a rank that waits concludes from what the others tell: that one will not come, or nothing."""

import json
from datetime import timedelta

import pytest

from ftrain.checkpoint.heartbeats import PATIENCE, SILENCE, Heartbeats, heartbeat_key


class Table(dict):
    timeout = timedelta(seconds=600)

    def check(self, keys):
        return all(key in self for key in keys)

    get = dict.__getitem__


def told(beats, **more):
    note = {"number": 3, "doing": "in", "place": "", "failure": "", "has_ended": False, "waits": False}
    note |= {"beats": beats, "results": 0}
    return json.dumps(note | more)


def looks(*others, in_order=True, absent=(1,), every=PATIENCE):
    """What each look at another rank concludes, while this one tells each time that it is in step 3."""
    table = Table()
    heartbeats, actual = Heartbeats(table, 0, 2), []
    for number, other in enumerate(others, 1):
        table[heartbeat_key(0)] = told(number)
        if other is not None:
            table[heartbeat_key(1)] = other
        actual.append(heartbeats.why_absent(lambda: absent, every * number, in_order=in_order))
    return actual


def test_a_rank_that_is_late_may_come():
    assert looks(*(told(beats, number=2) for beats in range(20))) == [""] * 20


def test_a_rank_that_is_further_does_not_come():
    assert looks(told(1, number=4)) == ["rank 1 is in step 4"]
    assert looks(told(1, number=4), in_order=False) == [""]
    assert looks(told(1, number=4), absent=()) == [""]


def test_a_rank_that_waits_elsewhere_does_not_come_if_it_still_waits_later():
    waits = {"doing": "after", "place": ", at the end of evaluate", "waits": True}
    assert looks(told(1, **waits), told(1, **waits)) == ["", ""]
    assert looks(told(1, **waits), told(2, **waits)) == ["", "rank 1 is after step 3, at the end of evaluate"]
    assert looks(told(1, **waits), told(2, **waits), in_order=False) == ["", ""]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_whose_program_has_ended_or_that_is_silent_does_not_come(in_order):
    assert looks(told(1, has_ended=True), in_order=in_order) == ["the program of rank 1 has ended in step 3"]
    *early, late = looks(*[told(1)] * 3, in_order=in_order, every=SILENCE / 2 - 1)
    assert early == ["", ""]
    assert late == "rank 1 died or hangs, and was in step 3 when it was last heard of"
    assert not any(looks(*map(told, range(9)), in_order=in_order, every=SILENCE / 2))


def test_a_rank_that_has_failed_may_have_caught_the_error_and_come_a_little_later():
    failed = [told(beats, failure="ValueError: no") for beats in range(3)]
    assert looks(*failed, every=SILENCE / 2) == ["", *["rank 1 failed in step 3: ValueError: no"] * 2]


def test_ranks_that_tell_nothing_are_waited_for():
    assert looks(None, None, every=SILENCE) == ["", ""]
