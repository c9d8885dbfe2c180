"""Fleet: a gateway's view of the workers of one model, and its routing decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from router.config import RoutingConfig
from router.fleet.adapters import adapter_load_s, note_adapter
from router.fleet.blocks import BlockKey, PromptBlocks
from router.fleet.burst import group_order
from router.fleet.constants import PACE_DECODES
from router.fleet.explain import Explainer, Explanation
from router.fleet.hits import HitFinder
from router.fleet.in_flight import InFlight
from router.fleet.index import PrefixIndex
from router.fleet.memo import HashMemo
from router.fleet.other_gateways import MIN_TOKENS, OtherGatewaysPrompts, sampled_blocks
from router.fleet.pace import FleetPace
from router.fleet.policies import create_policy
from router.fleet.pricing import price_all, price_load
from router.fleet.queue_order import QueueOrder
from router.fleet.request import RequestView, estimate
from router.fleet.state import ReadyWorkers, Reservation, SentPrompt, WorkerState
from router.fleet.utilisation import Utilisation
from router.fleet.workers import WorkerTable
from worker.protocol.limits import Limits
from worker.protocol.messages import AttachSnapshot, EngineInfo, LoadSnapshot, WorkerUpdate

logger = logging.getLogger(__name__)

_MOST_UNPRICED = 16
"""Maximum number of reports that are priced (see router.fleet.pricing) only at the next decision.
At 5 µs each, they take as long as the decision itself."""

Parity = Callable[[EngineInfo], "str | None"]
"""Check that returns how a worker differs from this gateway in rendering, tokenizing or hashing
prompts; None if it does not."""


class Choice(msgspec.Struct, frozen=True):
    """The worker reserved for a request, and the predicted times and hits there."""

    worker_id: str
    epoch: int
    info: EngineInfo
    hit_tokens: int
    """Prompt tokens predicted to be in the worker's prefix cache."""
    best_hit_tokens: int
    """Prompt tokens predicted to be in the prefix cache of the worker with the longest hit."""
    waiting_s: float
    """Predicted seconds until the worker starts the prompt."""
    work_s: float
    """Predicted seconds for which the worker computes the prompt."""
    explanation: Explanation | None = None
    """Explanation of the decision; None unless enabled in RoutingConfig."""
    sampled_blocks: bytes = b""
    """Block hashes for other gateways (see PromptInFlight); empty if there are no other gateways,
    or if hits cover most of the prompt."""
    shared_block: int = 0
    """Hash of the last block of the longest prefix that any worker has, for other gateways; 0 if
    there is none."""

    @property
    def first_token_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.waiting_s + self.work_s


