"""SessionEntrance: makes requests of agent sessions wait at the SessionGate, on the event loop."""

from __future__ import annotations

import asyncio
import time

from router.fleet import Choice, Fleet, SessionGate, SessionList
from router.serving.completion import Completion
from worker.protocol.messages import LoadSnapshot
from worker.protocol.working_sets import SessionUse

POLL_S = 0.25
"""Seconds between checks for room while requests wait; equals the interval of idle workers'
reports."""


class SessionEntrance:
    """Delays the requests of agent sessions until the gate admits them.

    Args:
        fleet: workers of the model.
        max_wait_s: maximum seconds that a request waits.
    """

    def __init__(self, fleet: Fleet, max_wait_s: float) -> None:
        self._gate = SessionGate(fleet, time.monotonic, max_wait_s)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return self._gate.num_waiting

    def listing(self, limit: int) -> SessionList:
        """The waiting and live sessions, of which at most `limit` are listed."""
        return self._gate.listing(limit)

    async def enter(self, completion: Completion) -> None:
        """Waits until the gate admits a request, unless it is plain traffic."""
        visit = completion.visit = self._gate.arrive(completion.spec.prompt)
        if visit is None or visit.admitted:
            return
        over = asyncio.Event()
        visit.on_over = over.set
        self._admit()
        await over.wait()

    def placed(self, completion: Completion, choice: Choice) -> SessionUse | None:
        """Assigns a request to the chosen worker; returns the session data to send to it."""
        visit = completion.visit
        return None if visit is None else self._gate.placed(visit, choice)

    def ended(self, completion: Completion) -> None:
        """Ends a request, which may still be waiting."""
        if completion.visit is not None:
            self._gate.end(completion.visit)
            self._admit()

    def attached(self, worker_id: str, load: LoadSnapshot) -> None:
        """Records that a worker has attached; its earlier sessions are gone."""
        self._gate.lose(worker_id)
        self._gate.reported(worker_id, load)

    def reported(self, worker_id: str, load: LoadSnapshot) -> None:
        """Records the load that a worker has reported."""
        self._gate.reported(worker_id, load)

    def lost(self, worker_id: str) -> None:
        """Records that a worker has lost its cache, or has left."""
        self._gate.lose(worker_id)
        self._admit()

    def close(self) -> None:
        """Admits all requests, which then fail, as no worker will become available."""
        self._gate.open()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _admit(self) -> None:
        self._gate.admit()
        if self._timer is None and self._gate.num_waiting:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._admit()
