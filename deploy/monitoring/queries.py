"""Boards, panels, and common forms of their queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLEET_LABELS = ("cluster", "namespace", "fleet")
"""Target labels from the scrape configuration that identify a fleet. If a label is not set, its
variable is Grafana's "All", which also matches series without the label."""
F = ", ".join(f'{label}=~"${label}"' for label in FLEET_LABELS)
M = f'{F}, model_name=~"$model"'
MET = ', met="true"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot over time."""

    title: str
    unit: str
    """Grafana's name for the unit."""
    queries: Mapping[str, str]
    """Queries, keyed by legend."""
    description: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    name: str
    title: str
    description: str
    panels: tuple[Panel, ...]


def rate(name: str, by: str = "", more: str = "", of: str = M) -> str:
    """Query for the per-second rate of a counter, summed over all labels except `by`."""
    return f"sum by ({by}) (rate(rayfleet_{name}{{{of}{more}}}[$__rate_interval]))"


def level(name: str, by: str = "", of: str = M) -> str:
    """Query for a gauge, summed over all labels except `by`."""
    return f"sum by ({by}) (rayfleet_{name}{{{of}}})"


def whole(gauge: str, by: str) -> str:
    """Query for a gauge for which all gateways of a fleet report the same value, summed over
    fleets."""
    per_fleet = ", ".join((*FLEET_LABELS, by))
    return f"sum by ({by}) (max by ({per_fleet}) (rayfleet_{gauge}{{{M}}}))"


def quantiles(name: str, by: str = "", *parts: float, of: str = M) -> dict[str, str]:
    """Queries for quantiles of a histogram, keyed by legend."""
    labels = ", ".join(filter(None, ("le", by)))
    buckets = rate(f"{name}_bucket", labels, of=of)
    suffix = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{part * 100:g}{suffix}": f"histogram_quantile({part}, {buckets})"
        for part in parts or (0.5, 0.95, 0.99)
    }


def mean(name: str, by: str = "", more: str = "") -> str:
    """Query for the mean of a histogram or summary."""
    return f"{rate(f'{name}_sum', by, more)} / {rate(f'{name}_count', by, more)}"


def kept(name: str, by: str) -> str:
    """Query for the fraction of the requests with an SLO that met it."""
    return f"{rate(name, by, MET)} / {rate(name, by)}"


def share(part: str, whole: str) -> str:
    """Query for the ratio of a part to the whole; 0 if the whole is 0."""
    return f"{part} / ({whole} > 0) or 0 * {whole}"
