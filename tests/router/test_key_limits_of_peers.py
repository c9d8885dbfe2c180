"""Limits of API keys across gateways: exact, also when gateways join, stop and crash."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ApiError
from router.keys import KeyEntry, KeyLimits, KeyUse
from router.keys import limits as limits_module
from router.keys import use as use_module
from tests.support.router.peer_network import PeerNetwork

NAMES = ("gw-a", "gw-b", "gw-c")


class Fleet:
    """Gateways that share key limits."""

    def __init__(self, *names: str, **limits: float) -> None:
        self.network = PeerNetwork()
        self.now = 0.0
        self.entry = KeyEntry(name="team", digests=(b"x",), **limits)
        self.limits: dict[str, KeyLimits] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.limits[name] = KeyLimits(self.network.join(name), lambda: self.now)

    def use(self, name: str) -> KeyUse:
        return self.limits[name].of(self.entry)

    @property
    def owner(self) -> str:
        """The gateway that counts the key, as seen by all of them."""
        [owner] = {self.use(name).owner for name in self.limits}
        return owner

    @property
    def others(self) -> list[str]:
        return [name for name in self.limits if name != self.owner]

    def die(self, name: str) -> None:
        del self.limits[name]
        self.network.leave(name)

    async def begin(self, name: str) -> bool:
        try:
            await self.use(name).begin_request()
        except ApiError:
            return False
        return True

    async def begins(self, *names: str) -> int:
        """Number of admitted requests that arrive at the same time."""
        return sum(await asyncio.gather(*map(self.begin, names)))

    async def quiet(self) -> None:
        """Waits until all reports have arrived."""
        async with asyncio.timeout(30):
            while any(
                lane._task is not None and not lane._task.done()
                for limits in self.limits.values()
                for lane in limits._lanes.values()
            ):
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(use_module, "ENDS_ARRIVE_S", 0.005)


@pytest.mark.parametrize("limit", ["requests_per_minute", "max_concurrent_requests"])
async def test_a_limit_is_exact_however_requests_are_spread(limit: str) -> None:
    for spread in ((10, 0, 0), (0, 10, 0), (5, 0, 5), (1, 8, 1)):
        fleet = Fleet(*NAMES, **{limit: 7})
        names = [name for name, count in zip(NAMES, spread, strict=True) for _ in range(count)]
        assert await fleet.begins(*names) == 7


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 5),
    steps=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=40),
)
def test_open_requests_are_those_of_one_counter(limit: int, steps: list[tuple[str, bool]]) -> None:
    async def run() -> None:
        fleet = Fleet(*NAMES, max_concurrent_requests=limit)
        num_open = dict.fromkeys(NAMES, 0)
        for name, is_begin in steps:
            if is_begin:
                is_admitted = await fleet.begin(name)
                assert is_admitted == (sum(num_open.values()) < limit)
                num_open[name] += is_admitted
            elif num_open[name]:
                fleet.use(name).end_request()
                num_open[name] -= 1
                await fleet.quiet()

    asyncio.run(run())


async def test_tokens_of_all_gateways_are_taken_from_one_bucket() -> None:
    fleet = Fleet(*NAMES, tokens_per_minute=600)
    for name in NAMES:
        assert await fleet.begin(name)
        fleet.use(name).spend(230)
    await fleet.quiet()
    assert [await fleet.begin(name) for name in NAMES] == [False] * 3
    headers = dict(fleet.use(fleet.others[0]).headers())
    assert headers[b"x-ratelimit-remaining-tokens"] == b"0"
    fleet.now = 9.1
    assert [await fleet.begin(name) for name in NAMES] == [True] * 3


async def test_a_client_may_send_its_next_request_at_once_to_another_gateway() -> None:
    fleet = Fleet(*NAMES, max_concurrent_requests=1)
    for name in NAMES * 3:
        assert await fleet.begin(name)
        fleet.use(name).end_request()


async def test_requests_that_come_together_share_a_call() -> None:
    fleet = Fleet("gw-a", "gw-b", requests_per_minute=1000)
    [other] = fleet.others
    assert await fleet.begins(*[other] * 100) == 100
    assert fleet.network.num_calls <= 2


async def test_keys_without_limits_cost_no_call() -> None:
    fleet = Fleet(*NAMES)
    for name in NAMES:
        assert await fleet.begin(name)
        fleet.use(name).spend(7)
        fleet.use(name).end_request()
    assert fleet.network.num_calls == 0


async def test_requests_of_a_gateway_that_died_no_longer_count() -> None:
    fleet = Fleet(*NAMES, max_concurrent_requests=3)
    first, second = fleet.others
    assert await fleet.begins(first, first, second) == 3
    assert not await fleet.begin(second)
    fleet.die(first)
    assert await fleet.begins(second, second, second) == 2


async def test_after_its_owner_died_the_next_one_knows_what_is_open_and_left() -> None:
    fleet = Fleet(*NAMES, max_concurrent_requests=3, requests_per_minute=5)
    first, second = fleet.others
    assert await fleet.begins(first, second) == 2
    fleet.die(fleet.owner)
    await fleet.quiet()
    assert await fleet.begins(first, second) == 1, "two are open"
    fleet.use(first).end_request()
    fleet.use(second).end_request()
    await fleet.quiet()
    assert await fleet.begins(first, second, first, second) == 2, "five in all"


async def test_a_gateway_that_joins_and_becomes_the_owner_begins_where_the_last_one_was() -> None:
    fleet = Fleet("gw-a", requests_per_minute=5, max_concurrent_requests=4)
    assert await fleet.begins("gw-a", "gw-a") == 2
    number = 0
    while fleet.owner == "gw-a":
        fleet.join(f"gw-{number}")
        number += 1
    await fleet.quiet()
    newest = fleet.owner
    assert await fleet.begins(newest, newest, newest) == 2, "two are open"
    fleet.use("gw-a").end_request()
    fleet.use("gw-a").end_request()
    await fleet.quiet()
    assert await fleet.begins("gw-a", "gw-a") == 1, "five in all"


@pytest.mark.parametrize("fault", ["stopped", "broken"])
async def test_an_owner_that_does_not_answer_delays_requests_once(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "SUSPECT_S", 0.1)
    fleet = Fleet("gw-a", "gw-b", requests_per_minute=4)
    owner, [other] = fleet.owner, fleet.others
    assert await fleet.begins(other, other) == 2
    getattr(fleet.network, fault).add(owner)
    assert await fleet.begins(other, other, other) == 2, "four in all"
    assert fleet.use(other).owner == other
    getattr(fleet.network, fault).clear()
    async with asyncio.timeout(30):
        while fleet.use(other).owner != owner:
            await asyncio.sleep(0.01)
    await fleet.quiet()
    assert await fleet.begins(owner, other) == 0, "the owner learns what was used meanwhile"


async def test_a_client_that_goes_away_while_its_request_waits_is_not_counted() -> None:
    fleet = Fleet("gw-a", "gw-b", max_concurrent_requests=2)
    [other] = fleet.others
    for num_turns in range(8):  # the call takes several iterations of the event loop
        waiting = asyncio.create_task(fleet.begin(other))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if not waiting.cancel():
            fleet.use(other).end_request()
        await asyncio.wait([waiting])
        await fleet.quiet()
        assert fleet.use(other).num_open == 0
        assert await fleet.begins(other, fleet.owner) == 2
        fleet.use(other).end_request()
        fleet.use(fleet.owner).end_request()
        await fleet.quiet()
