"""Paced workers behind real processes: answers, pace, and figures of routers."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cluster.config import find_demo_model
from cluster.ports import free_ports
from deploy.benchmarks.cli import main
from deploy.benchmarks.routing.paced import (
    Pace,
    PacedServer,
    Vocabulary,
    load,
    paced_worker,
    prose,
    prose_after,
    run_steady,
    steady_shape,
)
from deploy.benchmarks.routing.real.drive import Sent, send_all
from deploy.benchmarks.routing.real.http_worker import HttpWorker
from deploy.benchmarks.routing.real.options import RealOptions
from deploy.benchmarks.routing.real.routers import missing
from deploy.benchmarks.routing.real.run import compared, figures, turn_of
from deploy.benchmarks.routing.real.traffic import OUTPUT, Planned, workloads
from deploy.benchmarks.routing.worker import SimWorker
from worker.config import EngineConfig
from worker.frontend.server import WorkerFrontend
from worker.protocol.blocks import block_hashes, root_hash
from worker.protocol.messages import BlockStored, Submit, SubmitBatch, SubmitReply, WorkerUpdate
from worker.protocol.sampling import SamplingParams

MODEL = find_demo_model()
FAST = RealOptions(model=MODEL, pace=0.1)


def event_usage(events: list[bytes]) -> dict[str, object]:
    assert events[-1] == b"data: [DONE]\n\n"
    return dict(msgspec.json.decode(events[-2][6:])["usage"])


def test_texts_have_the_tokens_that_were_drawn_and_extend_each_other() -> None:
    tokenizer = load(MODEL)
    vocabulary = Vocabulary(tokenizer)
    makers = workloads(vocabulary, 4, 2.0, 0.05)
    planned = {one.name: one for one in makers["multi-turn"](1)}
    first, second = planned["c0.0"], planned["c0.1"]
    assert second.after == first.name
    ids = tokenizer.encode(second.prompt).ids
    before = tokenizer.encode(first.prompt).ids
    assert ids[: len(before) + OUTPUT] == before + [vocabulary.answer_id] * OUTPUT
    burst = makers["sibling-burst"](1)
    assert [len(tokenizer.encode(one.prompt).ids) for one in burst] == [3060] * 16
    assert makers["hot-prefix"](1) == makers["hot-prefix"](1)
    assert makers["hot-prefix"](1) != makers["hot-prefix"](2)


def test_a_steps_end_counts_from_the_end_of_the_one_before() -> None:
    pace = Pace()
    first = pace.end_of(0.01)
    time.sleep(0.02)  # found late
    assert pace.end_of(0.01) == pytest.approx(first + 0.01)
    pace.idle()
    now = time.monotonic()
    assert pace.end_of(0.01) >= now + 0.01


async def test_a_paced_server_caches_prompts_and_takes_its_time() -> None:
    server = PacedServer(MODEL, FAST.shape, FAST.pace)
    prompt = Vocabulary(load(MODEL)).text(np.arange(400))
    costs, seconds, cached = FAST.shape.costs, [], []
    for _ in range(2):
        start = time.perf_counter()
        events = [event async for event in server.generate(prompt, 3)]
        seconds.append(time.perf_counter() - start)
        usage = event_usage(events)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (400, 3)
        cached.append(usage["prompt_tokens_details"])
    assert cached == [{"cached_tokens": 0}, {"cached_tokens": 384}]
    assert seconds[0] >= FAST.pace * (costs.prefill(400) + 3 * costs.constant)
    assert server.num_open == 0


async def test_a_client_that_leaves_leaves_nothing_running() -> None:
    server = PacedServer(MODEL, FAST.shape, FAST.pace)
    stream = server.generate("the brown bread", 1000)
    await anext(stream)
    await stream.aclose()
    assert server.num_open == 0
    usage = event_usage([event async for event in server.generate("the brown bread", 2)])
    assert usage["completion_tokens"] == 2


async def test_traffic_over_http_waits_for_what_it_follows() -> None:
    with http_worker() as url:
        planned = [
            Planned(name="b", at=0.0, prompt=" the bread" * 200, after="a"),
            Planned(name="a", at=0.0, prompt=" the bread" * 100, measured=False),
            Planned(name="c", at=0.05, prompt=" the bread" * 100),
        ]
        sent = await send_all(url, "some", planned)
    assert [one.error for one in sent] == ["", "", ""]
    assert [one.num_prompt for one in sent] == [400, 200, 200]
    assert [one.measured for one in sent] == [True, False, True]
    assert (sent[1].num_cached, sent[0].num_cached) == (0, 192)
    assert min(one.ttft_s for one in sent) > 0.0


@contextmanager
def http_worker() -> Iterator[str]:
    (port,) = free_ports(1)
    worker = HttpWorker(port, MODEL, 2, 0.1)
    module = "deploy.benchmarks.routing.real.http_worker"
    process = subprocess.Popen([sys.executable, "-m", module, msgspec.json.encode(worker).decode()])
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except urllib.error.URLError:
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(120)


async def test_the_frontend_receives_blocks_and_tokens(tmp_path: Path) -> None:
    """A steady worker behind the real front returns prose, with each token at its position."""
    front = WorkerFrontend("w", str(tmp_path) if len(str(tmp_path)) < 60 else "/tmp")
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(front.open(),), daemon=True
    )
    process.start()
    try:
        info = await front.wait_ready()
        assert (info.page_size, info.vocab_size) == (16, 2560)
        stream = front.attach("g")
        decode = msgspec.msgpack.Decoder(SubmitReply).decode
        await anext(stream)
        batch = SubmitBatch(submits=[submit("a", 5), submit("b", 2)])
        reply = decode(await front.submit(msgspec.msgpack.encode(batch)))
        assert not reply.rejections
        tokens, stored = await until_finished(stream, {"a", "b"})
        text = prose(MODEL)
        assert tokens == {"a": text[40:45], "b": text[40:42]}
        assert stored == 4, "their first 32 tokens, which differ, in pages of 16"
    finally:
        front.close()
        process.join(120)
        process.terminate()


def serve(directory: str) -> None:
    try:
        run_steady(0.001, EngineConfig.of(model=MODEL, page_size=16), directory)
    except EOFError:
        return


def submit(request_id: str, max_tokens: int) -> Submit:
    first = ord(request_id)
    return Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=np.arange(first, first + 40, dtype="<i4").tobytes(),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
    )


def steady_worker() -> SimWorker:
    shape = steady_shape(0.02, EngineConfig.of(model=MODEL, max_num_seqs=8))
    return paced_worker(MODEL, shape, 1.0, (5, 6, 7))


def test_every_running_request_gets_one_token_per_steady_step() -> None:
    worker = steady_worker()
    worker.submit(submit("a", 2))
    worker.submit(submit("b", 4))
    reports = []
    for _ in range(3):
        assert worker.begin() == pytest.approx(0.02)
        reports.append(worker.finish())
    first, second, third = reports
    assert [(d.request_id, d.token_ids) for d in first.deltas["g"]] == [("a", [6]), ("b", [6])]
    assert [d.finish_reason for d in second.deltas["g"]] == ["length", None]
    assert [(d.request_id, d.token_ids) for d in third.deltas["g"]] == [("b", [5])]
    worker.abort("b")
    assert worker.begin() is None


def test_prompts_enter_the_prefix_cache() -> None:
    worker = steady_worker()
    request = submit("a", 2)
    worker.submit(request)
    worker.begin()
    hashes = block_hashes(request.prompt, 16, root_hash(worker.info.block_hash_salt))
    assert worker.finish().block_events == [BlockStored(block_hashes=hashes, parent_hash=None)]
    worker.begin()
    assert worker.finish().block_events == []


def test_a_resumed_answer_equals_that_of_the_first_worker() -> None:
    words = len(prose(MODEL))
    whole = prose_after(MODEL, 0, words)
    assert whole.startswith("The ferry")
    assert prose_after(MODEL, words, words) == whole
    assert prose_after(MODEL, 0, 5) + prose_after(MODEL, 5, words - 5) == whole


async def until_finished(
    stream: AsyncIterator[bytes], waiting: set[str]
) -> tuple[dict[str, list[int]], int]:
    tokens: dict[str, list[int]] = {request_id: [] for request_id in waiting}
    stored = 0
    async for payload in stream:
        item = msgspec.msgpack.decode(payload, type=WorkerUpdate)
        stored += sum(len(event.block_hashes) for event in item.block_events)
        for delta in item.deltas:
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason == "length":
                waiting.remove(delta.request_id)
        if not waiting:
            return tokens, stored
    raise AssertionError("the stream ended")


def sent(ttft_s: float, cached: int, **more: object) -> Sent:
    one = Sent("hot-prefix", ttft_s, 100, cached, True)
    return msgspec.structs.replace(one, **more)


def test_figures_are_of_the_measured_requests_that_got_through() -> None:
    one = figures(
        "hot-prefix",
        [
            sent(0.1, 50),
            sent(0.3, 100),
            sent(9.0, 0, measured=False),
            sent(9.0, 0, error="lost"),
            sent(9.0, 0, workload="multi-turn"),
        ],
    )
    assert one.hit_rate == pytest.approx(0.75)
    assert one.p50_ttft_ms == pytest.approx(200.0)
    assert one.num_requests == 2


def test_checks_compare_ours_with_every_peer() -> None:
    turns = {
        "rayfleet": [[sent(0.1, 90)], [sent(0.2, 80)]],
        "ray-prefix": [[sent(0.3, 95)], [sent(0.2, 85, error="cut"), sent(0.2, 85)]],
    }
    result = compared(turns, ["ray-prefix"])
    checks = {check["name"]: (check["value"], check["holds"]) for check in result["checks"]}
    assert list(checks) == [
        "real_hot_prefix_ray_prefix_hit_difference",
        "real_hot_prefix_ray_prefix_ttft_p50_ratio",
        "real_hot_prefix_ray_prefix_ttft_p99_ratio",
        "failed_requests",
    ]
    assert checks["real_hot_prefix_ray_prefix_hit_difference"] == (pytest.approx(-0.05), False)
    assert checks["real_hot_prefix_ray_prefix_ttft_p50_ratio"] == (pytest.approx(0.6), True)
    assert checks["failed_requests"] == (1, False)


def test_a_turn_that_failed_is_counted_and_the_rest_is_compared_without_it() -> None:
    turns = {
        "rayfleet": [[sent(0.1, 90)], [sent(0.2, 80)]],
        "sglang-router": [[], []],
        "ray-prefix": [[], [sent(0.4, 85)]],
    }
    result = compared(turns, ["sglang-router", "ray-prefix"])
    checks = {check["name"]: check["value"] for check in result["checks"]}
    assert result["failed_turns"] == {"sglang-router": 2, "ray-prefix": 1}
    assert not any("sglang_router" in name for name in checks)
    # Only the second round of ours counts, which the peer has as well.
    assert checks["real_hot_prefix_ray_prefix_hit_difference"] == pytest.approx(-0.05)
    assert checks["real_hot_prefix_ray_prefix_ttft_p50_ratio"] == pytest.approx(0.5)
    assert [row["router"] for row in result["rows"]] == ["rayfleet", "ray-prefix"]


@pytest.mark.long  # a turn that failed is counted, and a missing peer reported, without processes
def test_a_peer_whose_router_ends_at_once_costs_its_turn_and_not_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = replace(FAST, sglang_router="/bin/false", num_workers=2, scale=0.1)
    assert turn_of(options, "sglang-router", 0) == []
    log = capfd.readouterr().err
    assert "a process exited before" in log
    assert "skipping sglang-router, round 0" in log


def test_a_peer_that_is_not_installed_is_reported_and_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = replace(FAST, sglang_router="/nowhere/sglang-router")
    assert "pip install sglang-router" in missing(options, "sglang-router")
    assert not missing(options, "ray-prefix")
    command = ["router", "--real", "--peer", "sglang-router", "--sglang-router", "/nowhere/s"]
    assert main(command) == 2
    assert "--sglang-router V/bin/sglang-router" in capsys.readouterr().err


def test_options_that_cannot_be_are_refused() -> None:
    for wrong in ({"peers": ("nginx",)}, {"workloads": ("churn",)}, {"variant": "x"}):
        with pytest.raises(ValueError, match=r"choose from|shared|must be one of"):
            RealOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        RealOptions(num_workers=1)
