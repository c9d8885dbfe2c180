"""Fair sharing between tenants by virtual token counters (VTC) of received service."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace

from worker.core.request import Request

PROMPT_WEIGHT = 1.0
"""VTC weight of a computed prompt token (w_p)."""
OUTPUT_WEIGHT = 2.0
"""VTC weight of a generated token (w_q). Both weights are from the VTC paper (`TenantService`)."""
_MAX_IDLE = 1024
"""Maximum number of counters of tenants without waiting requests; when it is exceeded, half are
dropped."""


class TenantService:
    """Virtual token counter per tenant. Among waiting tenants, the least served goes first.

    While two tenants wait, their counters differ by at most the amount that one of them can
    still be charged for its running requests. Tenants that always wait thus get equal service,
    regardless of their requests. A tenant cannot save up service while it has no waiting requests:
    when it next has one, its counter is raised to the minimum over the waiting tenants. (Sheng et
    al., Fairness in Serving Large Language Models, OSDI 2024.)
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        """Number of waiting requests by tenant; tenants without any are omitted."""
        self._lowest: list[tuple[float, str]] = []
        """Heap of (counter, tenant) with every waiting tenant, possibly outdated: counters only
        grow, so an up-to-date entry at the top is the minimum."""
        self._floor = 0.0
        """Initial counter value of a tenant that arrives while no other tenant waits."""

    @property
    def is_shared(self) -> bool:
        """Whether there are counters of more than one tenant."""
        return len(self._served) > 1

    def served(self, tenant: str) -> float:
        """Counter of a tenant in weighted tokens; only differences are meaningful."""
        return self._served.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """Records that a request of the tenant starts waiting."""
        if tenant in self._num_waiting:
            self._num_waiting[tenant] += 1
            return
        if self._num_waiting:
            self._floor = self._lowest_waiting()
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._num_waiting[tenant] = 1
        heappush(self._lowest, (self._served[tenant], tenant))
        if len(self._served) > len(self._num_waiting) + _MAX_IDLE:
            self._forget()

    def leave(self, tenant: str) -> None:
        """Records that a request of the tenant stops waiting."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            if not self._num_waiting:
                self._floor = max(self._floor, self._served[tenant])

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        """Charges for a request's uncached prompt tokens at its first admission."""
        self._charge(request.tenant, PROMPT_WEIGHT * num_tokens)

    def charge_output(self, requests: Iterable[Request]) -> None:
        """Charges for the tokens generated since the requests were last charged."""
        for request in requests:
            num_new = request.num_output - request.num_charged
            if num_new:
                request.num_charged += num_new
                self._charge(request.tenant, OUTPUT_WEIGHT * num_new)

    def _lowest_waiting(self) -> float:
        """Minimum counter of the waiting tenants; updates outdated entries."""
        lowest = self._lowest
        if len(lowest) > 2 * len(self._num_waiting) + _MAX_IDLE:
            lowest[:] = [(self._served[tenant], tenant) for tenant in self._num_waiting]
            heapify(lowest)
        while True:
            served, tenant = lowest[0]
            if tenant not in self._num_waiting:
                heappop(lowest)
            elif self._served[tenant] > served:
                heapreplace(lowest, (self._served[tenant], tenant))
            else:
                return served

    def _charge(self, tenant: str, weighted: float) -> None:
        self._served[tenant] = self._served.get(tenant, self._floor) + weighted

    def _forget(self) -> None:
        """Drops counters of idle tenants, the least served first: their counters would be raised
        anyway when they return."""
        idle = [tenant for tenant in self._served if tenant not in self._num_waiting]
        idle.sort(key=self._served.__getitem__)
        for tenant in idle[: -_MAX_IDLE // 2]:
            del self._served[tenant]
