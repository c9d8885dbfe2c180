"""One scrape of several processes: sockets, port takeover, and no stale series."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from worker.metrics.node import NodeMetrics, NodeMetricsConfig
from worker.protocol.exposition import OPENMETRICS, TEXT, merge, render


def own(worker: str, value: float = 1.0) -> Callable[[str], bytes]:
    counter = Counter("work", "Work\ndone.", ["worker"], registry=None)
    counter.labels(worker).inc(value)
    return lambda content_type: render(counter.collect(), content_type)


@asynccontextmanager
async def process(
    name: str, directory: Path, config: NodeMetricsConfig | None = None
) -> AsyncIterator[NodeMetrics]:
    metrics = NodeMetrics(name, own(name), str(directory), config)
    await metrics.open()
    try:
        yield metrics
    finally:
        metrics.close()


def workers(text: str) -> set[str]:
    found = {family.name: family for family in parse(text)}
    return {
        sample.labels["worker"] for sample in found["work"].samples if "worker" in sample.labels
    }


def processes(text: str) -> dict[str, float]:
    found = {family.name: family for family in parse(text)}
    return {s.labels["state"]: s.value for s in found["rayfleet_node_processes"].samples}


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("n") / "metrics"


async def test_any_process_answers_for_all_without_exited_ones(directory: Path) -> None:
    async with process("a", directory) as a:
        async with process("b", directory) as b:
            for scraped in (a, b):
                body, content_type = await scraped.gather()
                assert content_type == TEXT
                assert workers(body.decode()) == {"a", "b"}
                assert processes(body.decode()) == {"answered": 2, "silent": 0}
                assert body.count(b"# TYPE work_total counter") == 1
        # A killed process leaves its socket behind.
        killed = socket.socket(socket.AF_UNIX)
        killed.bind(str(directory / "1-killed"))
        killed.close()
        body, _ = await a.gather()
        assert workers(body.decode()) == {"a"}
        assert processes(body.decode()) == {"answered": 1, "silent": 0}
        assert len(list(directory.iterdir())) == 1


async def test_a_hung_process_is_omitted_and_counted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.metrics.node.ANSWER_S", 0.1)
    async with process("a", directory) as a:
        with socket.socket(socket.AF_UNIX) as hung:
            hung.bind(str(directory / "1-hung"))
            hung.listen()
            body, _ = await a.gather()
    assert workers(body.decode()) == {"a"}
    assert processes(body.decode()) == {"answered": 1, "silent": 1}


async def test_openmetrics_from_several_processes_can_be_read(directory: Path) -> None:
    async with process("a", directory) as a, process("b", directory):
        body, content_type = await a.gather("application/openmetrics-text; version=1.0.0")
    assert content_type == OPENMETRICS
    names = {family.name for family in parse_openmetrics(body.decode())}
    assert {"work", "rayfleet_process_cpu_seconds", "rayfleet_node_processes"} <= names
    assert body.count(b"# EOF") == 1


async def test_the_port_is_taken_over_when_its_holder_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.metrics.node.RETRY_S", 0.02)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        config = NodeMetricsConfig(port=probe.getsockname()[1])
    url = f"http://127.0.0.1:{config.port}/metrics"

    async def scrape(client: httpx.AsyncClient, expected: set[str]) -> None:
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if workers((await client.get(url)).text) == expected:
                        return
                await asyncio.sleep(0.01)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(process("a", directory, config))
        await scrape(client, {"a"})
        await stack.enter_async_context(process("b", directory, config))
        await scrape(client, {"a", "b"})
        await first.aclose()
        await scrape(client, {"b"})
        assert (await client.get(url.replace("/metrics", "/"))).status_code == 404


async def test_a_directory_of_others_is_not_used(directory: Path) -> None:
    directory.mkdir()
    os.chmod(directory, 0o755)
    async with process("a", directory) as a:
        body, _ = await a.gather()
        assert workers(body.decode()) == {"a"}
        assert not list(directory.iterdir())


def test_families_are_merged_not_repeated() -> None:
    merged = merge([own("a")(TEXT), own("b", 2)(TEXT)], TEXT).decode()
    assert merged.count("# HELP work_total ") == 1
    assert {(s.labels["worker"], s.value) for f in parse(merged) for s in f.samples} >= {
        ("a", 1.0),
        ("b", 2.0),
    }
