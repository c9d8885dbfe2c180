"""The state of each worker that a gateway knows, and of all that are ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from router.fleet.blocks import BlockKey
from router.fleet.in_flight import PrefixNode
from worker.wire.limits import Limits
from worker.wire.messages import EngineInfo, LoadSnapshot

Kind = TypeVar("Kind", BlockKey, Limits)


@dataclass(slots=True)
class Reservation:
    """A request that was sent to a worker and is not yet part of the load it reports."""

    uncached_tokens: int
    """Prompt tokens that its prefix cache does not have."""
    work_s: float = 0.0
    """Seconds to compute these."""
    first_chunks_s: float = 0.0
    """The first chunk's part of `work_s`, computed though other prompts are under way."""
    epoch: int = 0
    """Epoch of the worker that took it; 0 before the worker has answered."""
    ordinal: int = 0
    """Its number among that epoch's submits; loads that count as many contain it."""


class SentPrompt(NamedTuple):
    """A prompt that a worker was sent and that is not known to be computed."""

    node: PrefixNode
    """Node of the tree InFlight, which `InFlight.remove` takes."""
    priority: int
    work_s: float
    """Seconds to compute what the worker's prefix cache does not have."""


@dataclass(slots=True)
class WorkerState:
    """One worker as it reported last, plus what this gateway has sent there since."""

    worker_id: str
    row: int
    """Row of the WorkerTable."""
    epoch: int
    info: EngineInfo | None
    load: LoadSnapshot
    key: BlockKey | None = None
    """How the engine hashes that it has, or had before its ranks were lost; None for none yet."""
    reported_at: float = 0.0
    """Seconds of the fleet's clock at the last report."""
    draining: bool = False
    reservations: dict[str, Reservation] = field(default_factory=dict)
    """Bookings by request id."""
    reserved_tokens: int = 0
    """Sum of the reservations' uncached tokens."""
    in_flight: dict[str, SentPrompt] = field(default_factory=dict)
    """Prompts sent there that are not known to be computed, by request id."""

    @property
    def ready(self) -> bool:
        """Whether it can take requests."""
        return self.info is not None and not self.draining

    @property
    def num_active(self) -> int:
        """Requests there: running, waiting, and on their way."""
        load = self.load
        return load.num_running + load.num_waiting + load.num_reserved + len(self.reservations)

    def contains(self, booking: Reservation) -> bool:
        """Whether the load contains the booking, or the epoch that took it is over.

        One that was not answered yet stays: the next epoch may be the one that takes it.
        """
        if not booking.epoch or booking.epoch > self.epoch:
            return False
        seen = max(self.load.num_submits_seen, self.load.num_submits_reserved)
        return booking.epoch < self.epoch or booking.ordinal <= seen


class Members:
    """Counts the ready workers by kind, so that a request is looked at once per kind of worker."""

    def __init__(self) -> None:
        self.keys: dict[BlockKey, int] = {}
        """Keys with which they hash blocks, with the number of workers that do."""
        self.limits: dict[Limits, int] = {}
        """Limits of the workers that are ready, with the number of each kind."""

    @property
    def number(self) -> int:
        """Workers that are ready."""
        return sum(self.keys.values())

    def change(self, before: EngineInfo | None, after: EngineInfo | None) -> None:
        """A worker had loaded `before` and now has `after`; None for one that is not ready."""
        if after is not None:
            _count(self.keys, BlockKey.of(after), 1)
            _count(self.limits, Limits.of(after), 1)
        if before is not None:
            _count(self.keys, BlockKey.of(before), -1)
            _count(self.limits, Limits.of(before), -1)


def _count(counts: dict[Kind, int], kind: Kind, change: int) -> None:
    counts[kind] = counts.get(kind, 0) + change
    if not counts[kind]:
        del counts[kind]
