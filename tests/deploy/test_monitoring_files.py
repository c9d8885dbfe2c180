"""Dashboards and alert rules against the families that the code can tell of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from deploy.monitoring import boards, build, queries
from router.fleet import Fleet
from router.metrics.collector import GatewayCollector, Source
from router.metrics.stats import ModelStats
from tests.deploy.prometheus_binaries import require
from tests.deploy.promql import MONITORING, RULES, missing, panel_queries, rule_queries
from worker.metrics.collector import WorkerCollector, WorkerView
from worker.metrics.node import NodeMetrics
from worker.wire.exposition import merge, render
from worker.wire.messages import AttachSnapshot, EngineInfo, LoadSnapshot
from worker.wire.slo import Slo

INFO = EngineInfo("m", 64, 128, 32, 4, 8, [2], "salt")


def own(content_type: str) -> bytes:
    """A gateway and a worker that have done nothing, but for one class of SLO."""
    fleet = Fleet()
    fleet.attach("w", AttachSnapshot(1, "w", 1, INFO, [], LoadSnapshot()))
    stats = ModelStats()
    stats.latency(Slo(ttft_ms=1))
    stats.slo[4, "interactive", True] = 1
    gateway = GatewayCollector("g", [Source("m", stats, fleet)])
    worker = WorkerCollector(lambda: WorkerView("m", "w", 1, INFO, LoadSnapshot()))
    return merge([render(gateway, content_type), render(worker, content_type)], content_type)


async def test_every_query_is_of_a_family_that_there_is(tmp_path: Path) -> None:
    body, _ = await NodeMetrics("gateway g", own, str(tmp_path / "metrics")).gather()
    samples = [(s.name, s.labels) for family in parse(body.decode()) for s in family.samples]
    queries = panel_queries() | rule_queries()
    assert len(queries) > 60
    assert not {where: lacks for where, q in queries.items() if (lacks := missing(q, samples))}
    assert missing('sum by (nobody) (rate(rayfleet_prompt_tokens_total{state="x"}[1m]))', samples)


def test_what_is_missing_is_seen() -> None:
    samples = [("rayfleet_a", {"state": "ready"})]
    assert not missing('sum by (state) (rayfleet_a{state=~"re.*"})', samples)
    assert missing('rayfleet_a{state="lost"}', samples)
    assert missing("rayfleet_b", samples)
    assert missing("sum by (worker_id) (rayfleet_a)", samples) == ["worker_id"]


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda board: board.name)
def test_dashboards_are_what_the_builder_writes(board: queries.Board) -> None:
    path = build.FOLDER / f"{board.name}.json"
    assert path.read_text() == build.text(board), "run python -m deploy.monitoring.build"


def test_there_is_no_dashboard_besides() -> None:
    assert {p.stem for p in build.FOLDER.iterdir()} == {board.name for board in boards.BOARDS}


def test_promtool_accepts_rules_and_configuration() -> None:
    promtool = require("promtool")
    for command in (("rules", RULES), ("config", MONITORING / "prometheus.yml")):
        result = subprocess.run(
            [promtool, "check", *map(str, command)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
