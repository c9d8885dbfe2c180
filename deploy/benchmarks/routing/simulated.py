"""Routers for simulations: their interface, and the gateway's own routing with any policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival
from router.config import RoutingConfig
from router.fleet import Fleet, PromptBlocks
from worker.protocol.adapters import AdapterRef
from worker.protocol.messages import StepReport, Submit, WorkerUpdate

Clock = Callable[[], float]


def adapter_of(arrival: Arrival) -> AdapterRef | None:
    """The LoRA adapter of a request; None for the base model."""
    name = arrival.adapter
    return AdapterRef(name, f"/adapters/{name}", name) if name else None


class Placement(NamedTuple):
    """The worker that a router chooses for one request."""

    worker_id: str
    hit_tokens: int = 0
    """Prompt tokens that the router expects in the worker's cache."""
    predicted_s: float = 0.0
    """Predicted seconds to the first token; 0 if the router makes no prediction."""
    sampled_blocks: bytes = b""
    """Hashes of blocks of the prompt, for other gateways (see `Submit`)."""
    shared_block: int = 0
    """Hash of the last block of the longest cached prefix, for other gateways (see `Submit`)."""


class SimulatedRouter(ABC):
    """Interface of a router in a simulation. `place` chooses workers; most other methods notify the
    router of events."""

    @abstractmethod
    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""

    @abstractmethod
    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that died or left, or whose attach stream broke."""

    def draining(self, worker: SimWorker) -> None:
        """Stops placing requests on a draining worker."""
        self.lost(worker)

    def split(self, arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
        """Splits requests that arrive at the same time into groups that are placed and submitted in
        sequence."""
        return [list(arrivals)]

    @abstractmethod
    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time; None if there are no
        workers."""

    @abstractmethod
    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Records that a request was sent to its worker as that worker's request number
        `ordinal`."""

    @abstractmethod
    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Handles the report of a worker's step."""

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request or its worker has ended."""
        return

    def close(self) -> None:
        """Releases the router's resources after the simulation."""
        return


class GatewayRouter(SimulatedRouter):
    """Router that uses the gateway's own code: block index, hashes, joint placement, reservations,
    step-time model and policy.

    Args:
        config: policy and its settings.
        clock: clock of the simulation.
        knows_adapters: whether routing is LoRA-aware.
    """

    def __init__(self, config: RoutingConfig, clock: Clock, *, knows_adapters: bool = True) -> None:
        self.fleet = Fleet(config, clock=clock)
        self._knows_adapters = knows_adapters

    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""
        self.fleet.attach(worker.worker_id, worker.snapshot())

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that died or left, or whose attach stream broke."""
        self.fleet.lose(worker.worker_id)

    def draining(self, worker: SimWorker) -> None:
        """Stops placing requests on a draining worker."""
        self.fleet.set_draining(worker.worker_id, True)

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time."""
        requests = [(arrival.request_id, self._prompt(arrival), ()) for arrival in arrivals]
        placed: list[Placement | None] = [None] * len(arrivals)
        for place, c in self.fleet.reserve_group(requests):
            if c is not None:
                placed[place] = Placement(
                    c.worker_id, c.hit_tokens, c.first_token_s, c.sampled_blocks, c.shared_block
                )
        return placed

    def _prompt(self, arrival: Arrival) -> PromptBlocks:
        prompt = PromptBlocks(
            arrival.tokens,
            adapter=adapter_of(arrival),
            session=arrival.session,
            memo=self.fleet.memo,
        )
        if not self._knows_adapters:
            prompt.adapter = None
        return prompt

    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Records that a request was sent to its worker as that worker's request number
        `ordinal`."""
        self.fleet.accepted(worker.worker_id, submit.request_id, worker.epoch, ordinal)

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Handles the report of a worker's step."""
        update = WorkerUpdate(worker.epoch, report.seq, [], report.block_events, report.load)
        self.fleet.update(worker.worker_id, update)
        for deltas in report.deltas.values():
            for delta in deltas:
                if delta.num_cached_tokens >= 0:
                    self.fleet.release_booking(worker.worker_id, delta.request_id)

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request or its worker has ended."""
        self.fleet.release_booking(worker_id, request_id)
