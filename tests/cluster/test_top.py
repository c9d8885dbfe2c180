"""`rayfleet top`: rates from two scrapes of real collectors, and their display."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from cluster.cli.fleet_rates import (
    Scrape,
    model_rows,
    quantile_of,
    session_rows,
    sparkline,
    worker_rows,
)
from cluster.cli.main import build_parser
from cluster.cli.top import (
    MODEL_HEADS,
    SESSION_HEADS,
    WORKER_HEADS,
    FleetWatch,
    TopOptions,
    page,
    quits_within,
    single_keys,
    worker_cells,
)
from tests.support.router.rig import Rig, build_checkpoint
from tests.support.worker.played_engine import INFO
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.protocol.adapters import AdapterTotals
from worker.protocol.exposition import TEXT, render
from worker.protocol.host_cache import HostCacheTotals
from worker.protocol.messages import EngineInfo, LoadSnapshot
from worker.protocol.text.tokenizer import load_tokenizer

FIRST_LOAD = LoadSnapshot(num_preemptions=2, num_prefix_queries=100, num_prefix_hits=80)
LOAD = LoadSnapshot(
    num_running=3,
    num_waiting=1,
    num_reserved=1,
    num_free_pages=8,
    num_total_pages=32,
    num_preemptions=5,
    num_prefix_queries=300,
    num_prefix_hits=130,
)


def scrape_of(
    at: float, load: LoadSnapshot, tokens: int, *firsts: float, info: EngineInfo | None = INFO
) -> Scrape:
    latency = WorkerLatency()
    latency.generation_tokens = tokens
    for seconds in firsts:
        latency.first_token.observe(seconds)
    view = WorkerView("demo", "w", 1, info, load, latency)
    text = render(worker_metrics(view), TEXT).decode()
    return Scrape(at, [text, text])  # two nodes may export the same worker


def test_rates_of_workers_cover_the_time_between_two_scrapes() -> None:
    before = scrape_of(10.0, FIRST_LOAD, 1000, 9.0)
    [row] = worker_rows(before, scrape_of(12.0, LOAD, 1500, 9.0, 0.04, 0.04))
    assert (row.model, row.worker, row.ready) == ("demo", "w", True)
    assert (row.running, row.waiting, row.preemptions) == (3, 2, 3)
    assert (row.kv_usage, row.hit_rate, row.tokens_per_s) == (0.75, 0.25, 250.0)
    assert row.ttft_ms is not None
    assert 20.0 < row.ttft_ms <= 40.0
    assert row.host_usage is None


def test_one_scrape_or_a_loading_worker_has_no_rates() -> None:
    [row] = worker_rows(None, scrape_of(12.0, LOAD, 1500, 0.04, info=None))
    assert (row.ready, row.tokens_per_s, row.hit_rate, row.ttft_ms) == (False, 0.0, None, None)


def test_reset_counters_count_from_zero() -> None:
    """Counters are reset by a new rank group."""
    [row] = worker_rows(scrape_of(10.0, LOAD, 1500), scrape_of(11.0, FIRST_LOAD, 200))
    assert (row.tokens_per_s, row.preemptions, row.hit_rate) == (200.0, 2, 0.8)


def test_host_cache_usage_is_shown_with_offloading() -> None:
    load = replace(LOAD, host_cache=HostCacheTotals(num_pages=8, num_used=2))
    info = replace(INFO, num_host_pages=8)
    [row] = worker_rows(None, scrape_of(1.0, load, 0, info=info))
    assert row.host_usage == 0.25


@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (float("inf"), 0.0)], 0.5, None),
        ([(1.0, 10.0), (2.0, 10.0), (float("inf"), 10.0)], 0.5, 0.5),
        ([(1.0, 5.0), (3.0, 15.0), (float("inf"), 20.0)], 0.5, 2.0),
        ([(1.0, 5.0), (3.0, 15.0), (float("inf"), 20.0)], 0.95, 3.0),
    ],
)
def test_quantiles_equal_those_of_prometheus(
    counts: list[tuple[float, float]], q: float, value: float | None
) -> None:
    assert quantile_of(counts, q) == value


def test_sparklines() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    build_checkpoint(tmp_path)
    rig = Rig(tmp_path, load_tokenizer(str(tmp_path)))
    yield rig
    await rig.stop()


async def test_models_are_read_from_metrics_of_a_gateway(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start(api_keys=("alpha",))
    rig.client.headers["authorization"] = "Bearer alpha"
    before = Scrape(1.0, [(await rig.client.get("/metrics")).text])
    response = await rig.chat("hello", slo={"ttft_ms": 60000})
    tokens = response.json()["usage"]["completion_tokens"]
    now = Scrape(2.0, [(await rig.client.get("/metrics")).text])
    [row] = model_rows(before, now)
    assert (row.model, row.workers_ready, row.pending) == ("stub", 2, 0)
    assert (row.requests_per_s, row.tokens_per_s) == (1.0, tokens)
    assert row.ttft_p50_ms is not None
    assert row.ttft_p95_ms is not None
    assert row.ttft_p50_ms <= row.ttft_p95_ms
    assert row.slo_attainment == 1.0

    monkeypatch.setenv("RAYFLEET_API_KEY", "alpha")
    async with rig.server() as url:
        for flag in ("--json", "--once"):
            argv = ["top", flag, "--interval-s", "0.01", "--url", url]
            arguments = build_parser().parse_args(argv)
            assert await asyncio.to_thread(arguments.run, arguments) == 0
        monkeypatch.delenv("RAYFLEET_API_KEY")
        with pytest.raises(ValueError, match="set RAYFLEET_API_KEY"):
            await asyncio.to_thread(arguments.run, arguments)
    first, _, text = capsys.readouterr().out.partition("\n")
    assert [model["model"] for model in json.loads(first)["models"]] == ["stub"]
    heads, cells, _, _ = text.splitlines()
    assert (*heads.split(),) == MODEL_HEADS
    assert cells.split()[:2] == ["stub", "2/1"]


def test_the_table_has_a_line_for_each_worker() -> None:
    fleet = FleetWatch(TopOptions())
    fleet.update(scrape_of(10.0, FIRST_LOAD, 1000))
    fleet.update(scrape_of(12.0, LOAD, 1500))
    console = Console(width=140, record=True)
    console.print(page(fleet))
    text = console.export_text()
    assert all(head in text for head in WORKER_HEADS)
    [line] = [line for line in text.splitlines() if "demo" in line]
    assert line.split() == ["demo", "w", "3", "2", "75%", "-", "-", "25%", "250", "-", "3", "█"]


def test_workers_show_the_slots_of_adapters_that_are_used() -> None:
    load = LoadSnapshot(adapters=AdapterTotals(on_device=["a", "b"], on_host=["a", "b", "c"]))
    info = msgspec.structs.replace(INFO, max_loras=4)
    [row] = worker_rows(None, scrape_of(1.0, load, 0, info=info))
    assert worker_cells(row)[WORKER_HEADS.index("LORA")] == "2/4"


def test_agent_sessions_have_a_line_per_model() -> None:
    waiting = {"model": "demo", "state": "waiting", "state_s": 42.4}
    idle = {"model": "demo", "state": "idle", "state_s": 50.0}
    model = {"id": "demo", "waiting": 1, "live": 3, "live_tokens": 300, "cache_tokens": 400}
    other = {"id": "other", "waiting": 0, "live": 0, "live_tokens": 0, "cache_tokens": 0}
    fleet = FleetWatch(TopOptions())
    fleet.sessions = session_rows({"models": [model, other], "data": [waiting, idle]})
    console = Console(width=140, record=True)
    console.print(page(fleet))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert (*SESSION_HEADS,) in [(*line,) for line in lines]
    assert [line for line in lines if line[:1] in (["demo"], ["other"])] == [
        ["demo", "3", "1", "42s", "75%"],
        ["other", "0", "0", "-", "-"],
    ]


def test_idle_rows_keep_their_last_values() -> None:
    fleet = FleetWatch(TopOptions())
    fleet.update(scrape_of(10.0, LOAD, 1500, 0.04, 0.04))
    [since_start] = fleet.workers
    assert since_start.ttft_ms is not None, "known from before the first scrape"
    assert since_start.hit_rate == 130 / 300
    fleet.update(scrape_of(12.0, LOAD, 1500, 0.04, 0.04))
    [idle] = fleet.workers
    assert (idle.ttft_ms, idle.hit_rate) == (since_start.ttft_ms, since_start.hit_rate)
    assert idle.tokens_per_s == 0.0
    assert "-" not in worker_cells(idle)[7:]


@pytest.mark.parametrize(("keys", "quits"), [(b"q", True), (b"xQ", True), (b"x", False)])
def test_q_quits(keys: bytes, quits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(terminal)
        with single_keys():
            os.write(leader, keys)  # without a line's end
            assert quits_within(5.0 if quits else 0.05) == quits
        assert termios.tcgetattr(terminal) == before
    os.close(leader)
