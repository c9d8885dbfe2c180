"""Waiting queue: highest level first, with fair sharing between tenants within a level."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from operator import attrgetter

from worker.core.request import Request
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.slo import MAX_LEVEL, Urgency
from worker.core.scheduler.tenant_queue import TenantQueue


class WaitingQueue:
    """Requests ordered by level. Within a level, preempted requests come first, by age. The tenants
    then take fair turns, with each tenant's requests ordered by deadline and age.

    A request moves to a higher level when its deadline is near, and back when it can no longer be
    met. Each move is a new generation of the request, which invalidates older alarms.

    Args:
        urgency: determines level and deadline of a request.
        service: determines how much service each tenant has received.
    """

    def __init__(self, urgency: Urgency, service: TenantService) -> None:
        self.num_requests = 0
        """Number of waiting requests."""
        self.num_tokens = 0
        """Total number of tokens in waiting requests."""
        self.num_expected_cached = 0
        """Number of tokens that gateways expect to be cached, over all requests that have never
        run."""
        self._urgency = urgency
        self._service = service
        self._levels = [_Level() for _ in range(MAX_LEVEL + 1)]
        self.alarms: list[tuple[float, int, int, Request]] = []
        """Heap of (time, arrival, generation, request), with the time at which a request's level
        must be recomputed. Entries of an older generation are ignored."""

    def push(self, request: Request, now: float) -> None:
        """Adds a request that has never run."""
        self._enter(request, now, resumed=False)

    def push_back(self, request: Request, now: float) -> None:
        """Adds a preempted request, ahead of requests of its level that have not run."""
        self._enter(request, now, resumed=True)

    def remove(self, request: Request) -> None:
        """Removes a request that was admitted or has ended."""
        self._levels[request.level].remove(request)
        request.queue_entry.generation += 1
        self.num_requests -= 1
        if not request.preemption.count:
            self.num_expected_cached -= request.num_expected_cached
        self.num_tokens -= len(request.token_ids)
        self._service.leave(request.tenant)

    def tick(self, now: float) -> None:
        """Moves requests whose deadline is near, or can no longer be met, to their new level."""
        alarms = self.alarms
        while alarms and alarms[0][0] <= now:
            _, _, generation, request = heappop(alarms)
            if generation == request.queue_entry.generation:
                resumed = self._levels[request.level].is_resumed(request)
                self.remove(request)
                self._enter(request, now, resumed=resumed)
        if len(alarms) > 2 * self.num_requests + 64:
            self.alarms = [entry for entry in alarms if entry[2] == entry[3].queue_entry.generation]
            heapify(self.alarms)

    def window(self, count: int) -> list[Request]:
        """First `count` requests in queue order."""
        return list(islice(self._in_order(), count))

    def oldest(self) -> Request | None:
        """The request that has been in the highest level for the longest time; None if no request
        is waiting."""
        for level in reversed(self._levels):
            if level.members:
                return next(iter(level.members.values()))
        return None

    def least_urgent(self) -> Request | None:
        """First request to reject when the queue is full; None if all have already run.

        This is the newest request of the lowest level, from the tenant with the most requests in
        that level.
        """
        for level in self._levels:
            queues = [queue for queue in level.by_tenant.values() if queue]
            if queues:
                return max(queues, key=len).last()
        return None

    @property
    def lowest_level(self) -> int:
        """Lowest level of waiting requests that have never run; -1 if all have."""
        return next((n for n, level in enumerate(self._levels) if level.by_tenant), -1)

    def num_waiting(self, tenant: str, level: int) -> int:
        """Number of a tenant's requests in a level that have never run."""
        waiting = self._levels[level].by_tenant.get(tenant)
        return len(waiting) if waiting is not None else 0

    def _enter(self, request: Request, now: float, *, resumed: bool) -> None:
        entry = request.queue_entry
        entry.generation += 1
        urgency = self._urgency.of_request(request, now)
        request.level, entry.deadline_s = urgency.level, urgency.deadline_s
        if urgency.until_s < inf:
            alarm = (urgency.until_s, request.arrival, entry.generation, request)
            heappush(self.alarms, alarm)
        self._levels[request.level].add(request, resumed=resumed)
        self.num_requests += 1
        self.num_tokens += len(request.token_ids)
        if not request.preemption.count:
            self.num_expected_cached += request.num_expected_cached
        self._service.enter(request.tenant)

    def _in_order(self) -> Iterator[Request]:
        for level in reversed(self._levels):
            if level.members:
                yield from level.resumed
                yield from self._in_turn(level)

    def _in_turn(self, level: _Level) -> Iterator[Request]:
        """Requests of a level in fair turns, as if each tenant were charged when its request is
        yielded."""
        if len(level.by_tenant) == 1:
            yield from next(iter(level.by_tenant.values()))
            return
        turns = []
        for number, (tenant, queue) in enumerate(level.by_tenant.items()):
            waiting = iter(queue)
            request = next(waiting, None)
            if request is not None:
                turns.append((self._service.served(tenant), number, request, waiting))
        heapify(turns)
        while turns:
            served, number, request, waiting = turns[0]
            yield request
            following = next(waiting, None)
            if following is None:
                heappop(turns)
            else:
                heapreplace(turns, (served + len(request.token_ids), number, following, waiting))


class _Level:
    """All waiting requests of one level."""

    def __init__(self) -> None:
        self.members: OrderedDict[str, Request] = OrderedDict()
        """Requests by id, in the order in which they were added."""
        self.resumed: list[Request] = []
        """Preempted requests, oldest first."""
        self.by_tenant: dict[str, TenantQueue] = {}
        """Requests that have never run, by tenant."""

    def add(self, request: Request, *, resumed: bool) -> None:
        self.members[request.request_id] = request
        if resumed:
            insort(self.resumed, request, key=attrgetter("arrival"))
        else:
            waiting = self.by_tenant.get(request.tenant)
            if waiting is None:
                waiting = self.by_tenant[request.tenant] = TenantQueue()
            waiting.push(request)

    def remove(self, request: Request) -> None:
        del self.members[request.request_id]
        waiting = self.by_tenant.get(request.tenant)
        if waiting is None or not waiting.remove(request):
            self.resumed.remove(request)
        elif not waiting:
            del self.by_tenant[request.tenant]

    def is_resumed(self, request: Request) -> bool:
        return request in self.resumed
