"""Explanations of routing decisions: headers, metrics, the decision log."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from router.config import DecisionLogConfig, ModelRoute, RoutingConfig
from router.explain import DecisionLine, DecisionLog, WorkerSeen, read_decisions
from router.explain.keyed import KEY_BYTES, KeyedNames
from router.explain.log import MAX_BLOCKS
from router.fleet import Fleet
from router.fleet.explain import PooledCache
from worker.protocol.options import from_options

PAGE = 16
TEXT = "one two three four five six the quick brown fox jumps over the lazy dog " * 4
PREFIX = "x-rayfleet-"


def routes(rig, **routing: object) -> tuple[ModelRoute, ...]:
    return (replace(rig.config.models[0], routing=from_options(RoutingConfig, routing)),)


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
        cost = {n: Decimal(v) for n, v in headers.items() if n.startswith(PREFIX + "cost")}
        assert cost.pop(PREFIX + "cost") == sum(cost.values()) > 0
        assert {PREFIX + "cost-queue", PREFIX + "cost-compute"} < set(cost)
    usage = again.json()["usage"]["prompt_tokens_details"]
    assert usage["cached_tokens"] == int(again.headers[PREFIX + "cached-tokens"])


async def test_a_stream_begins_before_it_is_known_what_comes(rig):
    await rig.start(models=routes(rig, explain_routing=True))
    headers = (await rig.complete(TEXT, stream=True)).headers
    assert int(headers[PREFIX + "hit-tokens"]) == 0
    assert PREFIX + "ttft-ms" not in headers


async def test_without_the_option_there_are_no_headers(rig, tmp_path):
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
    decided = [line for line in lines if isinstance(line, DecisionLine)]
    assert len(decided) == 3
    assert decided[0].hashes == decided[1].hashes != b""
    assert decided[0].first_token_s > 0.0
    for line in decided:
        assert len(line.hashes) // 8 == line.num_tokens // line.page_size
        assert line.num_output == len(rig.tokenizer.encode(rig.answer)) + 1


def decided(hashes: np.ndarray, session: str = "") -> DecisionLine:
    return DecisionLine(
        request_id="r",
        at=1.0,
        num_tokens=len(hashes) * PAGE,
        num_output=1,
        page_size=PAGE,
        hashes=hashes.astype("<u8").tobytes(),
        session=session,
        worker_id="w",
        attempt=0,
        hit_tokens=0,
        achievable_hit_tokens=0,
        pooled_hit_tokens=0,
        cached_tokens=0,
        predicted_s=0.1,
        first_token_s=0.1,
        regret_s=0.0,
    )


def written(
    folder: Path, *lines: DecisionLine, gateway: str = "gw", **options: object
) -> list[DecisionLine]:
    """The readable lines of a gateway's log after writing these lines."""
    log = DecisionLog(str(folder), "stub", gateway, **{"max_bytes": 1 << 20, **options})
    for line in lines:
        log.decided(line, Fleet())
    log.close(Fleet())
    files = sorted(folder.glob(f"stub-{gateway}*.jsonl"))
    found = [line for file in files for line in read_decisions(str(file))]
    return [line for line in found if isinstance(line, DecisionLine)]


@contextmanager
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def test_nobody_else_may_read_the_log(tmp_path):
    folder = tmp_path / "new" / "log"
    with usual_umask():
        written(folder, decided(np.arange(400_000, dtype=np.uint64)), max_bytes=4096)
        written(folder, *[decided(np.arange(9, dtype=np.uint64))] * 40, max_bytes=4096)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (folder / "stub-gw2.jsonl").symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"decision_log: .*new/log"):
        written(folder, gateway="gw2")
    assert elsewhere.read_text() == "mine"


def test_the_log_is_bounded_and_continues(tmp_path):
    """The previous file is half of it; each record has a limited number of hashes."""
    max_bytes = 40_000
    lines = [decided(np.arange(n, n + 20, dtype=np.uint64)) for n in range(1000)]
    left = written(tmp_path, *lines, max_bytes=max_bytes)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["stub-gw.1.jsonl", "stub-gw.jsonl"]
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert max_bytes * 0.4 < size < max_bytes + 2000
    assert 10 < len(left) < len(lines)
    tail = np.frombuffer(left[-1].hashes, "<u8")
    assert np.frombuffer(left[-2].hashes, "<u8")[1:].tolist() == tail[:-1].tolist()

    [longest] = written(
        tmp_path / "long", decided(np.arange(MAX_BLOCKS + 9, dtype=np.uint64)), max_bytes=1 << 20
    )
    assert len(longest.hashes) == 8 * MAX_BLOCKS
    assert longest.num_tokens == (MAX_BLOCKS + 9) * PAGE


