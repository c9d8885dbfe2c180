"""The scheduler: requests in, one Plan per step out, results in, one report per step out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

from worker.core.grammar.state import DrawnTokens, Followed, GrammarProblem, GrammarStatus
from worker.core.request import Request, RequestState
from worker.core.scheduler.block_filler import BlockFiller
from worker.core.scheduler.clock import Clock
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.drain import DrainRate
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.filler import StepFiller
from worker.core.scheduler.finish import stop_reason, take_tokens, tokens_up_to_end
from worker.core.scheduler.load import Tally, snapshot
from worker.core.scheduler.logprobs import take_logprobs
from worker.core.scheduler.outbox import Outbox
from worker.core.scheduler.overload import LoadShedder
from worker.core.scheduler.pages import create_cache
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.recall import Recall
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.slo import Urgency
from worker.core.scheduler.step import StepBuilder, StepInFlight
from worker.core.speculation.gate import SpeculationGate
from worker.core.step_forecast import StepForecast
from worker.plan.digest import SampleDigest
from worker.plan.plan import BlockRow, DraftRow, Plan, StepResult
from worker.wire.admission import AdmissionChange
from worker.wire.messages import StepReport, StepShape, Submit
from worker.wire.queue_limits import QueueLimits

__all__ = ["Clock", "Scheduler", "SchedulerConfig"]

logger = logging.getLogger(__name__)

DIGEST_INTERVAL = 64
"""Every so many Plans carry a digest."""


class Scheduler:
    """Decides every step of one worker group. Pure: same calls, same Plans.

    Steps may overlap: `schedule` can be called while an earlier step is in flight. It counts what
    that step computes as done and the tokens it draws as placeholders; what turns out to be stale
    when the result is in (the request ended meanwhile) is dropped.

        add ──> queue ──admit──> running ──apply──> finished
         │        ^ ^               │
         │        │ └─ taken back ──┤  (pages ran out, or for a much more urgent one)
         └> held ─┘                 │
             ^                      │
             └──────────────────────┘  (held until its grammar, or the next mask, is provided)

    Args:
        config: limits of the worker group.
        clock: the time, for deadlines and logs; nothing else tells the time here.
        speculation: decides on drafts; None drafts nothing.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Clock, speculation: SpeculationGate | None = None
    ) -> None:
        self.config = config
        self._clock = clock
        self._cache = create_cache(config)
        self._requests: dict[str, Request] = {}
        self._service = TenantService()
        self.forecast = StepForecast(config.max_num_batched_tokens)
        """What steps take; to be asked by others, too."""
        self._recall = Recall(
            config.host_cache_policy, config.page_size, self._cache.host, self.forecast
        )
        urgency = Urgency(config.deadline_margin_s, self.forecast)
        self._queue = WaitingQueue(urgency, self._service)
        self._held: dict[str, Request] = {}
        """Requests whose grammar, or its next mask, is not here yet."""
        self._ended_guided: list[tuple[str, int]] = []
        """Requests under a grammar, by id and attempt, that `take_ended` is to tell of."""
        self._running = RunningSet()
        self._in_flight: deque[StepInFlight] = deque()
        self._outbox = Outbox()
        self._digest = SampleDigest()
        self._tally = Tally()
        drain = DrainRate()
        limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        self._shedder = LoadShedder(limits, self._queue, self._cache, drain)
        filler = StepFiller if config.blocks is None else BlockFiller
        self._filler = filler(
            *(config, self._cache, self._running, self._queue),
            *(self._tally, self._service, drain, clock),
            recall=self._recall,
            forecast=self.forecast,
            speculation=speculation,
        )
        self._speculation = speculation
        self._num_arrivals = 0
        self._num_reports = 0
        self._launched = 0
        self._completed = 0

    @property
    def launched_shape(self) -> StepShape:
        """What the newest step in flight computes."""
        return self._in_flight[-1].shape

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens drawn for requests that had ended or been taken back when they arrived."""
        return self._tally.num_dropped_tokens

    def add(self, submit: Submit) -> None:
        """Queues a request. One that could never fit has been refused before.

        A higher attempt of a known request replaces it without a word, since whoever raised the
        attempt no longer listens to the older; the same or a lower one is ignored.
        """
        self._tally.num_submits += 1
        present = self._requests.get(submit.request_id)
        if present is not None:
            if submit.attempt <= present.attempt:
                logger.warning(
                    "attempt %d ignored, attempt %d is under way",
                    *(submit.attempt, present.attempt),
                    extra={"request_id": submit.request_id},
                )
                return
            self._end(present, RequestState.FINISHED_ABORTED)
        self._num_arrivals += 1
        now = self._clock()
        request = Request(
            submit,
            arrival=self._num_arrivals,
            arrived_s=now - submit.waited_ms / 1e3,
            max_total_tokens=self.config.max_total_tokens,
            eos_token_ids=self.config.eos_token_ids,
            block_size=1 if self.config.blocks is None else self.config.blocks.size,
        )
        assert len(request.token_ids) < self.config.max_total_tokens, "can never fit: not refused"
        self._requests[request.request_id] = request
        if request.tenant:
            # A tenant that comes is to be lifted to what the others have been served by now.
            self._service.charge_output(self._running)
        if submit.grammar:
            self._held[request.request_id] = request
        elif request.is_resubmitted:
            self._queue.push_back(request, now)  # another worker had taken it
        elif not self._turn_away(request, now):
            self._queue.push(request, now)
        else:
            return
        if len(request.token_ids) >= request.limit:
            # An earlier attempt generated all there was to generate, but its end got lost.
            self._end(request, RequestState.FINISHED_LENGTH)
            self._outbox.put(request)

    def provide(
        self, request_id: str, attempt: int, grammar: GrammarStatus | GrammarProblem
    ) -> None:
        """Queues a request that waits for its grammar, or ends it where there is a problem.

        One that has ended meanwhile is ignored, but for `take_ended`.
        """
        request = self._held.get(request_id)
        if request is None or attempt != request.attempt:
            self._ended_guided.append((request_id, attempt))
            return
        if isinstance(grammar, GrammarProblem):
            request.give_up(grammar)
            self._end(request, RequestState.FINISHED_ERROR)
            self._outbox.put(request)
        elif grammar.is_complete:
            request.grammar = grammar
            self._end(request, RequestState.FINISHED_STOPPED)
            self._outbox.put(request)
        else:
            del self._held[request_id]
            request.grammar = grammar
            now = self._clock()
            if request.state is RequestState.PREEMPTED or request.is_resubmitted:
                self._queue.push_back(request, now)
            else:
                self._queue.push(request, now)

    def abort(self, request_id: str, attempt: int) -> None:
        """Ends a request wherever it is; unknown ids and aborts of older attempts are ignored."""
        request = self._requests.get(request_id)
        if request is None or attempt < request.attempt:
            return
        self._end(request, RequestState.FINISHED_ABORTED)
        self._outbox.put(request)

    def set_admission(self, change: AdmissionChange) -> None:
        """Changes the rules of admission. Raises ValueError for a value out of range."""
        admission = self._filler.admission
        admission.options = change.applied_to(admission.options)

    def has_work(self) -> bool:
        """Whether requests can go on, steps are in flight, or news are not taken yet."""
        return bool(
            len(self._requests) > len(self._held)
            or self._in_flight
            or self._outbox
            or self._cache.has_events
        )

    def schedule(self) -> Plan | None:
        """Decides the next step; None if there is nothing to do before a result comes in."""
        builder = StepBuilder(self._launched + 1)
        now = self._clock()
        self._queue.tick(now)
        self._filler.fill(builder, now)
        if not (builder.num_tokens or len(self._running)) and len(self._queue):
            # The only one was taken back; it comes again with what it finds in the cache.
            self._filler.fill(builder, now)
        if not builder.num_tokens:
            assert self._in_flight or len(self._requests) == len(self._held), (
                "requests wait, but nothing can run"
            )
            return None
        self._launched = builder.seq
        builder.copy_pages(*self._cache.take_copies(builder.seq))
        self._in_flight.append(builder.in_flight())
        if builder.seq % DIGEST_INTERVAL:
            return builder.plan(0, 0)
        return builder.plan(self._completed, self._digest.value(self._completed))

    def drawn_under_grammar(self, result: StepResult) -> list[DrawnTokens]:
        """What the oldest step in flight drew for requests under a grammar, by their rows.

        Changes nothing: the engine takes the tokens through the grammars, for `apply`.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.is_guided or step.seq != result.seq:
            return []
        found: list[DrawnTokens] = []
        next_token = 0
        for one, count in zip(step.rows, self._counts(step, result), strict=True):
            first_token, next_token = next_token, next_token + count
            request = one.request
            if not count or request.grammar is None or one.is_stale:
                continue
            tokens, ends = tokens_up_to_end(request, result.token_ids[first_token:next_token])
            found.append(
                DrawnTokens(
                    request.request_id,
                    request.attempt,
                    tokens,
                    ends,
                    are_proposals=isinstance(one.row, BlockRow),
                )
            )
        return found

    def apply(self, result: StepResult, followed: Sequence[Followed] = ()) -> None:
        """Takes the result of the oldest step in flight.

        Args:
            result: of the step.
            followed: what the grammars made of `drawn_under_grammar`, one each.

        Raises:
            ValueError: it is another step's, or has another number of tokens than were to be drawn.
        """
        step = self._in_flight.popleft() if self._in_flight else None
        if step is None or step.seq != result.seq:
            raise ValueError(f"got the result of step {result.seq}, expected {step}")
        counts = self._counts(step, result)
        self._completed = step.seq
        self._cache.complete(step.seq)
        self._digest.update(step.seq, result.token_ids)
        self._tally.observe(step, result)
        self.forecast.observe(self._tally.step_shape, self._tally.step_ms / 1e3)
        self._recall.observe(step.num_loads, result.load_ms / 1e3)
        self._take_result(step, result, counts, iter(followed))

    def masked_rows(self) -> list[tuple[str, int] | None]:
        """Whose the masked rows of the newest step are, by id and attempt; the only one in flight.

        None for rows whose request has ended or was preempted meanwhile.
        """
        assert len(self._in_flight) == 1, "masks depend on the results of all earlier steps"
        return self._in_flight[0].masked_rows()

    def take_ended(self) -> list[tuple[str, int]]:
        """Requests under a grammar that have ended since the last call, by id and attempt."""
        ended, self._ended_guided = self._ended_guided, []
        return ended

    def take_report(self) -> StepReport:
        """What happened since the last report, and the load as it stands."""
        self._num_reports += 1
        return StepReport(
            seq=self._num_reports,
            deltas=self._outbox.take(),
            block_events=self._cache.take_events(),
            load=snapshot(
                *(self.config, self._queue, self._running, self._cache, self._tally),
                num_held=len(self._held),
                retry_after_s=self._shedder.retry_after_s(self._clock()),
                speculation=None if self._speculation is None else self._speculation.totals,
                new_prompt_share=self._filler.new_prompt_share,
            ),
        )

    def check_invariants(self) -> None:
        """Asserts that requests, queue, running set and cache agree, and nothing is lost."""
        running = list(self._running)
        leases = [request.lease for request in running if request.lease is not None]
        assert len(leases) == len(running), "a running request without a lease"
        num_queued = len(self._queue) + len(self._held)
        assert len(running) + num_queued == len(self._requests), "a request is lost"
        assert len(running) <= self.config.max_num_seqs, "more requests run than there are slots"
        for request in self._requests.values():
            request.check_invariants(self.config.page_size)
        waiting = [
            request
            for request in self._requests.values()
            if request.state is not RequestState.RUNNING and request.request_id not in self._held
        ]
        assert self._queue.num_tokens == sum(len(r.token_ids) for r in waiting), "queue miscounted"
        assert len(waiting) == len(self._queue), "a request is queued and running"
        self._cache.check_invariants(leases)

    def _turn_away(self, arrival: Request, now: float) -> bool:
        """Where the queue is full, ends who gives way; whether it is the arrival."""
        loser = self._shedder.loser(arrival)
        if loser is None:
            return False
        loser.rejection = self._shedder.rejection(loser, now)
        loser.error = loser.rejection.message
        if loser is arrival:
            arrival.move_to(RequestState.FINISHED_ERROR)
            del self._requests[arrival.request_id]
        else:
            self._end(loser, RequestState.FINISHED_ERROR)
        self._outbox.put(loser)
        return loser is arrival

    def _counts(self, step: StepInFlight, result: StepResult) -> list[int]:
        """How many of the result's tokens each row has; ValueError if it has others in all."""
        return step.counts(result)

    def _take_result(
        self,
        step: StepInFlight,
        result: StepResult,
        counts: list[int],
        followed: Iterator[Followed],
    ) -> None:
        if result.logprobs is not None or result.prompt_logprobs is not None:
            take_logprobs(step, result, counts)
        if self._speculation is not None:
            self._speculation.observe(step, result)
        self._take_tokens(step, result.token_ids, counts, followed)

    def _take_tokens(
        self,
        step: StepInFlight,
        token_ids: list[int],
        counts: list[int],
        followed: Iterator[Followed],
    ) -> None:
        any_finished = False
        next_token = 0
        for (row, request, lease), count in zip(step.rows, counts, strict=True):
            first_token, next_token = next_token, next_token + count
            if request.lease is not lease:
                self._tally.num_dropped_tokens += count
                continue
            if isinstance(row, DraftRow):
                request.num_placeholders -= 1
                request.num_unverified -= row.num_drafts
                request.num_computed += count - 1
            else:
                request.num_placeholders -= count
            if count and request.first_token_s < 0.0:
                request.first_token_s = self._clock()
            guided = next(followed) if count and request.grammar is not None else None
            num_known = len(request.token_ids)
            state = take_tokens(request, token_ids[first_token:next_token], guided)
            if num_known + count > len(request.token_ids):
                self._drop(request, num_known + count - len(request.token_ids))
            # Of what a speculative row computed, all but the newest token counts.
            end = len(request.token_ids) - 1
            if not isinstance(row, DraftRow):
                end = row.start + row.length
            if end >= (lease.num_cached_pages + 1) * self.config.page_size:
                self._cache.commit(lease, request.token_ids, end)
            if not count:
                continue
            if state is None:
                self._outbox.put(request)
                if guided is not None and guided.is_pending:
                    self._hold(request)
                continue
            self._end(request, state, keep_place=True)
            any_finished = True
            stopped = state is RequestState.FINISHED_STOPPED
            self._outbox.put(
                request, stop_reason(request, self.config.eos_token_ids) if stopped else None
            )
        if any_finished:
            self._running.drop_finished()

    def _drop(self, request: Request, count: int) -> None:
        """Leaves out tokens that were drawn after the one that ends a request, or holds it up."""
        self._tally.num_dropped_tokens += count
        if request.logprobs:
            del request.logprobs[-count:]

    def _hold(self, request: Request) -> None:
        """Takes a running request out until its slow grammar has taken its last token.

        A row of it in flight becomes stale, as that of an aborted one does.
        """
        self._filler.withdrawal.withdraw(request)
        self._held[request.request_id] = request

    def _end(self, request: Request, state: RequestState, *, keep_place: bool = False) -> None:
        """Moves a request to a finished state and gives back all it holds.

        With `keep_place` the caller takes it out of the running set, with others at once.
        """
        if self._held.pop(request.request_id, None) is not None:
            pass
        elif request.lease is None:
            self._queue.remove(request)
        else:
            if not keep_place:
                self._running.remove(request)
            self._cache.release(request.lease)
            request.lease = None
        if request.grammar is not None:
            self._ended_guided.append((request.request_id, request.attempt))
        self._service.charge_output((request,))
        request.move_to(state)
        del self._requests[request.request_id]
        logger.debug(
            "%s after %d prompt and %d generated tokens, %.3f s",
            *(request.finish_reason, request.num_prompt, request.num_output),
            self._clock() - request.arrived_s,
            extra={"request_id": request.request_id},
        )
