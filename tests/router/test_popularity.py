"""Recurring prefixes: what is counted, and how adaptive uses it."""

from __future__ import annotations

import numpy as np
import pytest

from router.fleet.popularity import PrefixPopularity, Recurrence
from tests.support.router.played_fleet import PlayedFleet

PROMPT = np.arange(6000, dtype="<i4")


def recurrence_of(popularity: PrefixPopularity, key: int, now: float) -> Recurrence:
    """The popularity of a prefix as seen by a request being placed."""
    found = popularity.recurrence(key, now)
    assert popularity.recurrence(key, now) == found
    popularity.observe(key, now)
    return found


def test_a_burst_counts_once() -> None:
    popularity = PrefixPopularity()
    assert [recurrence_of(popularity, 5, 1.0).times for _ in range(16)] == [0.0] * 16
    assert recurrence_of(popularity, 5, 1.004).times == 0.0
    assert recurrence_of(popularity, 5, 1.5).times == pytest.approx(2.0)
    assert recurrence_of(popularity, 5, 1.504).times == pytest.approx(2.0)
    assert recurrence_of(popularity, 5, 1.55).times == pytest.approx(3.0, rel=0.01)


def test_what_came_long_ago_counts_less_and_shares_add_up() -> None:
    popularity = PrefixPopularity()
    for second in range(20):
        hot = recurrence_of(popularity, 1, float(second))
        cold = recurrence_of(popularity, 100 + second, second + 0.5)
    assert 6.0 < hot.times < 12.0
    assert hot.share == pytest.approx(0.5, abs=0.1)
    assert cold.times == cold.share == 0.0
    assert recurrence_of(popularity, 1, 1000.0).times == pytest.approx(2.0)


def test_a_prefix_is_compared_with_what_came_since_it_did() -> None:
    popularity = PrefixPopularity()
    for tenth in range(100):
        recurrence_of(popularity, 1, tenth / 10)
    shares = [recurrence_of(popularity, 2, 10.0 + tenth / 10).share for tenth in range(20)]
    assert shares[4] > 0.3
    assert shares[19] > 0.7, "after two seconds, not after WINDOW_S"


def test_a_burst_read_over_a_tenth_of_a_second_is_not_all_of_the_traffic() -> None:
    popularity = PrefixPopularity()
    for second in range(20):
        shares = [recurrence_of(popularity, second, second + 0.006 * n).share for n in range(16)]
    assert 0.0 < shares[-1] < 0.6


def test_only_so_many_prefixes_are_known() -> None:
    popularity = PrefixPopularity()
    for key in range(20_000):
        popularity.observe(key, float(key))
    assert len(popularity._known) == 8192


class Rig(PlayedFleet):
    """Two workers; the first has the prompt cached and has other work."""

    def __init__(self) -> None:
        super().__init__(names=("busy", "idle"))
        self.cache("busy", PROMPT)

    def place(self, number: int) -> str:
        self.load("busy", num_running=8, num_waiting=1, queued_prefill_tokens=1000)
        chosen = self.choose(np.concatenate([PROMPT, np.full(100, number, "<i4")]))
        self.now += 0.2
        return chosen


def test_a_prefix_that_all_keep_asking_for_is_copied() -> None:
    rig = Rig()
    chosen = [rig.place(number) for number in range(60)]
    assert chosen[0] == chosen[1] == "busy"
    assert "idle" in chosen


def test_a_prefix_among_many_others_is_not_copied() -> None:
    rig = Rig()
    chosen = []
    for number in range(60):
        chosen.append(rig.place(number))
        for other in range(3):
            strange = np.full(64, 10_000 + 10 * number + other, "<i4")
            for _ in range(2):  # the second time they are known and count
                rig.choose(strange)
                rig.cache("idle", strange)
                rig.now += 0.15
    assert set(chosen) == {"busy"}
