"""Periodic reading of a fleet's metrics under load."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

_SERIES = re.compile(
    r"^rayfleet_(num_requests_running|num_requests_waiting|num_preemptions_total)"
    r'{model_name="([^"]*)",worker_id="[^"]*"} (\S+)$',
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Metrics of a fleet at one point in time."""

    at_s: float
    """Seconds since the start of the load."""
    num_waiting: int
    """Number of requests in the workers' queues."""
    num_running: int
    """Number of requests in the workers' running batches."""
    num_busy_workers: int
    """Number of workers with running requests."""
    num_workers: int
    num_preemptions: int
    """Number of preemptions since the start of the fleet."""


def read_moment(text: str, model: str, at_s: float) -> Moment:
    """Metrics of the fleet that serves `model`, parsed from a scrape."""
    found: dict[str, list[float]] = {}
    for name, owner, value in _SERIES.findall(text):
        if owner == model:
            found.setdefault(name, []).append(float(value))
    running = found.get("num_requests_running", [])
    return Moment(
        at_s=at_s,
        num_waiting=int(sum(found.get("num_requests_waiting", []))),
        num_running=int(sum(running)),
        num_busy_workers=sum(value > 0 for value in running),
        num_workers=len(running),
        num_preemptions=int(sum(found.get("num_preemptions_total", []))),
    )


class Watch:
    """Scrapes one fleet's metrics periodically.

    Args:
        base_url: URL of the endpoint, without /metrics.
        model: name of the fleet's model.
        interval_s: seconds between scrapes.
        tell: called after each scrape.
    """

    def __init__(
        self, base_url: str, model: str, interval_s: float, tell: Callable[[Moment], None]
    ) -> None:
        self.moments: list[Moment] = []
        self._url = base_url + "/metrics"
        self._model = model
        self._interval_s = interval_s
        self._tell = tell

    async def run(self, start: float) -> None:
        """Scrapes until cancelled; `start` is the load's start on the `time.perf_counter` clock."""
        async with aiohttp.ClientSession() as session:
            while True:
                await self._look(session, start)
                await asyncio.sleep(self._interval_s)

    async def _look(self, session: aiohttp.ClientSession, start: float) -> None:
        async with session.get(self._url) as response:
            text = await response.text()
        moment = read_moment(text, self._model, time.perf_counter() - start)
        self.moments.append(moment)
        self._tell(moment)
