"""Fair share: what each tenant has been served, in weighted tokens."""

from __future__ import annotations

from collections.abc import Iterable

from worker.core.request import Request

PROMPT_WEIGHT = 1.0
"""Of a prompt token that was computed."""
OUTPUT_WEIGHT = 2.0
"""Of a generated token: it occupies the cache and a row of every step."""
_MAX_IDLE = 1024


class TenantService:
    """A virtual token counter per tenant; of those that wait, the least served goes first.

    While two tenants both wait, their counters differ by no more than what the running requests
    of one can still be charged: two tenants that always wait get the same, whatever they send.
    A tenant that had nothing waiting saved up nothing meanwhile: its counter is lifted to the
    least of those that wait. (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024.)
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        """Of tenants with waiting requests."""
        self._floor = 0.0
        """What a tenant that comes when nobody waits is lifted to."""

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one tenant to be fair to."""
        return len(self._served) > 1

    def served(self, tenant: str) -> float:
        """Weighted tokens; only differences mean something."""
        return self._served.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """A request of the tenant begins to wait."""
        if tenant in self._num_waiting:
            self._num_waiting[tenant] += 1
            return
        if self._num_waiting:
            self._floor = min(self._served[other] for other in self._num_waiting)
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor)
        self._num_waiting[tenant] = 1
        if len(self._served) > len(self._num_waiting) + _MAX_IDLE:
            self._forget()

    def leave(self, tenant: str) -> None:
        """A request of the tenant waits no longer."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
            if not self._num_waiting:
                self._floor = max(self._floor, self._served[tenant])

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        """A request is admitted for the first time with so many tokens to compute."""
        self._charge(request.tenant, PROMPT_WEIGHT * num_tokens)

    def charge_output(self, requests: Iterable[Request]) -> None:
        """Charges for the tokens generated since the last call."""
        for request in requests:
            num_new = request.num_output - request.num_charged
            if num_new:
                request.num_charged += num_new
                self._charge(request.tenant, OUTPUT_WEIGHT * num_new)

    def _charge(self, tenant: str, weighted: float) -> None:
        self._served[tenant] = self._served.get(tenant, self._floor) + weighted

    def _forget(self) -> None:
        """Drops idle tenants that would be lifted to where they are, then the least served."""
        idle = [tenant for tenant in self._served if tenant not in self._num_waiting]
        idle.sort(key=self._served.__getitem__)
        for tenant in idle[: -_MAX_IDLE // 2]:
            del self._served[tenant]
