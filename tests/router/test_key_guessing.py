"""Guessing keys is slowed down; valid keys are not affected."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from router.api.http import auth
from router.keys.attempts import BURST, MAX_SOURCES, MAX_WAIT_S, PAUSE_S, FailedAttempts


def test_guesses_of_a_source_are_answered_ever_later() -> None:
    attempts = FailedAttempts()
    assert {attempts.delay_s("10.0.0.1", 100.0) for _ in range(BURST)} == {0.0}
    num_waiting = int(MAX_WAIT_S / PAUSE_S)
    waits = [attempts.delay_s("10.0.0.1", 100.0) for _ in range(num_waiting)]
    assert waits == [PAUSE_S * (n + 1) for n in range(num_waiting)]
    assert [attempts.delay_s("10.0.0.1", 100.0) for _ in range(1000)] == [None] * 1000
    assert attempts.delay_s("10.0.0.2", 100.0) == 0.0
    # As many guesses per hour as there are pauses, however fast they arrive.
    answered = sum(attempts.delay_s("10.0.0.1", 100.0 + n / 10) is not None for n in range(36_000))
    assert answered <= 3600 / PAUSE_S + 1


def test_networks_of_ipv6_are_one_source() -> None:
    attempts = FailedAttempts()
    waits = [attempts.delay_s(f"2001:db8::{n:x}", 0.0) for n in range(100)]
    assert waits.count(0.0) == BURST
    assert attempts.delay_s("2001:db8:0:1::1", 0.0) == 0.0


def test_memory_is_bounded() -> None:
    attempts = FailedAttempts()
    for n in range(2 * MAX_SOURCES):
        attempts.delay_s(f"source {n}", 0.0)
    assert len(attempts._next) == MAX_SOURCES


async def test_valid_keys_are_served_while_others_guess(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr(auth, "asyncio", SimpleNamespace(sleep=sleep))
    await rig.start(api_keys=("key",))
    statuses = []
    for n in range(3 * BURST):
        headers = {"authorization": f"Bearer guess-{n}"}
        response = await rig.client.get("/v1/models", headers=headers)
        statuses.append(response.status_code)
    assert statuses[:BURST] == [401] * BURST
    assert statuses[-1] == 429
    assert delays
    slept = len(delays)
    valid = await asyncio.gather(
        *(rig.client.get("/v1/models", headers={"authorization": "Bearer key"}) for _ in range(20))
    )
    assert {response.status_code for response in valid} == {200}
    assert len(delays) == slept
