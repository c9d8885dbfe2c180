"""Dashboards and alert rules only use metrics that the code exports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from deploy.monitoring import boards, build, queries
from router.fleet import Fleet
from router.metrics.collector import GatewayCollector, Source
from router.metrics.http import HttpStats
from router.metrics.stats import ModelStats
from tests.support.deploy.prometheus_binaries import require
from tests.support.deploy.promql import (
    MONITORING,
    RULES,
    TARGET_LABELS,
    missing,
    panel_queries,
    rule_queries,
    selectors,
)
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.metrics.node import NodeMetrics
from worker.protocol.exposition import merge, render
from worker.protocol.messages import AttachSnapshot, EngineInfo, LoadSnapshot
from worker.protocol.slo import Slo

INFO = EngineInfo("m", 64, 128, 32, 4, 8, [2], "salt", startup={"launch": 1.0})
CASES = Path(__file__).with_name("alerts.test.yml")
RUNBOOK = "deploy/monitoring/RUNBOOK.md"
"""Base of all links; the chart replaces it with the published page."""


def own(content_type: str) -> bytes:
    """Metrics of an idle gateway with one SLO class, and of an idle worker."""
    fleet = Fleet()
    fleet.attach("w", AttachSnapshot(1, "w", 1, INFO, [], LoadSnapshot()))
    stats = ModelStats()
    stats.latency(Slo(ttft_ms=1))
    stats.slo[4, "interactive", True] = 1
    gateway = GatewayCollector("g", [Source("m", stats, fleet)], HttpStats())
    view = WorkerView("m", "w", 1, INFO, LoadSnapshot(), WorkerLatency())
    families = gateway.collect(), worker_metrics(view)
    return merge([render(own, content_type) for own in families], content_type)


async def test_every_query_is_of_a_family_that_there_is(tmp_path: Path) -> None:
    metrics = NodeMetrics("gateway g", own, str(tmp_path / "metrics"))
    body, _ = await metrics.gather()
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


def test_promtool_accepts_rules_panels_and_configuration(tmp_path: Path) -> None:
    promtool = require("promtool")
    panels = tmp_path / "panels.yml"
    recorded = [
        {"record": f"panel:{number}", "expr": query}
        for number, query in enumerate(panel_queries().values())
    ]
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    files = (("rules", RULES), ("rules", panels), ("config", MONITORING / "prometheus.yml"))
    for command in files:
        result = subprocess.run(
            [promtool, "check", *map(str, command)], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr


def alerts() -> dict[str, dict[str, str]]:
    """Annotations by alert."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["annotations"] for group in groups for rule in group["rules"]}


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    text = (MONITORING.parents[1] / RUNBOOK).read_text()
    title, *parts = text.split("\n## ")
    sections = {name: body for name, _, body in (part.partition("\n\n") for part in parts)}
    assert title.startswith("# Runbook")
    assert list(sections) == list(alerts()), "one section per alert, in the same order"
    for alert, notes in alerts().items():
        assert notes["runbook_url"] == f"{RUNBOOK}#{alert.lower()}"  # as sites make anchors
        assert len(sections[alert].split()) > 30, f"{alert}: what it means, and what to do"


def test_alerts_fire_and_are_silent_where_they_should(tmp_path: Path) -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    covered = set()
    for case in cases:
        alert, verdict = re.findall(r"^(\w+) (fires|is silent): ", case["name"])[0]
        (check,) = case["promql_expr_test"]
        assert check["expr"] == f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
        assert bool(check["exp_samples"]) == (verdict == "fires")
        covered.add((alert, verdict))
    assert covered == {(alert, verdict) for alert in alerts() for verdict in ("fires", "is silent")}
    command = [require("promtool"), "test", "rules", *cases_by_alert(cases, tmp_path)]
    # Go collects garbage less often, which takes a quarter of the time.
    environment = {**os.environ, "GOGC": "800"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("SUCCESS") == len(alerts())


def cases_by_alert(cases: list[Any], folder: Path) -> list[str]:
    """Files with the cases of one alert each and its rule alone: promtool evaluates all rules of a
    file in every minute of each case."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    paths = []
    for group in groups:
        for rule in group["rules"]:
            alert = rule["alert"]
            alone = {"groups": [{**group, "rules": [rule]}]}
            (folder / f"{alert}.rules.yml").write_text(yaml.safe_dump(alone))
            of_alert = {
                "rule_files": [f"{alert}.rules.yml"],
                "evaluation_interval": "1m",
                "tests": [case for case in cases if case["name"].startswith(f"{alert} ")],
            }
            paths.append(folder / f"{alert}.test.yml")
            paths[-1].write_text(yaml.safe_dump(of_alert))
    return [str(path) for path in paths]


def test_dashboards_and_alerts_tell_fleets_apart() -> None:
    variables = {
        variable["name"] for variable in build.dashboard(boards.FLEET)["templating"]["list"]
    }
    assert set(queries.FLEET_LABELS) == TARGET_LABELS <= variables
    for where, query in panel_queries().items():
        for selector in selectors(query):
            assert {label for label, *_ in selector.matchers} >= TARGET_LABELS, where
    for alert, query in rule_queries().items():
        for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert set(grouping.split(", ")) >= TARGET_LABELS, f"{alert} mixes fleets"
