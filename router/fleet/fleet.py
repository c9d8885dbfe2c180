"""The workers of one model: what they hold, how busy they are, who takes the next request."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from router.fleet.base import Reservation, RoutingPolicy, WorkerState
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.index import PrefixIndex
from worker.wire.messages import AttachSnapshot, EngineInfo, LoadSnapshot, WorkerUpdate


class Choice(msgspec.Struct, frozen=True):
    """The worker that was chosen, and for what."""

    worker_id: str
    epoch: int
    info: EngineInfo
    hit_tokens: int
    """Prompt tokens that its prefix cache should have."""


class Fleet:
    """Chooses among the workers of one model.

    `reserve` chooses and books in one step without an await in between, so that requests that
    arrive together see each other. A booking ends with the very report whose load contains the
    request, so that it is neither counted twice nor missed: workers number their submits, and say
    with each load how many of them it contains.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self.index = PrefixIndex()
        self._policy = policy
        self._workers: dict[str, WorkerState] = {}
        self._turn = 0

    @property
    def workers(self) -> Iterable[WorkerState]:
        """All attached workers, ready or not."""
        return self._workers.values()

    @property
    def ready(self) -> bool:
        """Whether any worker can take a request."""
        return any(worker.ready for worker in self._workers.values())

    @property
    def info(self) -> EngineInfo | None:
        """What some worker has loaded; None while none is up."""
        infos = (worker.info for worker in self._workers.values() if worker.info is not None)
        return next(infos, None)

    def block_keys(self) -> list[BlockKey]:
        """What prompts should be hashed with before they are routed."""
        infos = [worker.info for worker in self._workers.values() if worker.ready]
        return list(dict.fromkeys(BlockKey.of(info) for info in infos if info is not None))

    def attach(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """Takes a worker in as it stands, in place of all that was known of it."""
        before = self._workers.get(worker_id)
        state = WorkerState(worker_id, snapshot.epoch, snapshot.info, snapshot.load)
        if before is not None:
            state.draining = before.draining
            state.last_chosen = before.last_chosen
            state.reservations = before.reservations
            state.reserved_tokens = before.reserved_tokens
        self._workers[worker_id] = state
        self._settle(state)
        self.index.replace(worker_id, snapshot.blocks)

    def update(self, worker_id: str, update: WorkerUpdate) -> None:
        """Takes the news of one engine step."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if update.block_events:
            self.index.apply(worker_id, update.block_events)
        worker.load = update.load
        if worker.reservations:
            self._settle(worker)

    def lose(self, worker_id: str) -> None:
        """The worker's rank group or the worker itself is gone, and its cache with it."""
        self.index.drop(worker_id)
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.info = None
            worker.load = LoadSnapshot()

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """A draining worker finishes what it has and takes nothing new."""
        if worker_id in self._workers:
            self._workers[worker_id].draining = draining

    def remove(self, worker_id: str) -> None:
        """Forgets a worker."""
        self.index.drop(worker_id)
        self._workers.pop(worker_id, None)

    def reserve(
        self, request_id: str, prompt: PromptBlocks, excluded: Collection[str] = ()
    ) -> Choice | None:
        """Chooses a worker and books the request there; None if none can take it."""
        best: tuple[float, int, WorkerState, EngineInfo, int] | None = None
        matches: dict[BlockKey, dict[str, int]] = {}
        for worker in self._workers.values():
            info = worker.info
            if info is None or worker.draining or worker.worker_id in excluded:
                continue
            key = BlockKey.of(info)
            if key not in matches:
                matches[key] = self.index.match(prompt.hashes(key))
            # One token is always computed, so that there is something to sample from.
            hit = matches[key].get(worker.worker_id, 0) * info.page_size
            hit = min(hit, max(prompt.num_tokens - 1, 0))
            score = self._policy.score(worker, info, hit)
            if best is None or (score, -worker.last_chosen) > best[:2]:
                best = (score, -worker.last_chosen, worker, info, hit)
        if best is None:
            return None
        _, _, worker, info, hit = best
        self._turn += 1
        worker.last_chosen = self._turn
        uncached = prompt.num_tokens - hit
        worker.reservations[request_id] = Reservation(uncached)
        worker.reserved_tokens += uncached
        return Choice(worker.worker_id, worker.epoch, info, hit)

    def accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """The worker has the request: loads of this epoch that count `ordinal` submits contain it.

        Answer and reports travel apart, so such a load may be here already, or the epoch's first
        snapshot may still be on its way.
        """
        worker = self._workers.get(worker_id)
        booking = worker.reservations.get(request_id) if worker is not None else None
        if worker is None or booking is None:
            return
        booking.epoch, booking.ordinal = epoch, ordinal
        if _is_settled(booking, worker):
            self.release(worker_id, request_id)

    def release(self, worker_id: str, request_id: str) -> None:
        """Ends a booking; nothing happens if it has ended already."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        booking = worker.reservations.pop(request_id, None)
        if booking is not None:
            worker.reserved_tokens -= booking.uncached_tokens

    def _settle(self, worker: WorkerState) -> None:
        settled = [r for r, booking in worker.reservations.items() if _is_settled(booking, worker)]
        for request_id in settled:
            self.release(worker.worker_id, request_id)


def _is_settled(booking: Reservation, worker: WorkerState) -> bool:
    """Whether the worker's load contains it, or the incarnation that took it is gone.

    One that was not answered yet goes on: the next incarnation may be the one that takes it.
    """
    if not booking.epoch or booking.epoch > worker.epoch:
        return False
    return booking.epoch < worker.epoch or booking.ordinal <= worker.load.num_submits_seen
