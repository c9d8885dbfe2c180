"""What a fleet says of itself at /metrics, as far as faults show there."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

_TIMEOUT_S = 5.0
_SERIES = re.compile(r"^rayfleet_(\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
LOADS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Gauges of workers that are 0 where nobody asks for anything."""
PENDING = "gateway_pending_requests"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScrapedMetrics:
    """One answer. Keys are (model, worker) or (model, gateway)."""

    ready: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Workers that each gateway can send requests to."""
    resubmissions: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """That each gateway has made."""
    loads: Mapping[str, Mapping[tuple[str, str], float]] = field(default_factory=dict)
    """Each of LOADS by worker, and PENDING by gateway."""

    @property
    def left_over(self) -> dict[str, float]:
        """Loads that are not 0, summed over workers or gateways."""
        sums = {name: sum(values.values()) for name, values in self.loads.items()}
        return {name: value for name, value in sums.items() if value}


def scrape(base_url: str) -> ScrapedMetrics | None:
    """What the fleet tells; None where nobody answers."""
    try:
        with urllib.request.urlopen(f"{base_url}/metrics", timeout=_TIMEOUT_S) as response:
            return read(response.read().decode())
    except (OSError, ValueError, urllib.error.URLError):
        return None


def read(text: str) -> ScrapedMetrics:
    """What is in an answer of /metrics."""
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
