"""What tenants used, for a bounded number of them."""

from __future__ import annotations

OTHER = "other"
"""Label of all tenants that have none of their own."""
DEFAULT = "default"
"""Label where requests have no tenant."""
IDLE_S = 600.0
"""After so long without a request a tenant gives its place to one that asks for it."""


class TenantStats:
    """Counters of one tenant."""

    __slots__ = (
        "cached_tokens",
        "first_tokens",
        "first_tokens_s",
        "generation_tokens",
        "last_seen",
        "num_open",
        "prompt_tokens",
        "refused",
        "requests",
        "slo_met",
        "slo_missed",
    )

    def __init__(self) -> None:
        self.requests = 0
        """Completions."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        """Of completions that have ended."""
        self.refused = 0
        self.slo_met = 0
        self.slo_missed = 0
        self.first_tokens = 0
        self.first_tokens_s = 0.0
        """Sum of the times to them."""
        self.num_open = 0
        """Completions that have not ended."""
        self.last_seen = 0.0

    def begin(self, prompt_tokens: int, now: float) -> None:
        """A completion was asked for."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.num_open += 1
        self.last_seen = now

    def end(
        self, *, first_token_s: float, generation_tokens: int, cached_tokens: int, met: bool | None
    ) -> None:
        """It has ended; a negative time stands for no token, `met` None for no SLO."""
        self.num_open -= 1
        self.generation_tokens += generation_tokens
        self.cached_tokens += cached_tokens
        if first_token_s >= 0.0:
            self.first_tokens += 1
            self.first_tokens_s += first_token_s
        if met is not None:
            self.slo_met += met
            self.slo_missed += not met


class TenantBook:
    """Tenants by label; beyond `max_tenants` they share the label "other".

    Labels are places: the first to come get one each. One that has been idle for long gives its
    place up, and what it used goes to the others' account, so that sums over all labels never fall.
    """

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._named: dict[str, TenantStats] = {}
        self._other = TenantStats()

    def of(self, tenant: str, now: float) -> TenantStats:
        """Where a tenant's use is counted; its name may be empty."""
        name = tenant or DEFAULT
        found = self._named.get(name)
        if found is not None:
            return found
        if len(self._named) >= self._max_tenants and not self._free_place(now):
            return self._other
        found = self._named[name] = TenantStats()
        found.last_seen = now
        return found

    def rows(self) -> list[tuple[str, TenantStats]]:
        """All labels and their counters."""
        return [*self._named.items(), (OTHER, self._other)]

    def _free_place(self, now: float) -> bool:
        idle = [
            (stats.last_seen, name)
            for name, stats in self._named.items()
            if not stats.num_open and now - stats.last_seen > IDLE_S
        ]
        if not idle:
            return False
        gone = self._named.pop(min(idle)[1])
        other = self._other
        for counter in (
            *("requests", "prompt_tokens", "cached_tokens", "generation_tokens", "refused"),
            *("slo_met", "slo_missed", "first_tokens", "first_tokens_s"),
        ):
            setattr(other, counter, getattr(other, counter) + getattr(gone, counter))
        return True
