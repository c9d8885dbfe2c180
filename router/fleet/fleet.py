"""The workers of one model: what they hold, how busy they are, who takes the next request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import numpy as np

from router.config import RoutingConfig
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.burst import group_order
from router.fleet.explain import Explainer, Explanation
from router.fleet.hits import HitFinder
from router.fleet.in_flight import InFlight
from router.fleet.index import PrefixIndex
from router.fleet.memo import HashMemo
from router.fleet.pace import FleetPace
from router.fleet.policies import create_policy
from router.fleet.pricing import price_all, price_load
from router.fleet.queue_order import QueueOrder
from router.fleet.request import RequestView, estimate
from router.fleet.state import Members, Reservation, SentPrompt, WorkerState
from router.fleet.utilisation import Utilisation
from router.fleet.workers import WorkerTable
from worker.wire.limits import Limits
from worker.wire.messages import AttachSnapshot, EngineInfo, LoadSnapshot, WorkerUpdate

logger = logging.getLogger(__name__)

_MOST_UNPRICED = 16
"""Reports, of 5 us each, that may wait to be priced with the next decision, which takes as long."""

Parity = Callable[[EngineInfo], "str | None"]
"""The flaw in a worker's way to write, tokenize and hash prompts; None if there is none."""


class Choice(msgspec.Struct, frozen=True):
    """The worker that was chosen, and for what."""

    worker_id: str
    epoch: int
    info: EngineInfo
    hit_tokens: int
    """Prompt tokens that its prefix cache should have."""
    best_hit_tokens: int
    """Prompt tokens that the cache of some worker has."""
    waiting_s: float
    """Expected time until it begins the prompt."""
    work_s: float
    """Expected time that it computes the prompt."""
    explanation: Explanation | None = None
    """The decision explained, where that is asked for."""

    @property
    def first_token_s(self) -> float:
        """Expected time to the first token."""
        return self.waiting_s + self.work_s


