"""The last reports of gateways, where all policies of a controller find them.

Serve hands a deployment's policy the reports of that deployment alone, while the load of a model is
known to the gateways, most of all where the model has no worker. It pickles a policy's module by
value, too, so policies do not share that module's globals: they meet here, in the controller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cluster.autoscaling.load import FleetLoad, combined
from router.serving.load import LoadReport

STALE_S = 15.0
"""A gateway that has reported nothing new for so long counts no more."""


class _Reported(NamedTuple):
    stamp: float
    """The gateway's own, which only tells whether it is news."""
    received_at: float
    values: Mapping[str, float]


def flattened(deployment: str, report: LoadReport) -> dict[str, float]:
    """A model's report in the names and numbers that Serve carries."""
    return {f"{deployment}/{name}": value for name, value in report._asdict().items()}


class LoadRegistry:
    """The loads that the gateways of one application reported last."""

    def __init__(self) -> None:
        self._reported: dict[str, _Reported] = {}

    def take(self, series: Mapping[str, Mapping[Any, Sequence[Any]]], now: float) -> None:
        """Takes what the running gateways have recorded: points in time, by name and replica."""
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
        """The load of the model with this deployment; None while no gateway reports it."""
        names = [f"{deployment}/{field}" for field in LoadReport._fields]
        reports = [
            LoadReport(*(reported.values[name] for name in names))
            for reported in self._reported.values()
            if now - reported.received_at < STALE_S
            and all(name in reported.values for name in names)
        ]
        return combined(reports) if reports else None


REGISTRIES: Final[defaultdict[str, LoadRegistry]] = defaultdict(LoadRegistry)
"""Registries by application: one in a process, which joins the policy of gateways to those of
models."""