class Fleet:
    """The workers of one model, and the choice among them. Does no I/O, and works without a
    gateway.

    `reserve` chooses and reserves in one step without an await in between, so that requests that
    arrive together take each other into account. A reservation ends with the first report whose
    load includes the request, so that it is neither counted twice nor missed: workers number their
    submits, including those of other gateways, and each report states how many it includes. The
    request's blocks count as cached from the reservation until they have been computed; after that,
    block events determine whether they are cached.

    Args:
        config: routing policy and its weights.
        clock: time in seconds from an arbitrary epoch.
        parity: checks the EngineInfo of each worker that attaches.
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
        self.others = OtherGatewaysPrompts()
        self.has_other_gateways = False
        """Whether other gateways use the workers. If not, choices have no hashes for other
        gateways."""
        self.memo = HashMemo()
        self._table = WorkerTable()
        self.pace = FleetPace()
        self.utilisation = Utilisation()
        self.policy = create_policy(config, self.utilisation)
        explained = config.explain_routing or config.decision_log is not None
        self._explainer = Explainer() if explained else None
        self._clock = clock
        self._parity = parity
        self._workers: dict[str, WorkerState] = {}
        self._queue_order = QueueOrder()
        self._hits = HitFinder(self.index, self.in_flight, self.others)
        self._priced_with = self.pace.costs
        self._ready_workers = ReadyWorkers()
        self._num_chosen = 0
        self._unpriced: dict[str, WorkerState] = {}
        """Workers whose last report has not been priced into the table yet, by id."""

    @property
    def workers(self) -> Iterable[WorkerState]:
        """All attached workers, ready or not."""
        return self._workers.values()

    def worker(self, worker_id: str) -> WorkerState:
        """The attached worker with this id. Raises KeyError if there is none."""
        return self._workers[worker_id]

    def is_ready(self, worker_id: str) -> bool:
        """Whether a worker is attached and accepts requests."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.ready

    @property
    def table(self) -> WorkerTable:
        """The WorkerTable, including all reports.

        Up to _MOST_UNPRICED reports are priced (see router.fleet.pricing) only when the table is
        read, so that reports without a decision after them cost less.
        """
        if self._unpriced:
            for worker in self._unpriced.values():
                self._tabulate(worker)
            self._unpriced.clear()
        return self._table

    @property
    def ready(self) -> bool:
        """Whether any worker is available."""
        return self._ready_workers.number > 0

    @property
    def info(self) -> EngineInfo | None:
        """EngineInfo of any worker; None before a worker has loaded."""
        infos = (worker.info for worker in self._workers.values() if worker.info is not None)
        return next(infos, None)

    @property
    def limits(self) -> Collection[Limits]:
        """Distinct limits of the ready workers; empty while none is ready."""
        return self._ready_workers.limits

    def block_keys(self) -> list[BlockKey]:
        """Distinct block-hash parameters of the ready workers; prompts are hashed with each."""
        return list(self._ready_workers.keys)

    def attach(self, worker_id: str, snapshot: AttachSnapshot) -> None:
        """Adds a worker, or replaces its state, with its snapshot."""
        info = snapshot.info
        problem = self._parity(info) if self._parity and info is not None else None
        if problem is not None:
            logger.error(
                "rejecting worker %s, since its cache could never be hit: %s", worker_id, problem
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
        self.others.drop(worker.row)
        self.others.add(worker.row, snapshot.prompts)
        self._unbook_reported(worker)
        self._update_ready(worker, before)
        self._unpriced.pop(worker_id, None)
        self._tabulate(worker)

    def update(self, worker_id: str, update: WorkerUpdate) -> None:
        """Applies a worker's report of one engine step: block events, load and step time."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.info is None:
            return
        if update.block_events:
            self.index.apply(worker_id, update.block_events)
        now = self._clock()
        if update.prompts:
            self.others.add(worker.row, update.prompts)
            for sent in update.prompts:
                if sent.shared_block:
                    self.policy.observe_prefix(sent.shared_block, now)
        if update.computed:
            self.others.remove(worker.row, update.computed)
        if update.load is not None:
            self._report(worker, update.load, now)

    def _report(self, worker: WorkerState, load: LoadSnapshot, now: float) -> None:
        """Applies a worker's load, and updates the step-time model with the steps since its last
        report."""
        before, worker.load = worker.load, load
        worker.reported_at = now
        # Step times: of all steps with prefills, and of one decode step in PACE_DECODES.
        seq, last = load.step_shape.seq, worker.observed_seq
        if seq != last and (load.step_shape.prefill_tokens or not last < seq < last + PACE_DECODES):
            self._observe_step(worker)
        if load.prefill_steps.num_steps > before.prefill_steps.num_steps:
            busy_s = self.pace.busy_s(worker.row, before.prefill_steps, load.prefill_steps)
            if busy_s:
                self.utilisation.add(worker.row, busy_s, now)
        if worker.reservations:
            self._unbook_reported(worker)
        if len(self._unpriced) < _MOST_UNPRICED:
            self._unpriced[worker.worker_id] = worker
        else:
            self._tabulate(worker)

    def lose(self, worker_id: str) -> None:
        """Records that a worker's rank group has failed, and its cache is lost."""
        self.index.drop(worker_id)
        worker = self._workers.get(worker_id)
        if worker is not None:
            before = worker.info if worker.ready else None
            self.pace.forget(worker.row)
            self.others.drop(worker.row)
            worker.info, worker.observed_seq = None, 0
            worker.load = LoadSnapshot()
            worker.adapters_sent.clear()
            self._update_ready(worker, before)

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """Sets whether a worker is draining: it finishes its requests and accepts no new ones."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            before = worker.info if worker.ready else None
            worker.draining = draining
            self._update_ready(worker, before)

    def remove(self, worker_id: str) -> None:
        """Removes a worker that has left."""
        self.lose(worker_id)
        worker = self._workers.pop(worker_id, None)
        self._unpriced.pop(worker_id, None)  # its row may be reused
        if worker is not None:
            for sent in worker.in_flight.values():
                self._end_prompt(sent, worker.row)
            self._table.remove(worker.row)

    def view(self, prompt: PromptBlocks, excluded: Collection[str] = ()) -> RequestView:
        """The prompt as seen by policies; workers in `excluded` are not eligible."""
        eligible = self.table.eligible
        if excluded:
            eligible = eligible.copy()
            for worker_id in excluded:
                if worker_id in self._workers:
                    eligible[self._workers[worker_id].row] = False
        view = self._hits.view(prompt, self.block_keys(), eligible)
        view.queue = self._queue_order.view(prompt.priority, len(eligible))
        if prompt.adapter is not None:
            view.adapter_s = adapter_load_s(
                prompt.adapter, self._workers.values(), len(eligible), self._clock()
            )
        return view

    def expected_wait_s(self) -> float:
        """Seconds until some ready worker would start a new request; infinite if none is ready."""
        table = self.table
        rows = np.flatnonzero(table.eligible)
        if not len(rows):
            return np.inf
        wait_s = table.waiting_s(self._clock()) + table.slot_wait_s
        return float(wait_s[rows].min())

    def reserve(
        self, request_id: str, prompt: PromptBlocks, excluded: Collection[str] = ()
    ) -> Choice | None:
        """Chooses a worker and reserves capacity for the request there.

        Args:
            request_id: the request's id, with which it is released.
            prompt: the request's prompt.
            excluded: ids of workers that must not be chosen.

        Returns:
            The choice; None if no worker is available.
        """
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
        # Read before the reservation, which changes the table and with it `slot_wait_s`.
        waiting_s = expected.delay_s.item(row) + expected.slot_wait_s.item(row)
        if request.adapter_s is not None:
            waiting_s += request.adapter_s.item(row)
        if prompt.adapter is not None:
            note_adapter(prompt.adapter, worker, now)
        explanation = None
        if self._explainer is not None:
            explanation = self._explainer.explain(request, expected, table, decision)
        self.policy.observe(request, work_s, now)
        booking = _reservation(table, row, request.num_tokens - hit, work_s)
        assert worker.key is not None, "a worker that has loaded has a key"
        hashes = prompt.hashes(worker.key)
        node = self.in_flight.add(hashes, row)
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
            sampled_blocks(hashes)
            if self.has_other_gateways and request.num_tokens - hit >= MIN_TOKENS
            else b"",
            request.shared_block if self.has_other_gateways else 0,
        )

    def reserve_group(
        self, requests: Sequence[tuple[str, PromptBlocks, Collection[str]]]
    ) -> Iterator[tuple[int, Choice | None]]:
        """Reserves workers for requests that arrived together, one per item, in the order of
        `group_order`.

        Args:
            requests: the arguments of `reserve` for each request.

        Yields:
            The index of a request, and its choice.
        """
        places: Sequence[int] = range(len(requests))
        if len(requests) > 1:
            places = group_order([prompt for _, prompt, _ in requests], self.block_keys())
        for place in places:
            yield place, self.reserve(*requests[place])

    def accepted(self, worker_id: str, request_id: str, epoch: int, ordinal: int) -> None:
        """Records that a worker accepted a request as submit number `ordinal` of `epoch`.

        The reservation ends with a report of that epoch that includes at least this number of
        submits. Replies and reports are not ordered: the report may have arrived already, or the
        epoch's first snapshot may still be missing.
        """
        worker = self._workers.get(worker_id)
        booking = worker.reservations.get(request_id) if worker is not None else None
        if worker is None or booking is None:
            return
        booking.epoch, booking.ordinal = epoch, ordinal
        if worker.contains(booking):
            self._unbook(worker, request_id)

    def release_booking(self, worker_id: str, request_id: str) -> None:
        """Ends a request's reservation, since its prompt has been computed or never will be.
        Idempotent."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        sent = worker.in_flight.pop(request_id, None)
        if sent is not None:
            self._end_prompt(sent, worker.row)
        self._unbook(worker, request_id)

    def _observe_step(self, worker: WorkerState) -> None:
        """Updates the step-time model with the step of a worker's last report."""
        row, load, now = worker.row, worker.load, worker.reported_at
        if load.step_ms <= 0.0 or not self.pace.is_due(row, now):
            return
        worker.observed_seq = load.step_shape.seq
        self.pace.observe(row, load, now)
        if self.pace.costs is not self._priced_with:
            # All workers at once: their prices are compared, so they must use the same costs.
            self._priced_with = self.pace.costs
            price_all(self._table, self.pace.costs, self.pace.factors(self._table.capacity))
            self._compare_speeds()

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
        # Sums of additions and removals drift; without reservations they are reset to zero.
        if worker.reservations:
            table.reserved_s[row] += sign * booking.work_s
            table.reserved_first_chunks_s[row] += sign * booking.first_chunks_s
        else:
            table.reserved_s[row] = table.reserved_first_chunks_s[row] = 0.0
        table.set_active(row, worker.num_active)

    def _update_ready(self, worker: WorkerState, before: EngineInfo | None) -> None:
        """Updates the sets of ready workers after a change of one worker; `before` is its engine
        before the change, if it was ready."""
        self._table.eligible[worker.row] = worker.ready
        self._ready_workers.change(before, worker.info if worker.ready else None)
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
    """Reservation of a request that takes `work_s` seconds, without the part of its last step that
    later prompts can share."""
    part = uncached / table.chunk.item(row)
    work_s -= max(1.0 - part, 0.0) * table.step_s.item(row)
    first_chunks_s = work_s * min(1.0, table.first_chunk_tokens.item(row) / max(uncached, 1))
    return Reservation(uncached, work_s, first_chunks_s)
