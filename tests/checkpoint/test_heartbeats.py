"""The reason that a waiting rank reads from heartbeats why another rank cannot arrive; "" if it still may."""

import json
from datetime import timedelta

import pytest

from ftrain.checkpoint.heartbeats import PATIENCE, SILENCE, Heartbeats, heartbeat_key


class Store(dict):
    """Stands for the store of torch's process group."""

    timeout = timedelta(seconds=600)

    def check(self, keys):
        return all(key in self for key in keys)

    get = dict.__getitem__


def heartbeat(beats, **fields):
    note = {"number": 3, "doing": "in", "place": "", "failure": "", "has_ended": False, "waits": False}
    note |= {"beats": beats, "results": 0}
    return json.dumps(note | fields)


def reasons(*heartbeats_of_1, in_order=True, absent=(1,), every=PATIENCE):
    """Return the reason after each heartbeat of rank 1 (None for no new one), while rank 0 is in step 3."""
    store = Store()
    heartbeats, results = Heartbeats(store, 0, 2), []
    for number, heartbeat_of_1 in enumerate(heartbeats_of_1, 1):
        store[heartbeat_key(0)] = heartbeat(number)
        if heartbeat_of_1 is not None:
            store[heartbeat_key(1)] = heartbeat_of_1
        results.append(heartbeats.why_absent(lambda: absent, every * number, in_order=in_order))
    return results


def test_a_rank_in_an_earlier_step_may_still_arrive():
    assert reasons(*(heartbeat(beats, number=2) for beats in range(20))) == [""] * 20


def test_a_rank_in_a_later_step_cannot_arrive():
    assert reasons(heartbeat(1, number=4)) == ["rank 1 is in step 4"]
    assert reasons(heartbeat(1, number=4), in_order=False) == [""]
    assert reasons(heartbeat(1, number=4), absent=()) == [""]


def test_a_rank_that_waits_at_another_point_cannot_arrive_once_it_has_a_new_heartbeat():
    waits = {"doing": "after", "place": ", at the end of evaluate", "waits": True}
    assert reasons(heartbeat(1, **waits), heartbeat(1, **waits)) == ["", ""]
    assert reasons(heartbeat(1, **waits), heartbeat(2, **waits)) == [
        "",
        "rank 1 is after step 3, at the end of evaluate",
    ]
    assert reasons(heartbeat(1, **waits), heartbeat(2, **waits), in_order=False) == ["", ""]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_rank_that_has_ended_or_is_silent_cannot_arrive(in_order):
    assert reasons(heartbeat(1, has_ended=True), in_order=in_order) == ["the program of rank 1 has ended in step 3"]
    *early, late = reasons(*[heartbeat(1)] * 3, in_order=in_order, every=SILENCE / 2 - 1)
    assert early == ["", ""]
    assert late == "rank 1 died or hangs, and was in step 3 when it was last heard of"
    assert not any(reasons(*map(heartbeat, range(9)), in_order=in_order, every=SILENCE / 2))


def test_a_rank_that_has_failed_may_arrive_for_some_time_since_it_may_have_caught_the_error():
    failed = [heartbeat(beats, failure="ValueError: no") for beats in range(3)]
    assert reasons(*failed, every=SILENCE / 2) == ["", *["rank 1 failed in step 3: ValueError: no"] * 2]


def test_ranks_without_heartbeats_are_waited_for():
    assert reasons(None, None, every=SILENCE) == ["", ""]
