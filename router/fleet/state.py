"""State that a gateway keeps for a worker, and the kinds of ready workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from router.fleet.blocks import BlockKey
from router.fleet.in_flight import PrefixNode
from worker.protocol.limits import Limits
from worker.protocol.messages import EngineInfo, LoadSnapshot

Kind = TypeVar("Kind", BlockKey, Limits)


class Reservation(msgspec.Struct):
    """Reservation for a request sent to a worker, until a report of the worker includes it."""

    uncached_tokens: int
    """Prompt tokens missing in the worker's prefix cache."""
    work_s: float = 0.0
    """Seconds to compute `uncached_tokens`."""
    first_chunks_s: float = 0.0
    """Part of `work_s` that the prompt's first chunk takes, in seconds (see WorkerTable)."""
    epoch: int = 0
    """Epoch of the worker in which it accepted the request; 0 before its reply."""
    ordinal: int = 0
    """Number of the submit within `epoch`; a LoadSnapshot that counts at least as many submits
    includes the request."""


class SentPrompt(NamedTuple):
    """A prompt sent to a worker and not reported as computed yet."""

    node: PrefixNode
    """Last node of the prompt in the tree InFlight."""
    priority: int
    """Priority of the request: higher values are scheduled first."""
    work_s: float
    """Seconds to compute the tokens missing in the worker's prefix cache."""


@dataclass(slots=True)
class WorkerState:
    """One worker: its last report, and the requests that this gateway has sent to it."""

    worker_id: str
    row: int
    """The worker's row in the WorkerTable."""
    epoch: int
    """Number of the current rank group; submits are numbered from 1 in each epoch."""
    info: EngineInfo | None
    """Limits of the engine; None while the worker has no rank group or is rejected."""
    load: LoadSnapshot
    """The worker's last report of its load."""
    key: BlockKey | None = None
    """Block-hash parameters of the engine, or of the last one after its ranks failed; None before
    the first."""
    reported_at: float = 0.0
    """Time of the last report, on the fleet's clock."""
    observed_seq: int = 0
    """Number of the last step that updated the fleet's step-time model; 0 before the first."""
    draining: bool = False
    """Whether the worker is draining: it finishes its requests and accepts no new ones."""
    reservations: dict[str, Reservation] = field(default_factory=dict)
    """Requests not included in a report yet, by request id."""
    reserved_tokens: int = 0
    """Sum of `uncached_tokens` of the reservations."""
    adapters_sent: dict[str, float] = field(default_factory=dict)
    """Time of the last request per LoRA adapter version, on the fleet's clock."""
    in_flight: dict[str, SentPrompt] = field(default_factory=dict)
    """Prompts that the worker has not computed yet, by request id."""

    @property
    def ready(self) -> bool:
        """Whether the worker accepts requests."""
        return self.info is not None and not self.draining

    @property
    def num_active(self) -> int:
        """Requests on the worker: running, waiting, and sent since the report."""
        load = self.load
        return load.num_running + load.num_waiting + load.num_reserved + len(self.reservations)

    def contains(self, booking: Reservation) -> bool:
        """Whether the last report includes a request, or the epoch that accepted it is over.

        A request to which the worker has not replied is never included: the next epoch may accept
        it.
        """
        if not booking.epoch or booking.epoch > self.epoch:
            return False
        seen = max(self.load.num_submits_seen, self.load.num_submits_reserved)
        return booking.epoch < self.epoch or booking.ordinal <= seen


class ReadyWorkers:
    """Ready workers counted by kind, so that a request is checked once per kind of worker."""

    def __init__(self) -> None:
        self.keys: dict[BlockKey, int] = {}
        """Number of ready workers by block-hash parameters."""
        self.limits: dict[Limits, int] = {}
        """Number of ready workers by limits on requests."""

    @property
    def number(self) -> int:
        """Number of ready workers."""
        return sum(self.keys.values())

    def change(self, before: EngineInfo | None, after: EngineInfo | None) -> None:
        """Updates the counts when a worker's engine changes from `before` to `after`; None means
        that the worker is not ready."""
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
