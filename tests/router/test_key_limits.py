"""Rates of API keys and requests that they may have open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys import KeyEntry, KeyLimits


def entry(**limits: float) -> KeyEntry:
    return KeyEntry(name="team", digests=(b"x",), **limits)


def test_requests_open_at_a_time() -> None:
    use = KeyLimits().of(entry(max_concurrent_requests=2))
    assert [use.begin(0.0) is None for _ in range(3)] == [True, True, False]
    use.end()
    assert use.begin(0.0) is None


def test_requests_come_back_evenly() -> None:
    use = KeyLimits().of(entry(requests_per_minute=60))
    assert [use.begin(0.0) is None for _ in range(61)] == [True] * 60 + [False]
    refused = use.begin(0.5)
    assert refused is not None
    assert "60 requests per minute" in refused.message
    assert refused.retry_after_s == 1
    assert use.begin(1.0) is None
    assert use.begin(1.0) is not None


def test_a_long_answer_is_paid_for_by_those_that_follow() -> None:
    use = KeyLimits().of(entry(tokens_per_minute=600))
    assert use.begin(0.0) is None
    use.spend(700, 0.0)
    refused = use.begin(0.0)
    assert refused is not None
    assert refused.retry_after_s == 10
    assert use.begin(9.9) is not None
    assert use.begin(10.1) is None


def test_gateways_have_a_part_each() -> None:
    limits = KeyLimits(num_gateways=2)
    use = limits.of(entry(requests_per_minute=10, max_concurrent_requests=3))
    assert [use.begin(0.0) is None for _ in range(3)] == [True, True, False], "half of 3 is 2"
    for _ in range(2):
        use.end()
    assert [use.begin(0.0) is None for _ in range(3)] == [True, True, False]
    told = dict(use.headers(0.0))
    assert told[b"x-ratelimit-limit-requests"] == b"10"
    assert told[b"x-ratelimit-remaining-requests"] == b"2"


def test_other_limits_hold_at_once_and_keep_what_is_open() -> None:
    limits = KeyLimits()
    use = limits.of(entry(requests_per_minute=1))
    assert use.begin(0.0) is None
    assert use.begin(0.0) is not None
    changed = entry(requests_per_minute=600, max_concurrent_requests=1)
    assert limits.of(changed) is use
    assert use.begin(60.0) is not None, "the first one is still open"
    use.end()
    assert use.begin(60.0) is None
    limits.keep(())
    assert limits.of(changed) is not use
    use.end()


def test_without_limits_nothing_is_told() -> None:
    use = KeyLimits().of(entry())
    assert use.headers(0.0) == []
    assert all(use.begin(0.0) is None for _ in range(1000))


@given(
    rate=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=200),
)
def test_no_more_than_the_rate_and_one_minute_s_worth(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    use = KeyLimits().of(entry(tokens_per_minute=rate))
    now, used, last = 0.0, 0, 0
    for wait_s, tokens in steps:
        now += wait_s
        if use.begin(now) is None:
            use.spend(tokens, now)
            used, last = used + tokens, tokens
            use.end()
    assert used - last <= rate + rate * now / 60.0 + 1e-6


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
@given(wait_s=st.floats(0, 1e6), rate=st.integers(1, 10**6))
def test_after_retry_after_it_is_let_in(limit: str, wait_s: float, rate: int) -> None:
    use = KeyLimits().of(entry(**{limit: rate}))
    now = wait_s
    while (refused := use.begin(now)) is None:
        use.spend(2 * rate, now)
        use.end()
        if limit == "requests_per_minute":
            use.requests.take(rate, now)
    assert use.begin(now + refused.retry_after_s + 1e-3) is None
