"""Clients in a thread that send requests continuously, or each request once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import uvloop

from tests.campaigns.chaos.client import Client, Outcome
from tests.campaigns.chaos.planned_requests import PlannedRequest

_AFTER_FAILURE_S = 0.5
"""Pause in seconds after a failure; avoids flooding an endpoint that rejects everything."""
_STOP_S = 600.0
"""Time limit in seconds for the last answers."""


class ChaosLoad:
    """Clients that concurrently send the requests of `requests`. They start immediately, and stop
    when there are none left, on `stop`, or at the end of the `with` block."""

    def __init__(self, base_url: str, requests: Iterable[PlannedRequest], num_clients: int) -> None:
        self.outcomes: list[Outcome] = []
        """Outcomes of finished requests."""
        self._base_url = base_url
        self._requests: Iterator[PlannedRequest] = iter(requests)
        self._clients = [Client(base_url) for _ in range(num_clients)]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def leave(self, share: float) -> None:
        """Makes a fraction of the clients reset their connections, if an answer has started."""
        if self._loop is not None:
            chosen = self._clients[: max(1, round(share * len(self._clients)))]
            self._loop.call_soon_threadsafe(lambda: [client.leave() for client in chosen])

    def open_since(self) -> list[float]:
        """Send times of the requests in flight."""
        outcomes = [client.outcome for client in self._clients]
        return [outcome.sent for outcome in outcomes if outcome is not None]

    def wait(self) -> list[Outcome]:
        """Waits until all requests have been answered."""
        self._thread.join()
        return self._ended()

    def stop(self) -> list[Outcome]:
        """Stops sending requests, and waits for those in flight.

        Raises:
            RuntimeError: a request hangs.
        """
        self._stopping.set()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            ages = [round(time.monotonic() - sent) for sent in self.open_since()]
            raise RuntimeError(f"requests hang; seconds since they were sent: {ages}")
        return self._ended()

    def _ended(self) -> list[Outcome]:
        if self._problem is not None:
            raise RuntimeError("the clients failed") from self._problem
        return self.outcomes

    def _live(self) -> None:
        try:
            uvloop.run(self._run())
        except BaseException as problem:
            self._problem = problem

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(self._send_requests(client))

    async def _send_requests(self, client: Client) -> None:
        async with client:
            while not self._stopping.is_set():
                request = next(self._requests, None)
                if request is None:
                    return
                outcome = await client.send(request)
                self.outcomes.append(outcome)
                if outcome.end in ("error", "broken"):
                    await asyncio.sleep(_AFTER_FAILURE_S)


def answers_of(
    base_url: str, requests: Sequence[PlannedRequest], num_clients: int
) -> list[Outcome]:
    """Sends each request once; outcomes are in the order of the requests."""
    with ChaosLoad(base_url, requests, num_clients) as load:
        return sorted(load.wait(), key=lambda outcome: outcome.request.index)
