"""Registry of the gateways' latest load reports, for all autoscaling policies of Serve's
controller.

Serve only provides a policy with metrics of its own deployment, but it is the gateways that measure
the load of a model, even if the model has no worker. As Serve pickles a policy's module by value,
policies share the globals of this module instead of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cluster.autoscaling.load import FleetLoad, combined
from router.serving.load import LoadReport

STALE_S = 15.0
"""Age in seconds after which a gateway's last report is ignored."""


class _Reported(NamedTuple):
    stamp: float
    """Time of the report by the gateway's clock, used only to detect new reports."""
    received_at: float
    """Time at which the controller first saw the report, by the controller's clock."""
    values: Mapping[str, float]
    """Values of the report, keyed by name as in `flattened`."""


def flattened(deployment: str, report: LoadReport) -> dict[str, float]:
    """A model's report as named numbers, the format of Serve's custom autoscaling metrics."""
    return {f"{deployment}/{name}": value for name, value in report._asdict().items()}


class LoadRegistry:
    """Latest load reports of the gateways of one Serve application."""

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}

    def replace(self, series: Mapping[str, Mapping[Any, Sequence[Any]]], now: float) -> None:
        """Replaces all reports with those of the running gateways.

        Args:
            series: Serve's time series by name of the metric and replica.
            now: time in seconds, by the same clock as for `load`.
        """
        values: dict[str, dict[str, float]] = {}
        stamps: dict[str, float] = {}
        for name, by_replica in series.items():
            for replica, points in by_replica.items():
                key = str(replica)
                for last in points[-1:]:
                    values.setdefault(key, {})[name] = last.value
                    stamps[key] = max(stamps.get(key, 0.0), last.timestamp)
        reported = {}
        for replica, stamp in stamps.items():
            before = self._reported.get(replica)
            received_at = now if before is None or before.stamp != stamp else before.received_at
            reported[replica] = _Reported(stamp, received_at, values[replica])
        self._reported = reported

    def load(self, deployment: str, now: float) -> FleetLoad | None:
        """Load of the model with this deployment; None if there is no recent report."""
        names = [f"{deployment}/{field}" for field in LoadReport._fields]
        reports = [
            LoadReport(*(reported.values[name] for name in names))
            for reported in self._reported.values()
            if now - reported.received_at < STALE_S
            and all(name in reported.values for name in names)
        ]
        return combined(reports) if reports else None

    def total(self, name: str, now: float) -> float | None:
        """Sum of a metric over the gateways with a recent report; None if there is none."""
        values = [
            reported.values[name]
            for reported in self._reported.values()
            if now - reported.received_at < STALE_S and name in reported.values
        ]
        return sum(values) if values else None


REGISTRIES: Final[defaultdict[str, LoadRegistry]] = defaultdict(LoadRegistry)
"""Registries of this process by application. The gateways' autoscaling policy writes them, and the
models' policies read them."""
