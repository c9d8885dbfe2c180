"""Explanations of routing decisions: headers, metrics, the decision log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from router.config import ModelRoute, RoutingConfig
from router.explain import Decided, WorkerSeen, read_decisions
from router.fleet.explain import PooledCache

TEXT = "one two three four five six the quick brown fox jumps over the lazy dog " * 4
PREFIX = "x-rayfleet-"


def routes(rig, **routing: object) -> tuple[ModelRoute, ...]:
    return (replace(rig.config.models[0], routing=RoutingConfig(**routing)),)  # type: ignore[arg-type]


async def test_headers_tell_what_was_expected_and_what_came(rig):
    await rig.start(models=routes(rig, explain_routing=True))
    first = await rig.complete(TEXT)
    await rig.until(lambda: len(rig.gateway.model("stub").fleet.index) > 0)
    again = await rig.complete(TEXT)
    for response, cached in ((first, False), (again, True)):
        headers = response.headers
        expected = int(headers[PREFIX + "hit-tokens"])
        assert (expected > 0) is cached
        assert expected == int(headers[PREFIX + "cached-tokens"])
        assert expected == int(headers[PREFIX + "achievable-hit-tokens"])
        assert expected == int(headers[PREFIX + "pooled-hit-tokens"])
        assert float(headers[PREFIX + "predicted-ttft-ms"]) > 0.0
        assert float(headers[PREFIX + "ttft-ms"]) > 0.0
        assert float(headers[PREFIX + "regret-ms"]) >= 0.0
    usage = again.json()["usage"]["prompt_tokens_details"]
    assert usage["cached_tokens"] == int(again.headers[PREFIX + "cached-tokens"])


async def test_a_stream_begins_before_it_is_known_what_comes(rig):
    await rig.start(models=routes(rig, explain_routing=True))
    headers = (await rig.complete(TEXT, stream=True)).headers
    assert int(headers[PREFIX + "hit-tokens"]) == 0
    assert PREFIX + "ttft-ms" not in headers


async def test_clients_are_told_nothing_unless_asked_for(rig, tmp_path):
    await rig.start(models=routes(rig, decision_log=str(tmp_path)))
    headers = (await rig.complete(TEXT)).headers
    assert [name for name in headers if name.startswith(PREFIX)] == [PREFIX + "worker"]


async def test_metrics_add_up_what_the_headers_say(rig):
    await rig.start(models=routes(rig, explain_routing=True))
    await rig.complete(TEXT)
    await rig.until(lambda: len(rig.gateway.model("stub").fleet.index) > 0)
    again = await rig.complete(TEXT)
    text = (await rig.client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{gateway_id="{rig.gateway.gateway_id}",model_name="stub"}}'
    for name, header in (
        ("routing_achievable_hit_tokens", "achievable-hit-tokens"),
        ("routing_pooled_hit_tokens", "pooled-hit-tokens"),
        ("routing_hit_tokens", "hit-tokens"),
    ):
        expected = float(again.headers[PREFIX + header])
        assert float(values[f"rayfleet_{name}_total{label}"]) == expected > 0.0
    assert float(values[f"rayfleet_routing_regret_seconds_total{label}"]) >= 0.0
    assert float(values[f"rayfleet_routing_prediction_error_seconds_count{label}"]) == 2.0


async def test_the_log_has_every_request_and_no_text(rig, tmp_path):
    await rig.start(models=routes(rig, decision_log=str(tmp_path)))
    for text in (TEXT, TEXT, "hi"):
        await rig.complete(text, max_tokens=50)
    await rig.stop()
    [file] = tmp_path.glob("*.jsonl")
    assert b"quick" not in file.read_bytes()
    lines = list(read_decisions(str(tmp_path)))
    workers = [line for line in lines if isinstance(line, WorkerSeen)]
    assert {line.worker_id for line in workers} == {"w0", "w1"}
    decided = [line for line in lines if isinstance(line, Decided)]
    assert len(decided) == 3
    assert decided[0].hashes == decided[1].hashes != b""
    assert decided[0].first_token_s > 0.0
    for line in decided:
        assert len(line.hashes) // 8 == line.num_tokens // line.page_size
        assert line.num_output == len(rig.tokenizer.encode(rig.answer)) + 1


def test_a_log_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no decision log"):
        list(read_decisions(str(tmp_path)))
    file = tmp_path / "x.jsonl"
    file.write_text('{"type": "other"}\n{"type": "other"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl:1"):
        list(read_decisions(str(file)))


def test_a_pooled_cache_keeps_what_was_used_last():
    cache = PooledCache()
    a, b = np.arange(4, dtype=np.uint64), np.arange(10, 14, dtype=np.uint64)
    assert cache.take(a, 6) == 0
    assert cache.take(b, 6) == 0
    assert cache.take(a[:2], 6) == 2  # the leaves of the oldest have gone
    assert cache.take(a, 6) == 2
    assert cache.take(b, 100) == 2
