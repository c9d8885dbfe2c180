"""Agent sessions wait at the gateway until workers have room for them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from router.config import RoutingConfig
from router.fleet.session_gate import CAPACITY
from tests.support.router.rig import Rig
from tests.support.router.stub_worker import PAGE_SIZE

LONG = "look at this " * 12


@pytest.fixture(autouse=True)
def small_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fleet.session_gate.PLAIN_TOKENS", 64)
    monkeypatch.setattr("router.fleet.session_gate.IDLE", 1.0)


async def started(rig: Rig, *, pages: int, max_session_wait_s: float = 600.0) -> None:
    """One worker whose cache has this many pages."""
    for worker in rig.workers:
        worker.num_pages = pages
    rig.workers[1].reachable = False
    routing = RoutingConfig(explain_routing=True, max_session_wait_s=max_session_wait_s)
    await rig.start(attached=1, routing=routing)


async def agent(rig: Rig, session: str, *more: str) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(
        rig.client.post(
            "/v1/chat/completions",
            json={
                "model": "stub",
                "messages": [
                    {"role": ("user", "assistant")[turn % 2], "content": text}
                    for turn, text in enumerate((f"{session} {LONG}", *more))
                ],
            },
            headers={"x-session-id": session},
        )
    )


def waiting(rig: Rig) -> int:
    entrance = rig.gateway.model("stub")._placer.entrance
    return 0 if entrance is None else entrance.num_waiting


async def test_a_new_session_waits_for_room_and_a_chat_does_not(rig: Rig) -> None:
    await started(rig, pages=60)
    assert (await (await agent(rig, "a"))).status_code == 200
    use = rig.submits()[0].session
    assert use is not None
    assert 2 * use.tokens > CAPACITY * 60 * PAGE_SIZE, "two do not fit"
    second = await agent(rig, "b")
    await rig.until(lambda: waiting(rig) == 1)
    assert rig.gateway.model("stub").stats.waiting_sessions == 1
    assert (await rig.chat()).status_code == 200
    assert rig.submits()[1].session is None
    response = await (await agent(rig, "a", rig.answer, "again"))
    assert response.status_code == 200, "its session is live"
    assert float(response.headers["x-rayfleet-session-wait-ms"]) == 0.0
    assert waiting(rig) == 1
    second.cancel()
    await rig.until(lambda: waiting(rig) == 0)
    assert len(rig.submits()) == 3


async def test_the_wait_is_bounded_and_explained(rig: Rig) -> None:
    await started(rig, pages=60, max_session_wait_s=0.3)
    rig.workers[0].session_tokens = 10_000  # sessions of another gateway
    await rig.until(lambda: rig.gateway.model("stub").fleet.worker("w0").load.session_tokens > 0)
    response = await (await agent(rig, "a"))
    assert response.status_code == 200
    stats = rig.gateway.model("stub").stats
    assert (stats.waiting_sessions, sum(stats.session_wait.counts)) == (0, 1)
    assert 300.0 <= float(response.headers["x-rayfleet-session-wait-ms"]) < 5_000.0


async def test_without_the_gate_nothing_waits(rig: Rig) -> None:
    await started(rig, pages=60, max_session_wait_s=0.0)
    responses = [await (await agent(rig, name)) for name in "abc"]
    assert [response.status_code for response in responses] == [200] * 3
    assert all(submit.session is None for submit in rig.submits())
