"""Metrics from a fleet's /metrics that show the effects of faults."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

_TIMEOUT_S = 5.0
_SERIES = re.compile(r"^rayfleet_(\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
LOADS = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_for_lora",
    "kv_cache_usage_perc",
)
"""Worker gauges that are 0 without load."""
PENDING = "gateway_pending_requests"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScrapedMetrics:
    """One response. Keys are (model, worker) or (model, gateway)."""

    ready: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Number of ready workers, keyed by gateway."""
    resubmissions: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Number of resubmissions, keyed by gateway."""
    loads: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    """LOADS by worker, and PENDING by gateway."""

    @property
    def left_over(self) -> dict[str, float]:
        """Nonzero loads, summed over workers or gateways."""
        sums = {name: sum(values.values()) for name, values in self.loads.items()}
        return {name: value for name, value in sums.items() if value}


def scrape(base_url: str) -> ScrapedMetrics | None:
    """Metrics of the fleet; None if it does not respond."""
    try:
        with urllib.request.urlopen(f"{base_url}/metrics", timeout=_TIMEOUT_S) as response:
            return read(response.read().decode())
    except (OSError, ValueError, urllib.error.URLError):
        return None


def read(text: str) -> ScrapedMetrics:
    """Parses a response of /metrics."""
    families: dict[str, dict[tuple[str, str], float]] = {}
    for name, labels, value in _SERIES.findall(text):
        found = dict(_LABEL.findall(labels))
        owner = found.get("worker_id") or found.get("gateway_id") or ""
        key = (found.get("model_name", ""), owner)
        series = families.setdefault(name, {})
        series[key] = series.get(key, 0.0) + float(value)
    return ScrapedMetrics(
        ready=families.get("num_workers_ready", {}),
        resubmissions=families.get("resubmissions", {}),
        loads={name: families.get(name, {}) for name in (*LOADS, PENDING)},
    )
