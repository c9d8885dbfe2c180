"""Rate and concurrency limits of API keys at one gateway."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.keys import KeyEntry, KeyLimits, KeyUse


def entry(**limits: float) -> KeyEntry:
    return KeyEntry(name="team", digests=(b"x",), **limits)


class Clock:
    """A fake clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Team:
    """One key at a single gateway, so that nothing waits."""

    def __init__(self, **limits: float) -> None:
        self.clock = Clock()
        self.limits = KeyLimits(clock=self.clock)
        self.use: KeyUse = self.limits.of(entry(**limits))

    async def begin(self, now: float = 0.0) -> ApiError | None:
        self.clock.now = now
        try:
            await self.use.begin_request()
        except ApiError as error:
            return error
        return None

    async def begins(self, number: int, now: float = 0.0) -> int:
        """Number of admitted requests out of `count`."""
        return sum([await self.begin(now) is None for _ in range(number)])


async def test_requests_open_at_a_time() -> None:
    team = Team(max_concurrent_requests=2)
    assert await team.begins(3) == 2
    team.use.end_request()
    assert await team.begin() is None


async def test_requests_come_back_evenly() -> None:
    team = Team(requests_per_minute=60)
    assert await team.begins(61) == 60
    refused = await team.begin(0.5)
    assert refused is not None
    assert "60 requests per minute" in refused.message
    assert refused.retry_after_s == 1
    assert await team.begin(1.0) is None
    assert await team.begin(1.0) is not None


async def test_a_long_answer_is_paid_for_by_those_that_follow() -> None:
    team = Team(tokens_per_minute=600)
    assert await team.begin() is None
    team.use.spend(700)
    refused = await team.begin()
    assert refused is not None
    assert refused.retry_after_s == 10
    assert await team.begin(9.9) is not None
    assert await team.begin(10.1) is None


async def test_headers_have_what_is_left() -> None:
    team = Team(requests_per_minute=10, tokens_per_minute=600)
    assert await team.begins(3) == 3
    team.use.spend(100)
    shown = dict(team.use.headers())
    assert shown[b"x-ratelimit-limit-requests"] == b"10"
    assert shown[b"x-ratelimit-remaining-requests"] == b"7"
    assert shown[b"x-ratelimit-reset-requests"] == b"18.000s"
    assert shown[b"x-ratelimit-remaining-tokens"] == b"500"


async def test_other_limits_hold_at_once_and_keep_what_is_open() -> None:
    team = Team(requests_per_minute=1)
    assert await team.begins(2) == 1
    changed = entry(requests_per_minute=600, max_concurrent_requests=1)
    assert team.limits.of(changed) is team.use
    assert await team.begin(60.0) is not None, "the first one is still open"
    team.use.end_request()
    assert await team.begin(60.0) is None
    team.limits.keep(())
    assert team.limits.of(changed) is not team.use
    team.use.end_request()


async def test_without_limits_nothing_is_reported() -> None:
    team = Team()
    assert team.use.headers() == []
    assert await team.begins(1000) == 1000


@given(
    rate=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=200),
)
def test_no_more_than_the_rate_and_one_minute_s_worth(
    rate: int, steps: list[tuple[float, int]]
) -> None:
    async def run() -> None:
        team = Team(tokens_per_minute=rate)
        now, used, last = 0.0, 0, 0
        for wait_s, tokens in steps:
            now += wait_s
            if await team.begin(now) is None:
                team.use.spend(tokens)
                used, last = used + tokens, tokens
                team.use.end_request()
        assert used - last <= rate + rate * now / 60.0 + 1e-6

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
@given(wait_s=st.floats(0, 1e6), rate=st.integers(1, 2000))
def test_after_retry_after_it_is_let_in(limit: str, wait_s: float, rate: int) -> None:
    async def run() -> None:
        team = Team(**{limit: rate})
        while (refused := await team.begin(wait_s)) is None:
            team.use.spend(2 * rate)
            team.use.end_request()
        assert refused.retry_after_s is not None
        assert await team.begin(wait_s + refused.retry_after_s + 1e-3) is None

    asyncio.run(run())