async def test_each_file_of_the_log_begins_with_the_workers(rig, tmp_path, monkeypatch):
    await rig.start(models=routes(rig, decision_log=str(tmp_path), decision_log_mib=1))
    monkeypatch.setattr(rig.gateway.model("stub")._log_file._file, "_max_bytes", 2000)
    for _ in range(8):
        await rig.complete(TEXT, max_tokens=2)
    await rig.stop()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        workers = {x.worker_id for x in read_decisions(str(file)) if isinstance(x, WorkerSeen)}
        assert workers == {"w0", "w1"}


def test_hashes_of_a_log_are_keyed(tmp_path):
    """A guessed prompt's hashes are not found in the log; equal prefixes remain equal."""
    guessed = np.array([5, 2**63 + 1, 0], np.uint64)
    line = decided(guessed, "alice@example.org")
    a, again = written(tmp_path, line, decided(guessed[:2], "alice@example.org"), gateway="a")
    [b] = written(tmp_path, line, gateway="b")
    known, other = (np.frombuffer(found.hashes, "<u8") for found in (a, b))
    assert not np.isin([*known, *other], guessed).any()
    assert not np.isin(known, other).any()
    assert len(np.unique(known)) == 3
    assert (again.hashes, again.session) == (a.hashes[:16], a.session)
    assert a.session != b.session
    assert all(b"alice" not in path.read_bytes() for path in tmp_path.iterdir())


def test_gateways_may_share_a_key(tmp_path):
    key = tmp_path / "key"
    key.write_text("0123456789abcdef\n")
    line = decided(np.arange(4, dtype=np.uint64), "alice")
    folder = tmp_path / "logs"
    [a], [b] = (written(folder, line, gateway=name, key_file=str(key)) for name in ("a", "b"))
    assert (a.hashes, a.session) == (b.hashes, b.session) != (line.hashes, line.session)
    key.write_text("short")
    for path, problem in ((key, "fewer than 16 bytes"), (tmp_path / "none", "No such file")):
        with pytest.raises(ValueError, match=f"decision_log_key_file.*{problem}"):
            written(folder, key_file=str(path))
    with pytest.raises(ValueError, match="decision_log_mib in --routing-config"):
        DecisionLogConfig(max_mib=0)


def test_keyed_names_are_siphash():
    """The eighth test vector of SipHash's authors: key 00..0f, message 00..07."""
    names = KeyedNames(bytes(range(KEY_BYTES)))
    message = np.frombuffer(bytes(range(8)) * 5, "<u8")
    assert names.blocks(message).tolist() == [0x93F5F5799A932462] * 5
    assert names.blocks(message[:0]).tolist() == []
    assert names.text("") == ""


def test_a_full_disk_ends_the_log_and_no_request(tmp_path, caplog):
    log = DecisionLog(str(tmp_path), "stub", "gw", max_bytes=1 << 30)
    line = decided(np.arange(5000, dtype=np.uint64))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # Python ignores its signal
    try:
        for _ in range(10):
            log.decided(line, Fleet())
        log.close(Fleet())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [record] = [r for r in caplog.records if "disabling decision log" in r.getMessage()]
    assert record.levelname == "ERROR"


def test_a_log_that_was_cut_off_hides_no_other(tmp_path):
    """A killed gateway leaves half a line; the next file is unaffected."""
    for gateway in ("a", "b"):
        written(tmp_path, decided(np.arange(3, dtype=np.uint64)), gateway=gateway)
    first = tmp_path / "stub-a.jsonl"
    first.write_bytes(first.read_bytes()[:-20])
    assert [type(line) for line in read_decisions(str(tmp_path))] == [DecisionLine]


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
    assert cache.take(a[:2], 6) == 2  # the leaves of the oldest were evicted
    assert cache.take(a, 6) == 2
    assert cache.take(b, 100) == 2
