"""Discrete-event simulation of workers behind a router."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.benchmarks.routing.simulated import (
    Clock,
    Placement,
    SimulatedRouter,
    adapter_of,
)
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival, Incident, Workload
from worker.protocol.blocks import cache_scope
from worker.protocol.messages import Submit, TokenDelta
from worker.protocol.sampling import SamplingParams

_GATEWAY = "simulated"
_RESTART_S = 5.0
"""Seconds from the failure of a worker's ranks to the start of new ones."""
_RETRY_S = 0.1
"""Seconds until placement is retried for a request that has no worker."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Outcome of a request. Times are in seconds of simulated time."""

    arrival: Arrival
    arrived_at: float
    placement: Placement
    attempt: int = 0
    """Number of times the request was resubmitted."""
    first_token_s: float = -1.0
    """Seconds from arrival to first token; negative before the first token."""
    cached_tokens: int = 0
    """Prompt tokens found in the worker's cache."""


class Simulation:
    """Simulation of one workload with one router. Deterministic if the router is.

    Messages take no time: reports reach the gateway when a step ends, and requests reach their
    worker when they are placed.

    Args:
        workload: requests, workers and incidents.
        router: creates the router, given the simulation's clock.
    """

    def __init__(self, workload: Workload, router: Callable[[Clock], SimulatedRouter]) -> None:
        self._workload = workload
        self._now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self._outcomes: dict[str, Outcome] = {}
        self._waiting: defaultdict[str, list[Arrival]] = defaultdict(list)
        self._workers: dict[str, SimWorker] = {}
        self._router = router(lambda: self._now)

    def run(self) -> list[Outcome]:
        """Simulates until the last request has ended; returns outcomes in the order of arrival."""
        for number in range(len(self._workload.fleet.slowness)):
            self._join(number)
        for arrival in self._workload.arrivals:
            if arrival.after:
                self._waiting[arrival.after].append(arrival)
            else:
                self._push(arrival.at, "arrive", arrival)
        for incident in self._workload.incidents:
            self._push(incident.at, "incident", incident)
        while self._events:
            self._now, _, kind, what = heapq.heappop(self._events)
            if kind == "arrive":
                for arrivals in self._router.split([what, *self._together()]):
                    self._arrive(arrivals)
            elif kind == "step":
                self._step(*what)
            elif kind == "incident":
                self._suffer(what)
            else:
                assert kind == "start"
                self._workers[what].start()
                self._router.joined(self._workers[what])
        self._router.close()
        assert all(outcome.first_token_s >= 0.0 for outcome in self._outcomes.values())
        assert not any(worker.open for worker in self._workers.values()), "a request never ended"
        return list(self._outcomes.values())

    def suffer(self, incident: Incident) -> None:
        """Adds an incident that is not part of the workload."""
        self._push(incident.at, "incident", incident)

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, kind, what))

    def _together(self) -> list[Arrival]:
        """Pops further arrivals at the current time from the event queue."""
        more = []
        events = self._events
        while events and events[0][0] == self._now and events[0][2] == "arrive":
            more.append(heapq.heappop(events)[3])
        return more

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        for arrival, placement in zip(arrivals, self._router.place(arrivals), strict=True):
            known = self._outcomes.get(arrival.request_id)
            if placement is None:
                assert any(kind in ("start", "incident") for _, _, kind, _ in self._events), (
                    "no workers left"
                )
                self._push(self._now + _RETRY_S, "arrive", arrival)
                placement = Placement("")
            if known is None:
                known = Outcome(arrival=arrival, arrived_at=self._now, placement=placement)
                self._outcomes[arrival.request_id] = known
            known.placement = placement
            if placement.worker_id:
                self._submit(known)

    def _submit(self, outcome: Outcome) -> None:
        arrival, worker = outcome.arrival, self._workers[outcome.placement.worker_id]
        submit = Submit(
            request_id=arrival.request_id,
            gateway_id=_GATEWAY,
            prompt=arrival.tokens,
            sampling=SamplingParams(max_tokens=arrival.output_len, seed=1, ignore_eos=True),
            attempt=outcome.attempt,
            num_expected_cached=outcome.placement.hit_tokens,
            sampled_blocks=outcome.placement.sampled_blocks,
            shared_block=outcome.placement.shared_block,
            cache_salt=cache_scope(adapter=arrival.adapter),
            adapter=adapter_of(arrival),
        )
        ordinal = worker.submit(submit)
        self._router.submitted(worker, submit, ordinal)
        self._go_on(worker)

    def _go_on(self, worker: SimWorker) -> None:
        seconds = worker.begin()
        if seconds is not None:
            self._push(self._now + seconds, "step", (worker, worker.epoch))

    def _step(self, worker: SimWorker, epoch: int) -> None:
        if not worker.up or worker.epoch != epoch:
            return  # the worker died during the step
        report = worker.finish()
        self._router.reported(worker, report)
        for delta in report.deltas.get(_GATEWAY, []):
            self._take(worker, delta)
        if worker.draining and not worker.open:
            worker.up = False
            self._router.lost(worker)
        self._go_on(worker)

    def _take(self, worker: SimWorker, delta: TokenDelta) -> None:
        outcome = self._outcomes[delta.request_id]
        if delta.num_cached_tokens >= 0 and outcome.first_token_s < 0.0:
            outcome.first_token_s = self._now - outcome.arrived_at
            outcome.cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is not None:
            assert delta.finish_reason == "length", delta.error
            self._router.ended(worker.worker_id, delta.request_id)
            for arrival in self._waiting.pop(delta.request_id, ()):
                self._push(self._now + arrival.at, "arrive", arrival)

    def _suffer(self, incident: Incident) -> None:
        worker = self._workers.get(f"w{incident.worker}")
        if worker is None:
            if incident.kind == "join":
                self._join(incident.worker)
            return
        if not worker.up:
            return
        if incident.kind == "break":
            self._router.lost(worker)
            self._router.joined(worker)
        elif incident.kind == "leave":
            worker.draining = True
            self._router.draining(worker)
        elif incident.kind == "kill":
            worker.up = False
            self._router.lost(worker)
            self._push(self._now + _RESTART_S, "start", worker.worker_id)
            self._resubmit(worker)

    def _resubmit(self, worker: SimWorker) -> None:
        """Resubmits the requests of a failed worker, without the tokens generated so far."""
        lost = list(worker.open)
        worker.open.clear()
        for request_id in lost:
            outcome = self._outcomes[request_id]
            self._router.ended(worker.worker_id, request_id)
            outcome.attempt += 1
            self._push(self._now, "arrive", replace(outcome.arrival, after=""))

    def _join(self, number: int) -> None:
        shape = self._workload.fleet
        slowness = shape.slowness[number % len(shape.slowness)]
        worker = SimWorker(f"w{number}", shape, slowness, clock=lambda: self._now)
        self._workers[worker.worker_id] = worker
        self._router.joined(worker)
