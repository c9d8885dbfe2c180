"""Agent sessions wait at the gateway until workers have room for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from router.api.sessions import MAX_LISTED, METHOD
from router.config import RoutingConfig
from router.fleet import SessionList
from router.fleet.session_gate import CAPACITY
from tests.support.router.peer_network import PeerNetwork
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


async def test_waiting_sessions_are_not_admitted_when_the_last_worker_fails(rig: Rig) -> None:
    """Its cache fits as many contexts as before when it is back."""
    await started(rig, pages=60)
    assert (await (await agent(rig, "a"))).status_code == 200
    second = await agent(rig, "b")
    third = await agent(rig, "c")
    await rig.until(lambda: waiting(rig) == 2)
    rig.workers[0].crash()
    await rig.until(lambda: not rig.attached())
    assert waiting(rig) == 2
    rig.workers[0].send(rig.workers[0].snapshot())
    assert (await second).status_code == 200
    assert waiting(rig) == 1
    third.cancel()


async def test_the_wait_is_bounded_and_explained(rig: Rig) -> None:
    await started(rig, pages=60, max_session_wait_s=0.3)
    rig.workers[0].session_tokens = 10_000  # sessions of another gateway
    await rig.until(lambda: rig.gateway.model("stub").fleet.worker("w0").load.session_tokens > 0)
    response = await (await agent(rig, "a"))
    assert response.status_code == 200
    stats = rig.gateway.model("stub").stats
    assert (stats.waiting_sessions, sum(stats.session_wait.counts)) == (0, 1)
    assert 300.0 <= float(response.headers["x-rayfleet-session-wait-ms"]) < 5_000.0


async def test_sessions_are_listed_by_digest_state_and_worker(rig: Rig) -> None:
    await started(rig, pages=60)
    assert (await (await agent(rig, "a"))).status_code == 200
    second = await agent(rig, "b")
    await rig.until(lambda: waiting(rig) == 1)
    rig.workers[0].session_tokens = 300  # as a worker reports
    await rig.until(lambda: rig.gateway.model("stub").fleet.worker("w0").load.session_tokens > 0)
    response = await rig.client.get("/sessions")
    assert response.status_code == 200
    assert LONG not in response.text
    [model], [waits, idle] = response.json()["models"], response.json()["data"]
    assert (model["id"], model["waiting"], model["live"]) == ("stub", 1, 1)
    assert (model["live_tokens"], model["cache_tokens"]) == (300, 60 * PAGE_SIZE)
    assert (waits["state"], waits["worker"], waits["turns"]) == ("waiting", "", 0)
    assert (idle["state"], idle["worker"], idle["turns"]) == ("idle", "w0", 1)
    assert idle["tokens"] > 64
    assert len({waits["session"], idle["session"]}) == 2
    second.cancel()


async def test_sessions_of_other_gateways_are_merged(rig: Rig) -> None:
    network = PeerNetwork()
    rig.peers, peer = network.join("gw-own"), network.join("gw-other")
    network.broken.add(network.join("gw-broken").own_id)
    await started(rig, pages=600)
    assert (await (await agent(rig, "a"))).status_code == 200
    own = rig.gateway.model("stub").sessions(MAX_LISTED)
    assert own is not None
    [idle] = own.sessions
    same = msgspec.structs.replace(idle, state="running", worker="w7")
    large = msgspec.structs.replace(idle, key=idle.key ^ 1, tokens=10**6)
    others = SessionList(num_live=2, sessions=(same, large))

    async def answer(_: bytes) -> bytes:
        return msgspec.msgpack.encode({"stub": others})

    peer.handle_call(METHOD, answer)
    response = (await rig.client.get("/sessions")).json()
    assert [(row["tokens"], row["worker"]) for row in response["data"]] == [
        (10**6, "w0"),
        (idle.tokens, "w7"),
    ]


async def test_only_monitoring_keys_see_the_sessions_of_others(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text('[a]\nkey = "alice-key"\n[o]\nkey = "operator"\nmonitoring = true\n')
    routing = RoutingConfig(max_session_wait_s=600.0)
    await rig.start(api_key_file=str(path), routing=routing)
    statuses = [
        (await rig.client.get("/sessions", headers={"authorization": f"Bearer {key}"})).status_code
        for key in ("alice-key", "operator", "unknown")
    ]
    assert statuses == [403, 200, 401]


async def test_without_the_gate_nothing_waits(rig: Rig) -> None:
    await started(rig, pages=60, max_session_wait_s=0.0)
    responses = [await (await agent(rig, name)) for name in "abc"]
    assert [response.status_code for response in responses] == [200] * 3
    assert all(submit.session is None for submit in rig.submits())
    assert (await rig.client.get("/sessions")).json()["models"] == []
