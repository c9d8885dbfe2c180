"""What is known of a worker, and the rule that rates it for a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from worker.wire.messages import EngineInfo, LoadSnapshot


@dataclass(slots=True)
class Reservation:
    """A request that was sent to a worker and is not yet part of the load it reports."""

    uncached_tokens: int
    """Prompt tokens that its prefix cache does not have."""
    epoch: int = 0
    """Incarnation of the worker that took it; 0 before the worker said so."""
    ordinal: int = 0
    """Its number among that incarnation's submits; loads that count as many contain it."""


@dataclass(slots=True)
class WorkerState:
    """One worker as its reports tell, plus what this gateway has sent there since."""

    worker_id: str
    epoch: int
    info: EngineInfo | None
    load: LoadSnapshot
    draining: bool = False
    last_chosen: int = 0
    """Turn in which it was chosen last; ties go to the one that waited longest."""
    reservations: dict[str, Reservation] = field(default_factory=dict)
    """By request id."""
    reserved_tokens: int = 0
    """Sum of the reservations' uncached tokens."""

    @property
    def ready(self) -> bool:
        """Whether it can take requests."""
        return self.info is not None and not self.draining

    @property
    def num_active(self) -> int:
        """Requests there: running, waiting, and on their way."""
        return self.load.num_running + self.load.num_waiting + len(self.reservations)


class RoutingPolicy(ABC):
    """Rates workers for one request; the highest score wins, ties go round."""

    @abstractmethod
    def score(self, worker: WorkerState, info: EngineInfo, hit_tokens: int) -> float:
        """How good `worker` is for a prompt of which it has `hit_tokens` in its prefix cache."""
