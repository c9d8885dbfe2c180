"""Watch of a fleet's metrics while it is under load."""

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
    """Metrics of a fleet at one time."""

    at_s: float
    """Seconds since the start of the load."""
    num_waiting: int
    """Requests in the queues of workers."""
    num_running: int
    """Requests in the running batches of workers."""
    num_busy_workers: int
    """Workers with a running request."""
    num_workers: int
    num_preemptions: int
    """Preemptions since the start of the fleet."""


def read_moment(text: str, model: str, at_s: float) -> Moment:
    """Metrics of the fleet that serves `model`, from the text of a scrape."""
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
    """Periodic scrape of one fleet's metrics.

    Args:
        base_url: URL of the endpoint, without /metrics.
        model: name of the fleet's model.
        interval_s: seconds between two scrapes.
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
        """Scrapes until cancelled; `start` is that of the load, on `time.perf_counter`'s clock."""
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
