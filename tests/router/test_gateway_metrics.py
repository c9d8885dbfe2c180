"""A gateway's metrics as scraped by Prometheus."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from starlette.routing import Route

from router.api.http.count import AnswerCounter
from router.keys.entry import unnamed
from router.metrics.http import HttpStats
from router.metrics.tenants import IDLE_S, TenantBook
from worker.protocol.slo import Slo, slo_class

Samples = dict[tuple[str, frozenset[str]], float]


def samples(response: httpx.Response) -> Samples:
    """Values by name and label values, without the gateway's and the model's."""
    return {
        (
            sample.name.removeprefix("rayfleet_"),
            frozenset(v for k, v in sample.labels.items() if k not in ("gateway_id", "model_name")),
        ): sample.value
        for family in parse(response.text)
        for sample in family.samples
    }


def of(name: str, *labels: str) -> tuple[str, frozenset[str]]:
    return name, frozenset(labels)


async def test_counters_follow_requests_and_workers(rig):
    await rig.start()
    await rig.chat("hello")
    found = samples(await rig.client.get("/metrics"))
    num_tokens = len(rig.script(None))
    assert found[of("generation_tokens_total")] == num_tokens
    assert found[of("request_success_total", "stop")] == 1
    assert found[of("request_success_total", "error")] == 0
    assert found[of("time_to_first_token_seconds_count", "none")] == 1
    assert found[of("inter_token_latency_seconds_count", "none")] == num_tokens - 1
    assert found[of("request_generation_tokens_sum")] == num_tokens
    assert found[of("workers", "ready")] == 2
    assert found[of("routed_requests_total", "w0")] + found[of("routed_requests_total", "w1")] == 1
    rig.workers[0].vanish()
    await rig.until(lambda: rig.attached() == ["w1"])
    response = await rig.client.get("/metrics")
    assert 'worker_id="w0"' not in response.text
    assert 'worker_id="w1"' in response.text
    assert samples(response)[of("workers", "ready")] == 1


async def test_the_first_tokens_time_is_split(rig):
    await rig.start()
    await rig.chat("hello", stream=True)
    await rig.chat("hello")
    found = samples(await rig.client.get("/metrics"))
    parts = {
        part: (
            found[of(f"request_{part}_time_seconds_count", "none")],
            found[of(f"request_{part}_time_seconds_sum", "none")],
        )
        for part in ("route", "queue", "prefill", "first_flush")
    }
    assert parts["queue"] == (2, 0.5)  # as reported by the stub
    assert parts["prefill"] == (2, 1.0)
    assert parts["route"][0] == 2
    assert parts["first_flush"][0] == 1, "only streams write a first token"
    first_tokens_s = found[of("time_to_first_token_seconds_sum", "none")]
    assert 0.0 < parts["route"][1] < first_tokens_s


async def test_slo_classes_and_whether_they_were_met(rig):
    await rig.start()
    await rig.complete(slo={"ttft_ms": 60_000}, priority=9)
    await rig.complete(slo={"ttft_ms": 0.001})
    found = samples(await rig.client.get("/metrics"))
    assert found[of("slo_requests_total", "9", "relaxed", "true")] == 1
    assert found[of("slo_requests_total", "4", "interactive", "false")] == 1
    assert found[of("slo_requests_total", "4", "interactive", "true")] == 0
    assert found[of("time_to_first_token_seconds_count", "interactive")] == 1
    assert found[of("time_to_first_token_seconds_count", "none")] == 0
    assert found[of("tenant_slo_requests_total", "default", "true")] == 1
    assert slo_class(Slo(tpot_ms=100)) == "server"
    assert slo_class(Slo(ttft_ms=9000, tpot_ms=20)) == "interactive"
    assert slo_class(None) == slo_class(Slo()) == "none"


async def test_refusals_by_reason(rig):
    await rig.start()
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "all full", 429
    assert (await rig.chat()).status_code == 429
    for worker in rig.workers:
        worker.vanish()
    await rig.until(lambda: not rig.attached())
    assert (await rig.chat()).status_code == 503
    found = samples(await rig.client.get("/metrics"))
    assert found[of("admission_rejections_total", "queue_full")] == 1
    assert found[of("admission_rejections_total", "no_worker")] == 1
    assert found[of("expected_wait_seconds")] == float("inf")


async def test_what_no_worker_has_yet_is_pending(rig):
    await rig.start()
    rig.workers[0].gate.clear()
    rig.workers[1].gate.clear()
    work = rig.client.post("/v1/completions", json={"model": "stub", "prompt": "hi", "n": 2})
    async with asyncio.TaskGroup() as group:
        group.create_task(work)
        await rig.until(lambda: rig.gateway.model("stub").stats.pending_requests == 2)
        found = samples(await rig.client.get("/metrics"))
        rig.workers[0].gate.set()
        rig.workers[1].gate.set()
    assert found[of("gateway_pending_requests")] == 2
    assert found[of("gateway_pending_tokens")] > 0
    found = samples(await rig.client.get("/metrics"))
    assert found[of("gateway_pending_requests")] == found[of("gateway_pending_tokens")] == 0


async def test_tenants_are_counted_up_to_a_bound(rig, tmp_path):
    keys, operator = ("a", "b", "c", "d"), tmp_path / "keys"
    operator.write_text('[operator]\nkey = "operator"\nmonitoring = true\n')
    await rig.start(
        fairness_key="key", api_keys=keys, api_key_file=str(operator), metrics_max_tenants=2
    )
    for key in (*keys, "a"):
        rig.client.headers["authorization"] = f"Bearer {key}"
        assert (await rig.chat()).status_code == 200
    tenants = [unnamed(key).name for key in keys]
    assert {submit.tenant for submit in rig.submits()} == set(tenants)
    rig.client.headers["authorization"] = "Bearer operator"
    found = samples(await rig.client.get("/metrics"))
    requests = {labels: v for (name, labels), v in found.items() if name == "tenant_requests_total"}
    assert requests == {
        frozenset({tenants[0]}): 2,
        frozenset({tenants[1]}): 1,
        frozenset({"other"}): 2,
    }
    other = found[of("tenant_generation_tokens_total", "other")]
    assert other == 2 * len(rig.script(None))


def test_an_idle_tenant_gives_its_place_up_and_no_sum_falls():
    book = TenantBook(2)
    busy, idle = book.of("busy", 0.0), book.of("idle", 0.0)
    for stats in (busy, idle):
        stats.begin(10, 0.0)
    idle.end(first_token_s=0.5, generation_tokens=3, cached_tokens=1, met=False)
    assert book.of("late", IDLE_S) is dict(book.rows())["other"]
    late = book.of("late", IDLE_S + 1.0)
    rows = dict(book.rows())
    assert list(rows) == ["busy", "late", "other"], "one with an open request stays"
    assert rows["late"] is late
    other = rows["other"]
    assert (other.requests, other.prompt_tokens, other.generation_tokens) == (1, 10, 3)
    assert (other.slo_missed, other.first_tokens, other.first_tokens_s) == (1, 1, 0.5)


async def test_openmetrics_say_when_counters_began(rig):
    await rig.start()
    await rig.chat()
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
    response = await rig.client.get("/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    found = [s for family in parse_openmetrics(response.text) for s in family.samples]
    created = {s.name: s.value for s in found if s.name.endswith("_created")}
    assert created["rayfleet_generation_tokens_created"] == rig.gateway.created
    assert created["rayfleet_time_to_first_token_seconds_created"] == rig.gateway.created
    plain = await rig.client.get("/metrics")
    assert "_created" not in plain.text


async def answers(rig) -> dict[tuple[str, ...], float]:
    """Responses by (route, method, status), without zeros."""
    response = await rig.client.get("/metrics")
    found = {family.name: family.samples for family in parse(response.text)}
    return {
        (s.labels["route"], s.labels["method"], s.labels["status"]): s.value
        for s in found["rayfleet_http_requests"]
        if s.value
    }


async def test_every_answer_is_counted_refused_ones_too(rig):
    await rig.start(api_keys=("key",))
    chats, metrics = "/v1/chat/completions", "/metrics"
    assert (await rig.chat()).status_code == 401
    rig.client.headers["authorization"] = "Bearer key"
    assert (await rig.chat()).status_code == 200
    assert (await rig.chat(stream=True)).status_code == 200
    assert (await rig.chat(temperature="hot")).status_code == 400
    assert (await rig.chat(model="nobody")).status_code == 404
    header = {"content-length": str(2**40)}
    assert (await rig.client.post(chats, content=b"x", headers=header)).status_code == 413
    assert (await rig.client.get(chats)).status_code == 405
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "all full", 429
    assert (await rig.chat()).status_code == 429
    rig.gateway.model = None
    assert (await rig.chat()).status_code == 500, "an error that nobody expected"
    assert await answers(rig) == {
        (chats, "POST", "200"): 2,
        (chats, "POST", "400"): 1,
        (chats, "POST", "401"): 1,
        (chats, "POST", "404"): 1,
        (chats, "POST", "413"): 1,
        (chats, "POST", "429"): 1,
        (chats, "POST", "500"): 1,
        (chats, "GET", "405"): 1,
    }
    assert (metrics, "GET", "200") in await answers(rig)


async def test_clients_cannot_make_series_of_their_own(rig):
    await rig.start()
    for name in range(50):
        assert (await rig.client.get(f"/no/{name}")).status_code == 404
        assert (await rig.client.get(f"/v1/models/{name}")).status_code == 404
        assert (await rig.client.request(f"M{name}", "/health")).status_code == 405
    assert await answers(rig) == {
        ("other", "GET", "404"): 50,
        ("/v1/models/{name:path}", "GET", "404"): 50,
        ("/health", "other", "405"): 50,
    }
    text = (await rig.client.get("/metrics")).text
    failures = [line for line in text.splitlines() if 'status="500"' in line]
    assert len(failures) == 3, "what may fail is there before it has: its rate is known then"


async def test_a_stream_counts_once_and_its_parts_pass_through():
    sent, stats = [], HttpStats()

    async def stream(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    routes = (Route("/v1/completions", stream, methods=["POST"]),)
    counter = AnswerCounter(stream, stats, routes)
    await counter({"type": "http", "method": "POST", "path": "/v1/completions"}, None, send)
    assert len(sent) == 1002
    assert stats.counts["/v1/completions", "POST", 200] == 1
