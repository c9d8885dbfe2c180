"""What gateways told last, where all policies of a controller find it.

Serve hands a deployment's policy the reports of that deployment alone, while the load of a model is
known to the gateways, most of all where the model has no worker. It pickles a policy's module by
value, too, so policies do not share that module's globals: they meet here, in the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from cluster.autoscaling.load import FleetLoad, combined
from router.serving.load import LoadReport

STALE_S = 15.0
"""A gateway that has told nothing new for so long counts no more."""


class _Told(NamedTuple):
    stamp: float
    """The gateway's own, which only tells whether it is news."""
    heard_at: float
    values: Mapping[str, float]


def flattened(deployment: str, report: LoadReport) -> dict[str, float]:
    """A model's report in the names and numbers that Serve carries."""
    return {f"{deployment}/{name}": value for name, value in report._asdict().items()}


class LoadBoard:
    """Of one application."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def take(self, series: Mapping[str, Mapping[Any, Sequence[Any]]], now: float) -> None:
        """What the gateways that run have recorded: by name and replica, points in time."""
        values: dict[str, dict[str, float]] = {}
        stamps: dict[str, float] = {}
        for name, by_replica in series.items():
            for replica, points in by_replica.items():
                key = str(replica)
                for last in points[-1:]:
                    values.setdefault(key, {})[name] = last.value
                    stamps[key] = max(stamps.get(key, 0.0), last.timestamp)
        told = {}
        for replica, stamp in stamps.items():
            before = self._told.get(replica)
            heard_at = now if before is None or before.stamp != stamp else before.heard_at
            told[replica] = _Told(stamp, heard_at, values[replica])
        self._told = told

    def load(self, deployment: str, now: float) -> FleetLoad | None:
        """Of the model with this deployment; None while no gateway tells of it."""
        names = [f"{deployment}/{field}" for field in LoadReport._fields]
        reports = [
            LoadReport(*(told.values[name] for name in names))
            for told in self._told.values()
            if now - told.heard_at < STALE_S and all(name in told.values for name in names)
        ]
        return combined(reports) if reports else None


class BoardDirectory:
    """One `LoadBoard` per application."""

    def __init__(self) -> None:
        self._boards: dict[str, LoadBoard] = {}

    def of(self, application: str) -> LoadBoard:
        """The board of the application with this name, made at first use."""
        return self._boards.setdefault(application, LoadBoard())


BOARDS: Final = BoardDirectory()
"""Of this process. The registry that joins the policy of gateways to those of models."""
