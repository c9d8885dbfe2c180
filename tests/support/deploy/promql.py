"""Metrics and labels used in queries of dashboards and alert rules."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import yaml

from tests.support.paths import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RULES = MONITORING / "rules" / "rayfleet.yml"
TARGET_LABELS = frozenset(("cluster", "namespace", "fleet"))
"""Labels that scrape configurations add to each series."""
ELSEWHERE = frozenset(
    (
        "up",  # Prometheus's own
        "rayfleet_gpu_memory_used_bytes",  # of ranks on CUDA
        "rayfleet_gpu_memory_total_bytes",
    )
)
"""Metrics exported neither by a gateway nor by a worker on CPU."""
_SELECTOR = re.compile(r"\b((?:rayfleet_\w+|up)\b)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """Series that a query reads."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    def takes(self, name: str, labels: dict[str, str]) -> bool:
        """Whether the selector matches a sample; the sample must have each label of the
        matchers."""
        return name == self.name and all(
            label in labels and _holds(labels[label], operator, value)
            for label, operator, value in self.matchers
            if label not in TARGET_LABELS
        )


def panel_queries() -> dict[str, str]:
    """Queries of all dashboards, keyed by position, with Grafana's variables filled in."""
    queries = {}
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m")
                for variable in ("model", *TARGET_LABELS):
                    query = query.replace(f"${variable}", ".*")
                queries[f"{path.stem}: {panel['title']} {target['refId']}"] = query
    return queries


def rule_queries() -> dict[str, str]:
    """Queries of all alerts, keyed by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def selectors(query: str) -> list[Selector]:
    """Series that a query reads."""
    return [
        Selector(name, tuple(_MATCHER.findall(matchers or "")))
        for name, matchers in _SELECTOR.findall(query)
    ]


def is_exported_here(query: str) -> bool:
    """Whether a gateway and workers on CPU export all metrics that a query reads."""
    return not any(selector.name in ELSEWHERE for selector in selectors(query))


def grouping_labels(query: str) -> set[str]:
    """Labels that a query's aggregations keep and its joins use."""
    lists = _GROUPING.findall(query)
    return {label.strip() for found in lists for label in found.split(",") if label.strip()}


def missing(query: str, samples: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Selectors of a query that match none of the samples (name, labels)."""
    lacks = []
    labels: set[str] = set()
    for selector in selectors(query):
        found = [sample for name, sample in samples if selector.takes(name, sample)]
        if found:
            labels.update(*found)
        elif selector.name not in ELSEWHERE:
            value_pattern = ", ".join("".join(matcher) for matcher in selector.matchers)
            lacks.append(f"{selector.name}{{{value_pattern}}}")
    if not is_exported_here(query):
        return lacks
    return lacks + sorted(grouping_labels(query) - labels - TARGET_LABELS)


def _holds(value: str, operator: str, value_pattern: str) -> bool:
    if operator in ("=", "!="):
        return (value == value_pattern) == (operator == "=")
    return bool(re.fullmatch(value_pattern, value)) == (operator == "=~")
