"""/v1/responses with two gateways: each serves the responses stored by the other one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.responses.store import ResponseStore, gateway_of
from tests.support.router.peer_network import PeerNetwork
from tests.support.router.rig import Rig
from worker.protocol.text.tokenizer import Tokenizer

KEYS = ("one", "two")
PATH = "/v1/responses"


class Fleet:
    """Two gateways, each with workers of its own."""

    def __init__(self, checkpoint: Path, tokenizer: Tokenizer) -> None:
        self.network = PeerNetwork()
        self.first, self.second = Rig(checkpoint, tokenizer), Rig(checkpoint, tokenizer)

    async def start(self, **config: Any) -> None:
        for rig, name in ((self.first, "gw-first1"), (self.second, "gw-second2")):
            rig.peers = self.network.join(name)
            await rig.start(api_keys=KEYS, **config)
            rig.client.headers["authorization"] = "Bearer one"

    async def create(self, rig: Rig, **fields: Any) -> dict[str, Any]:
        response = await rig.client.post(PATH, json={"model": "stub", "input": "hi", **fields})
        assert response.status_code == 200, response.text
        made: dict[str, Any] = response.json()
        return made


@pytest.fixture
async def fleet(checkpoint: Path, tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    fleet = Fleet(checkpoint, tokenizer)
    yield fleet
    await fleet.first.stop()
    await fleet.second.stop()


async def test_a_response_is_read_continued_and_deleted_at_either_gateway(fleet: Fleet) -> None:
    await fleet.start()
    made = await fleet.create(fleet.first)
    path, other = f"{PATH}/{made['id']}", fleet.second.client
    assert (await other.get(path)).json() == made
    going_on = await fleet.create(fleet.second, previous_response_id=made["id"], input="more")
    before, after = (rig.submits()[-1].prompt for rig in (fleet.first, fleet.second))
    assert after.startswith(before), "the conversation is continued"
    assert (await fleet.first.client.get(f"{PATH}/{going_on['id']}")).json() == going_on
    cancelled = await other.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (400, "response_id")
    assert (await other.delete(path)).json()["deleted"] is True
    for rig in (fleet.first, fleet.second):
        assert (await rig.client.get(path)).status_code == 404


async def test_no_gateway_shows_a_response_to_another_key(fleet: Fleet) -> None:
    await fleet.start()
    made = await fleet.create(fleet.first, background=True, stream=False)
    path, body = f"{PATH}/{made['id']}", {"model": "stub", "input": "hi"}
    other = {"authorization": "Bearer two"}
    for rig in (fleet.first, fleet.second):
        client = rig.client
        for response in (
            await client.get(path, headers=other),
            await client.get(f"{path}?stream=true", headers=other),
            await client.post(f"{path}/cancel", headers=other),
            await client.delete(path, headers=other),
            await client.post(
                PATH, json={**body, "previous_response_id": made["id"]}, headers=other
            ),
        ):
            assert response.status_code == 404, response.text
            assert response.json()["error"]["code"] == "response_not_found"
        assert (await client.get(path)).status_code == 200
        assert (await client.get(path, headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_background_response_is_polled_and_cancelled_at_the_other(fleet: Fleet) -> None:
    await fleet.start(running=False)
    made = await fleet.create(fleet.first, background=True)
    path = f"{PATH}/{made['id']}"
    assert (await fleet.second.client.get(path)).json()["status"] == "queued"
    cancelled = await fleet.second.client.post(f"{path}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert (await fleet.first.client.get(path)).json()["status"] == "cancelled"


async def test_the_stream_of_a_background_response_is_read_at_the_other(fleet: Fleet) -> None:
    await fleet.start(running=False)
    body = {"model": "stub", "input": "hi", "background": True, "stream": True}
    whole = asyncio.create_task(fleet.first.client.post(PATH, json=body))
    await fleet.first.until(lambda: bool(fleet.first.submits()))
    routes = [r for r in fleet.first.app.routes if getattr(r, "path", "") == PATH]
    [(_, response_id)] = routes[0].endpoint.__self__._running  # type: ignore[attr-defined]
    path = f"{PATH}/{response_id}?stream=true"
    live = asyncio.create_task(fleet.second.client.get(path))
    await asyncio.sleep(0)
    fleet.first.tasks = [asyncio.create_task(worker.run()) for worker in fleet.first.workers]
    events = (await whole).text.removesuffix("\n\n").split("\n\n")
    assert (await live).text == (await whole).text
    assert events[-1].startswith("event: response.completed\n")
    later = await fleet.second.client.get(f"{path}&starting_after={len(events) - 2}")
    assert later.text == (await whole).text[-len(later.text) :]
    assert later.text.count("event: ") == 1


async def test_responses_of_a_gateway_that_has_ended_are_404(fleet: Fleet) -> None:
    await fleet.start()
    made = await fleet.create(fleet.first)
    path, other = f"{PATH}/{made['id']}", fleet.second.client
    fleet.network.broken.add("gw-first1")
    unreachable = await other.get(path)
    assert (unreachable.status_code, unreachable.headers["retry-after"]) == (503, "1")
    fleet.network.leave("gw-first1")
    body = {"model": "stub", "input": "hi", "previous_response_id": made["id"]}
    gone, going_on = await other.get(path), await other.post(PATH, json=body)
    for response in (gone, going_on):
        assert response.status_code == 404
        assert "gateway that stored it has exited" in response.json()["error"]["message"]
    assert going_on.json()["error"]["param"] == "previous_response_id"


@given(st.text())
def test_only_ids_that_gateways_make_name_one(text: str) -> None:
    made = ResponseStore("gw-a1b2c3d4", 1).new_id()
    assert gateway_of(made) == "gw-a1b2c3d4"
    assert gateway_of(text) is None
    assert gateway_of(made[:36]) is None
    assert gateway_of(made.upper()) is None
