"""Priorities, SLOs, fair share, full queues and admission rules, through HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import time

import pytest

from router.serving.completion import Completion
from worker.protocol.messages import Rejection, TokenDelta
from worker.protocol.slo import Slo

KEYS = ("alpha", "beta")


async def test_urgency_reaches_the_worker(rig):
    await rig.start()
    began = time.monotonic()
    await rig.chat(priority=8, slo={"ttft_ms": 250, "tpot_ms": 40})
    took_ms = 1000.0 * (time.monotonic() - began)
    [submit] = rig.submits()
    assert submit.priority == 8
    assert submit.slo == Slo(ttft_ms=250, tpot_ms=40)
    assert 0.0 <= submit.waited_ms <= took_ms
    assert submit.tenant == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 10}, "priority"),
        ({"slo": {"ttft_ms": 0}}, "slo"),
        ({"slo": {"ttft_ms": "soon"}}, "slo"),
        ({"slo": {"ttf_ms": 5}}, "slo"),
        ({"slo": 5}, "slo"),
    ],
)
async def test_wrong_urgency_is_a_400_that_names_the_field(rig, fields, param):
    await rig.start()
    response = await rig.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_responses_and_metrics_say_whether_the_slo_was_met(rig):
    await rig.start()
    met = (await rig.complete(slo={"ttft_ms": 60_000, "e2e_ms": 60_000})).json()["choices"][0]
    assert met["slo"]["met"] is True
    assert 0 < met["slo"]["ttft_ms"] <= met["slo"]["e2e_ms"]
    missed = (await rig.complete(slo={"e2e_ms": 0.001}, priority=9)).json()["choices"][0]
    assert missed["slo"]["met"] is False
    assert "slo" not in (await rig.complete()).json()["choices"][0]
    assert rig.gateway.model("stub").stats.slo == {
        (4, "relaxed", True): 1,
        (9, "relaxed", False): 1,
    }


async def test_the_last_chunk_of_a_stream_has_the_slo(rig):
    await rig.start()
    response = await rig.chat(stream=True, slo={"tpot_ms": 60_000})
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line[6:7] == "{"]
    slos = [event["choices"][0].get("slo") for event in events]
    assert slos[:-1] == [None] * (len(slos) - 1)
    assert slos[-1]["met"] is True


@pytest.mark.parametrize(
    ("fairness_key", "same", "other"),
    [
        ("key", ("alpha", "u2"), ("beta", "u1")),
        ("user", ("alpha", "u1"), ("alpha", "u2")),
        ("user", ("alpha", "u1"), ("beta", "u1")),
    ],
)
async def test_tenants_are_keys_or_their_users(rig, fairness_key, same, other):
    await rig.start(fairness_key=fairness_key, api_keys=KEYS)
    for key, user in (("alpha", "u1"), same, other):
        rig.client.headers["authorization"] = f"Bearer {key}"
        assert (await rig.chat(user=user)).status_code == 200
    first, alike, different = [submit.tenant for submit in rig.submits()]
    assert first == alike != different
    assert first
    assert "alpha" not in first


@pytest.mark.parametrize("cache_isolation", ["none", "key", "user"])
async def test_prefix_caches_are_separate_by_key_or_user(rig, cache_isolation):
    await rig.start(cache_isolation=cache_isolation, fairness_key="none", api_keys=KEYS)
    salts: list[str] = []
    for key, user in (("alpha", "u1"), ("alpha", "u1"), ("alpha", "u2"), ("beta", "u1")):
        rig.client.headers["authorization"] = f"Bearer {key}"
        known = {submit.request_id for submit in rig.submits()}
        assert (await rig.chat(user=user, cache_salt="mine")).status_code == 200
        assert (await rig.complete(user=user, cache_salt="mine")).status_code == 200
        chat, text = [s.cache_salt for s in rig.submits() if s.request_id not in known]
        assert chat == text
        salts.append(chat)
    first, again, other_user, other_key = salts
    assert first == again
    assert (first != other_user) == (cache_isolation == "user")
    assert (first != other_key) == (cache_isolation != "none")
    assert "alpha" not in first
    assert [submit.tenant for submit in rig.submits()] == [""] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queues_everywhere_are_a_429_with_retry_after(rig, stream):
    await rig.start()
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "all full", 429
    response = await rig.chat(stream=stream)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert len(rig.submits()) == 2, "the other worker was not tried"
    assert rig.gateway.model("stub").stats.rejected == 1


async def test_a_full_worker_passes_the_request_on_to_another(rig):
    await rig.start()
    rig.workers[0].rejection, rig.workers[0].rejection_status = "full", 429
    for _ in range(3):
        assert (await rig.chat()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_requests_leave_no_garbage(rig, stream):
    """Under overload most requests are rejected; garbage collection would delay the others."""
    await rig.start()
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "all full", 429
    gc.freeze()  # excludes older objects
    gc.disable()
    try:
        assert (await rig.chat(stream=stream)).status_code == 429
        await asyncio.sleep(0.01)
        kept = [thing for thing in gc.get_objects() if isinstance(thing, Completion)]
    finally:
        gc.enable()
        gc.unfreeze()
    assert kept == []


@pytest.mark.parametrize("stream", [False, True])
async def test_who_is_shed_while_it_waits_gets_429_too(rig, stream):
    await rig.start(running=False)
    work = asyncio.create_task(rig.chat(stream=stream))
    await rig.until(lambda: any(worker.running for worker in rig.workers))
    [worker] = [worker for worker in rig.workers if worker.running]
    [request_id] = worker.running
    worker.running.clear()
    rejection = Rejection(
        request_id=request_id, attempt=0, message="full of others", status=429, retry_after_s=9
    )
    delta = TokenDelta(request_id, 0, [], "error", error="full of others", rejection=rejection)
    worker.update([delta], [])
    response = await work
    assert response.status_code == 429
    assert response.headers["retry-after"] == "9"
    assert "full of others" in response.text