class Fleet:
    """Chooses among the workers of one model. Pure but for its clock: usable without a gateway.

    `reserve` chooses and books in one step without an await in between, so that requests that
    arrive together see each other. A booking ends with the very report whose load contains the
    request, so that it is neither counted twice nor missed: workers number their submits, and say
    with each load how many of them it contains, those of other gateways included. Its blocks count
    as held from the booking until the request has been computed, when they are in the events.

    Args:
        config: policy and its weights.
        clock: seconds from some fixed moment.
        parity: checks what a worker reports of itself.
    """

    def __init__(
        self,
        config: RoutingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        parity: Parity | None = None,
    ) -> None:
        config = config or RoutingConfig()
        self.index = PrefixIndex()
        self.in_flight = InFlight()
        self.memo = HashMemo()
        self._table = WorkerTable()
        self.pace = FleetPace()
        self.utilisation = Utilisation()
        self.policy = create_policy(config, self.utilisation)
        explained = config.explain_routing or bool(config.decision_log)
        self._explainer = Explainer() if explained else None
        self._clock = clock
        self._parity = parity
        self._workers: dict[str, WorkerState] = {}
        self._queue_order = QueueOrder()
        self._hits = HitFinder(self.index, self.in_flight, self._table)
        self._priced_with = self.pace.costs
        self._members = Members()
        self._num_chosen = 0
        self._unpriced: dict[str, WorkerState] = {}
        """Workers whose last report is not in the table yet."""

    @property
    def workers(self) -> Iterable[WorkerState]:
        """All attached workers, ready or not."""
        return self._workers.values()

    def worker(self, worker_id: str) -> WorkerState:
        """An attached worker."""
        return self._workers[worker_id]

    @property
    def table(self) -> WorkerTable:
        """All workers as they reported last.

        Reports come with each step, and some are priced when somebody looks: a step that no
        decision follows costs nothing here.
        """
        if self._unpriced:
            for worker in self._unpriced.values():
                self._tabulate(worker)
            self._unpriced.clear()
        return self._table

    @property
    def ready(self) -> bool:
        """Whether any worker can take a request."""
        return self._members.number > 0

    @property
    def info(self) -> EngineInfo | None:
        """The engine's limits of some worker; None while none is up."""
        infos = (worker.info for worker in self._workers.values() if worker.info is not None)
        return next(infos, None)

    @property
    def limits(self) -> Collection[Limits]:
        """Limits of workers that are ready, one of a kind; empty while none is."""
        return self._members.limits

    def block_keys(self) -> list[BlockKey]:
        """Keys that prompts should be hashed with before they are routed."""
        return list(self._members.keys)

    def attach(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """Takes a worker in as it stands, in place of all that was known of it."""
        info = snapshot.info
        problem = self._parity(info) if self._parity and info is not None else None
        if problem is not None:
            logger.error(
                "worker %s is refused, its cache could never be hit: %s", worker_id, problem
            )
            info = None
        worker = self._workers.get(worker_id)
        before = worker.info if worker is not None and worker.ready else None
        if worker is None:
            row = self._table.add(worker_id)
            worker = WorkerState(worker_id, row, snapshot.epoch, info, snapshot.load)
            self._workers[worker_id] = worker
            self.utilisation.begin(row, self._clock())
        worker.epoch, worker.info, worker.load = snapshot.epoch, info, snapshot.load
        worker.reported_at = self._clock()
        worker.key = BlockKey.of(info) if info is not None else None
        self.index.replace(worker_id, snapshot.blocks if info is not None else ())
        slot = self.index.slot(worker_id)
        assert slot is not None, "an attached worker has a slot"
        self._hits.placed(slot, worker.row)
        self._unbook_reported(worker)
        self._member_changed(worker, before)
        self._unpriced.pop(worker_id, None)
        self._tabulate(worker)

    def update(self, worker_id: str, update: WorkerUpdate) -> None:
        """Takes the news of one engine step."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.info is None:
            return
        if update.block_events:
            self.index.apply(worker_id, update.block_events)
        before, worker.load = worker.load, update.load
        worker.reported_at = now = self._clock()
        if update.load.step_shape.seq != before.step_shape.seq:
            self.pace.observe(worker.row, update.load, now)
            if busy := self.pace.busy_s(worker.row, update.load):
                self.utilisation.add(worker.row, busy, now)
        if worker.reservations:
            self._unbook_reported(worker)
        if len(self._unpriced) < _MOST_UNPRICED:
            self._unpriced[worker_id] = worker
        else:
            self._tabulate(worker)
        if self.pace.costs is not self._priced_with:
            # All at once: workers are compared, and must not differ by when they last reported.
            self._priced_with = self.pace.costs
            price_all(self._table, self.pace.costs, self.pace.factors(self._table.capacity))
            self._compare_speeds()

    def lose(self, worker_id: str) -> None:
        """The worker's rank group or the worker itself is gone, and its cache with it."""
        self.index.drop(worker_id)
        worker = self._workers.get(worker_id)
        if worker is not None:
            before = worker.info if worker.ready else None
            self.pace.forget(worker.row)
            worker.info = None
            worker.load = LoadSnapshot()
            self._member_changed(worker, before)

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """A draining worker finishes what it has and takes nothing new."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            before = worker.info if worker.ready else None
            worker.draining = draining
            self._member_changed(worker, before)

    def remove(self, worker_id: str) -> None:
        """Forgets a worker."""
        self.lose(worker_id)
        worker = self._workers.pop(worker_id, None)
        self._unpriced.pop(worker_id, None)  # its row may be another's
        if worker is not None:
            for sent in worker.in_flight.values():
                self._end_prompt(sent, worker.row)
            self._table.remove(worker.row)

    def view(self, prompt: PromptBlocks, excluded: Collection[str] = ()) -> RequestView:
        """The prompt as policies see it."""
        eligible = self.table.eligible
        if excluded:
            eligible = eligible.copy()
            for worker_id in excluded:
                if worker_id in self._workers:
                    eligible[self._workers[worker_id].row] = False
        view = self._hits.view(prompt, self.block_keys(), eligible)
        view.queue = self._queue_order.view(prompt.priority, len(eligible))
        return view

    def expected_wait_s(self) -> float:
        """How long the next request would wait before a worker begins it; infinite without any."""
        table = self.table
        rows = np.flatnonzero(table.eligible)
        if not len(rows):
            return np.inf
        wait_s = table.waiting_s(self._clock()) + table.slot_wait_s
        return float(wait_s[rows].min())

    def reserve(
        self, request_id: str, prompt: PromptBlocks, excluded: Collection[str] = ()
    ) -> Choice | None:
        """Chooses a worker and books the request there; None if none can take it."""
        now = self._clock()
        table = self.table
        request = self.view(prompt, excluded)
        expected = estimate(request, table, now)
        decision = self.policy.choose(request, expected, table, now)
        if decision is None:
            return None
        row = decision.row
        worker = self._workers[table.ids[row]]
        assert worker.info is not None, "a worker that is not ready was eligible"
        self._num_chosen += 1
        table.last_chosen[row] = self._num_chosen
        hit = int(request.hit_tokens.item(row))
        work_s = expected.work_s.item(row)
        waiting_s = expected.delay_s.item(row) + expected.slot_wait_s.item(row)
        explanation = None
        if self._explainer is not None:
            explanation = self._explainer.explain(request, expected, table, decision)
        self.policy.observe(request, work_s, now)
        booking = _reservation(table, row, request.num_tokens - hit, work_s)
        assert worker.key is not None, "a worker that has loaded has a key"
        node = self.in_flight.add(prompt.hashes(worker.key), row)
        worker.in_flight[request_id] = SentPrompt(node, prompt.priority, booking.work_s)
        worker.reservations[request_id] = booking
        self._book(worker, booking, 1)
        self._queue_order.add(prompt.priority, row, booking.work_s, table.capacity)
        return Choice(
            worker.worker_id,
            worker.epoch,
            worker.info,
            hit,
            int(request.best_hit),
            waiting_s,
            work_s,
            explanation,
        )

    def reserve_group(
        self, requests: Sequence[tuple[str, PromptBlocks, Collection[str]]]
    ) -> list[Choice | None]:
        """Places requests that arrived together, those of one prefix in a row, large groups first.

        Answers are in the order of the requests.
        """
        if len(requests) == 1:
            return [self.reserve(*requests[0])]
        choices: list[Choice | None] = [None] * len(requests)
        for place in group_order([prompt for _, prompt, _ in requests], self.block_keys()):
            choices[place] = self.reserve(*requests[place])
        return choices

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
        if worker.contains(booking):
            self._unbook(worker, request_id)

    def release(self, worker_id: str, request_id: str) -> None:
        """The request has been computed, or never will be there. Nothing happens a second time."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        sent = worker.in_flight.pop(request_id, None)
        if sent is not None:
            self._end_prompt(sent, worker.row)
        self._unbook(worker, request_id)

    def _end_prompt(self, sent: SentPrompt, row: int) -> None:
        self.in_flight.remove(sent.node, row)
        self._queue_order.remove(sent.priority, row, sent.work_s)

    def _unbook_reported(self, worker: WorkerState) -> None:
        bookings = worker.reservations.items()
        for request_id in [r for r, booking in bookings if worker.contains(booking)]:
            self._unbook(worker, request_id)

    def _unbook(self, worker: WorkerState, request_id: str) -> None:
        booking = worker.reservations.pop(request_id, None)
        if booking is not None:
            self._book(worker, booking, -1)

    def _book(self, worker: WorkerState, booking: Reservation, sign: int) -> None:
        table, row = self._table, worker.row
        tokens = sign * booking.uncached_tokens
        worker.reserved_tokens += tokens
        table.reserved_tokens[row] = worker.reserved_tokens
        # Sums of what came and went drift; with nothing booked they are zero again.
        if worker.reservations:
            table.reserved_s[row] += sign * booking.work_s
            table.reserved_first_chunks_s[row] += sign * booking.first_chunks_s
        else:
            table.reserved_s[row] = table.reserved_first_chunks_s[row] = 0.0
        table.set_active(row, worker.num_active)

    def _member_changed(self, worker: WorkerState, before: EngineInfo | None) -> None:
        """A worker became ready, no longer is (`before` says what it had loaded), or is another."""
        self._table.eligible[worker.row] = worker.ready
        self._members.change(before, worker.info if worker.ready else None)
        self._compare_speeds()

    def _compare_speeds(self) -> None:
        rows = np.flatnonzero(self._table.eligible)
        if len(rows):
            speeds = 1.0 / self.pace.factors(self._table.capacity)[rows]
            self._table.relative_speed[rows] = speeds / speeds.mean()

    def _tabulate(self, worker: WorkerState) -> None:
        info, load, table, row = worker.info, worker.load, self._table, worker.row
        if info is None:
            return
        table.reported_at[row] = worker.reported_at
        table.max_num_seqs[row] = max(load.max_num_seqs or info.max_num_seqs, 1)
        table.page_size[row] = info.page_size
        table.free_pages[row] = load.num_free_pages
        table.total_pages[row] = load.num_total_pages
        price_load(table, row, load, info, self.pace.costs, self.pace.factor(row))
        table.set_active(row, worker.num_active)


def _reservation(table: WorkerTable, row: int, uncached: int, work_s: float) -> Reservation:
    """The booking of a request that takes `work_s` alone: those behind it share its last step."""
    part = uncached / table.chunk.item(row)
    work_s -= max(1.0 - part, 0.0) * table.step_s.item(row)
    first_chunks_s = work_s * min(1.0, table.first_chunk_tokens.item(row) / max(uncached, 1))
    return Reservation(uncached, work_s, first_chunks_s)
