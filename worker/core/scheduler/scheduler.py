"""The scheduler: requests in, one Plan per step out, results in, one report per step out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from worker.core.grammar.state import GrammarAdvance, GrammarProblem, GrammarStatus, SampledTokens
from worker.core.request import Request, RequestState
from worker.core.scheduler.adapter_gate import AdapterGate
from worker.core.scheduler.admission import Admission
from worker.core.scheduler.block_steps import BlockSteps
from worker.core.scheduler.canvas_steps import CanvasSteps
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.finish import tokens_up_to_end
from worker.core.scheduler.host_load_policy import HostLoadPolicy
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.overload import LoadShedder
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.core.scheduler.state import Clock, SchedulerState
from worker.core.scheduler.step import StepBuilder, StepInFlight
from worker.core.scheduler.token_steps import TokenSteps
from worker.plan.plan import BlockRow, Plan, SampleDigest, StepResult
from worker.protocol.admission import AdmissionChange
from worker.protocol.messages import LoadSnapshot, StepReport, Submit
from worker.protocol.queue_limits import QueueLimits

logger = logging.getLogger(__name__)

DIGEST_INTERVAL = 64
"""Number of Plans per digest of the sampled tokens."""


class Scheduler:
    """Schedules every step of one worker group. Deterministic: the same calls give the same Plans.

    Steps may overlap: `schedule` can be called while an earlier step is in flight. Positions that
    a step in flight computes count as computed, and tokens that it samples count as placeholders.
    Output for requests that end in the meantime is dropped.

        add ──> queue ──admit──> running ──apply──> finished
         │        ^ ^               │
         │        │ └─ preempted ───┤  (out of pages, or for a much more urgent request)
         └> held ─┘                 │
             ^                      │
             └──────────────────────┘  (held until its grammar, next mask or adapter is ready)

    Args:
        config: limits of the worker group.
        clock: returns seconds, for deadlines and logs; the scheduler reads no other clock.
        speculation: decides on drafts; None if speculative decoding is disabled.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Clock, speculation: SpeculationGate | None = None
    ) -> None:
        self.config = config
        self._clock = clock
        self.state = state = SchedulerState.create(config, clock)
        """Requests and the resources they hold; only the scheduler's components change it."""
        self.lifecycle = Lifecycle(state)
        """Moves requests between queue and running set."""
        self.forecast = state.forecast
        """Forecast of step times; also used by the engine loop."""
        host, size = state.cache.host, config.page_size
        self._host_loads: HostLoadPolicy | None = None
        """Policy for pages in host memory; None if there is no such tier."""
        if host is not None:
            self._host_loads = HostLoadPolicy(
                *(config.host_cache_policy, size, host, state.forecast, config.page_groups)
            )
        self.admission = Admission(state, self.lifecycle, self._host_loads)
        """Admits waiting requests."""
        self.steps: TokenSteps | BlockSteps
        """Builds steps of an autoregressive or of a block-diffusion model."""
        if config.blocks is None:
            self.steps = TokenSteps(state, self.lifecycle, self.admission, speculation)
        else:
            assert speculation is None, "block diffusion with drafts is rejected at loading"
            kind = CanvasSteps if config.blocks.has_canvases else BlockSteps
            self.steps = kind(state, self.lifecycle, self.admission)
        limits = QueueLimits(config.max_queued_requests, config.max_queued_tokens)
        self._shedder = LoadShedder(limits, state.queue, state.cache, state.drain)
        self._in_flight: deque[StepInFlight] = deque()
        self.launched: StepInFlight
        """The last launched step."""
        self._digest = SampleDigest() if config.num_ranks > 1 else None
        """Digest of the sampled tokens; None if there is a single rank."""
        self._num_arrivals = 0
        self._has_uncharged = False
        """Whether tokens were generated since tenants were last charged on an arrival."""
        self._num_reports = 0
        self._num_launched = 0
        self._completed = 0

    def add(self, submit: Submit) -> bool:
        """Queues a request that the frontend has validated.

        A higher attempt of a known request replaces it without a report, since its gateway ignores
        the older attempt; the same or a lower attempt is ignored.

        Returns:
            False if the submit is ignored; otherwise True, even if the request is rejected because
            the queue is full.
        """
        self.state.stats.load.num_submits_seen += 1
        present = self.state.requests.get(submit.request_id)
        if present is not None:
            if submit.attempt <= present.attempt:
                logger.warning(
                    "ignoring submit of attempt %d: attempt %d is already queued or running",
                    submit.attempt,
                    present.attempt,
                    extra={"request_id": submit.request_id},
                )
                return False
            self.lifecycle.end_request(present, RequestState.FINISHED_ABORTED)
        assert submit.adapter is None or self.state.adapters is not None, "LoRA is disabled"
        self._num_arrivals += 1
        now = self._clock()
        if not self.state.queue.num_requests:
            self.state.drain.end_backlog()
        request = Request(
            submit,
            arrival=self._num_arrivals,
            arrived_s=now - submit.waited_ms / 1e3,
            max_total_tokens=self.config.max_total_tokens,
            eos_token_ids=self.config.eos_token_ids,
            block_size=1 if self.config.blocks is None else self.config.blocks.size,
            has_canvases=self.config.blocks is not None and self.config.blocks.has_canvases,
        )
        num_least = len(request.token_ids) + (not request.is_pooled)
        assert num_least <= self.config.max_total_tokens, "too long: not rejected"
        self.state.requests[request.request_id] = request
        if request.tenant and self._has_uncharged:
            # The counter of a new tenant is raised to the service that the others have received by
            # now.
            self._has_uncharged = False
            self.state.tenants.charge_output(self.state.running)
        if submit.is_guided:
            self.state.held[request.request_id] = request
        elif request.is_resubmitted:
            self._enqueue(request, now, resumed=True)  # another worker has accepted it before
        elif not self._shed(request):
            self._enqueue(request, now, resumed=False)
        else:
            return True
        if len(request.token_ids) >= request.limit:
            # An earlier attempt generated all tokens, but its last delta was lost.
            self.lifecycle.end_request(request, RequestState.FINISHED_LENGTH)
            self.state.outputs.put(request)
        return True

    def provide(
        self, request_id: str, attempt: int, grammar: GrammarStatus | GrammarProblem
    ) -> bool:
        """Queues a request that was held for its grammar; ends the request if the grammar is
        complete or has a problem.

        Returns:
            Whether the request was held; False if it has ended or already has its grammar.
        """
        request = self.state.held.get(request_id)
        if request is None or attempt != request.attempt:
            return False
        if isinstance(grammar, GrammarProblem):
            request.give_up(grammar)
            self.lifecycle.end_request(request, RequestState.FINISHED_ERROR)
            self.state.outputs.put(request)
        elif grammar.is_complete:
            request.grammar = grammar
            self.lifecycle.end_request(request, RequestState.FINISHED_STOPPED)
            self.state.outputs.put(request)
        else:
            del self.state.held[request_id]
            request.grammar = None if grammar.is_free else grammar
            self._enqueue(request, self._clock(), resumed=_is_resumed(request))
        return True

    def abort(self, request_id: str, attempt: int) -> None:
        """Aborts a request in any state; unknown ids and older attempts are ignored."""
        request = self.state.requests.get(request_id)
        if request is None or attempt < request.attempt:
            return
        self.lifecycle.end_request(request, RequestState.FINISHED_ABORTED)
        self.state.outputs.put(request)

    def set_admission(self, change: AdmissionChange) -> None:
        """Changes the admission options."""
        self.admission.options = change.applied_to(self.admission.options)

    def has_work(self) -> bool:
        """Whether requests can progress, steps are in flight, or a report is due."""
        return bool(
            len(self.state.requests) > len(self.state.held)
            or self._in_flight
            or self.state.outputs.deltas
            or self.state.cache.events
            or (self.state.adapters is not None and self.state.adapters.num_waiting)
        )

    def schedule(self) -> Plan | None:
        """Returns the Plan of the next step; None if there is nothing to do before the
        next result."""
        state, now = self.state, self._clock()
        seq = self._num_launched + 1
        builder = StepBuilder(seq)
        if state.queue.alarms:
            state.queue.tick(now)
        if state.adapters is not None:
            self._open_gate(state.adapters, now)
        self.steps.build(builder, now, self._in_flight)
        if state.queue.num_requests and not (builder.num_tokens or state.running):
            # The only running request was preempted; it is readmitted with its cached pages.
            self.steps.build(builder, now, self._in_flight)
        while not (builder.num_tokens or self._in_flight) and state.cache.await_loads():
            # Nothing else can run.
            self.steps.build(builder, now, self._in_flight)
        is_waiting = state.queue.num_requests > 0
        if is_waiting or state.drain.is_due:
            state.drain.tick(now, is_waiting=is_waiting)
        if not builder.num_tokens:
            assert self._in_flight or len(state.requests) == len(state.held), (
                "requests are waiting, but none can run"
            )
            if self._in_flight or state.adapters is None or not state.adapters.is_reading:
                return None  # otherwise, a Plan without rows whose result reports adapter reads
        self._num_launched = seq
        if state.cache.host is not None:
            builder.copy_pages(state.cache)
        if state.cache.keeps_states:
            builder.copy_states(state.cache)
        if state.adapters is not None:
            builder.copy_adapters(state.adapters.pool)
        digest_seq = digest = 0
        if self._digest is not None and not seq % DIGEST_INTERVAL:
            digest_seq, digest = self._completed, self._digest.value(self._completed)
        plan, self.launched = builder.finish(digest_seq, digest)
        self._in_flight.append(self.launched)
        if self._host_loads is not None:
            self._host_loads.launched(seq, self.launched.num_loads)
        return plan

    def sampled_under_grammar(self, result: StepResult) -> list[SampledTokens]:
        """Tokens that the oldest step in flight sampled under a grammar, in row order.

        Read-only: the engine advances the grammars by these tokens before `apply`.
        """
        step = self._in_flight[0] if self._in_flight else None
        if step is None or not step.masked or step.seq != result.seq:
            return []
        found: list[SampledTokens] = []
        next_token = 0
        for planned, count in zip(step.rows, self.steps.counts(step, result), strict=True):
            first_token, next_token = next_token, next_token + count
            request = planned.request
            if not count or request.grammar is None or planned.is_stale:
                continue
            tokens, ends = tokens_up_to_end(request, result.token_ids[first_token:next_token])
            found.append(
                SampledTokens(
                    request.request_id,
                    request.attempt,
                    tokens,
                    ends,
                    are_proposals=isinstance(planned.row, BlockRow),
                )
            )
        return found

    def apply(self, result: StepResult, advances: Sequence[GrammarAdvance] = ()) -> None:
        """Applies the result of the oldest step in flight.

        Args:
            result: the result of that step.
            advances: outcomes of the grammars, one for each item of `sampled_under_grammar`.

        Raises:
            ValueError: the result belongs to another step, or has the wrong number of tokens.
        """
        step = self._in_flight.popleft() if self._in_flight else None
        if step is None or step.seq != result.seq:
            expected = "none" if step is None else f"step {step.seq}"
            raise ValueError(f"got the result of step {result.seq}, expected {expected}")
        counts = self.steps.counts(step, result)
        self._completed = step.seq
        self.state.cache.complete(step.seq, result.loading)
        if self.state.adapters is not None:
            self._take_adapters(self.state.adapters, result)
        if self._digest is not None:
            self._digest.update(step.seq, result.token_ids)
        load = self.state.stats.load
        if result.num_forwards and step.num_tokens:  # otherwise it had nothing to compute
            load.step_shape, load.step_ms = step.shape, result.compute_ms
            if result.drafted is not None or result.blocks is not None:
                load.step_shape, load.step_ms = step.measured(result)
            load.num_step_tokens = step.num_tokens
            if load.step_shape.prefill_tokens:
                load.prefill_steps = load.prefill_steps.with_step(load.step_shape, load.step_ms)
        self.forecast.observe(load.step_shape, load.step_ms / 1e3)
        if self._host_loads is not None:
            self._host_loads.completed(step.seq, result.loading, result.load_ms / 1e3)
        self.steps.take(step, result, counts, iter(advances))
        self._has_uncharged = True

    def masked_rows(self) -> list[tuple[str, int] | None]:
        """Requests of the masked rows of the only step in flight, by id and attempt.

        An entry is None if the request has since ended, been preempted or switched to free text.
        """
        assert len(self._in_flight) == 1, "masks depend on the results of all earlier steps"
        return self._in_flight[0].masked_rows()

    def take_unguided(self) -> list[tuple[str, int]]:
        """Requests under a grammar that have ended or switched to free text since the last call, by
        id and attempt."""
        return self.lifecycle.take_unguided()

    def take_report(self) -> StepReport:
        """Returns a report of everything since the last report, with the current load."""
        self._num_reports += 1
        outputs, cache = self.state.outputs, self.state.cache
        deltas, outputs.deltas = outputs.deltas, {}
        return StepReport(
            seq=self._num_reports,
            deltas=deltas,
            block_events=cache.take_events() if cache.events else [],
            load=self._load(),
        )

    def check_invariants(self) -> None:
        """Asserts that requests, queue, running set and cache are consistent."""
        state = self.state
        leases = [request.lease for request in state.running if request.lease is not None]
        assert len(leases) == len(state.running), "a running request without a lease"
        num_queued = state.queue.num_requests + len(state.held)
        assert len(state.running) + num_queued == len(state.requests), "a request is lost"
        assert len(leases) <= self.config.max_num_seqs, "more running requests than slots"
        for request in state.requests.values():
            request.check_invariants(self.config.page_size)
        waiting = [
            request
            for request in state.requests.values()
            if request.state is not RequestState.RUNNING and request.request_id not in state.held
        ]
        assert state.queue.num_tokens == sum(len(r.token_ids) for r in waiting), "queue miscounted"
        assert len(waiting) == state.queue.num_requests, "a request is queued and running"
        state.cache.check_invariants(leases)
        if state.adapters is not None:
            state.adapters.check_invariants()

    def _load(self) -> LoadSnapshot:
        """Current load. Takes one pass over the running set."""
        state, gate, new_prompt_share = self.state, self.steps.speculation, 0.0
        queue, cache, counted = state.queue, state.cache, state.stats.load
        num_gated = 0 if state.adapters is None else state.adapters.num_tokens
        if self.config.enable_chunked_prefill:
            new_prompt_share = 1.0 - self.admission.options.max_prefill_share
        to_prefill = attended = 0
        for request in state.running:
            left = request.num_prefill - request.num_computed
            if left > 0:
                to_prefill += left
                attended += left * (request.num_computed + request.num_prefill) // 2
        return replace(
            counted,
            num_running=len(state.running),
            num_waiting=queue.num_requests + len(state.held),
            num_free_pages=cache.num_allocatable,
            num_total_pages=cache.num_blocks,
            queued_prefill_tokens=queue.num_tokens + to_prefill + num_gated,
            max_num_seqs=self.config.max_num_seqs,
            speculation=None if gate is None else gate.totals,
            queued_cached_tokens=queue.num_expected_cached,
            num_queued_tokens=queue.num_tokens,
            least_queued_priority=queue.lowest_level if queue.num_requests else -1,
            retry_after_s=self._shedder.retry_after_s() if queue.num_requests else 0,
            blocks=None if counted.blocks is None else replace(counted.blocks),
            prefilling_attended=attended,
            new_prompt_share=new_prompt_share,
            host_cache=None if cache.host is None else cache.host.totals,
            adapters=None if state.adapters is None else state.adapters.load(),
        )

    def _enqueue(self, request: Request, now: float, *, resumed: bool) -> None:
        """Queues a request, or holds it until its adapter is on the device. If `resumed`, it is
        queued ahead of requests that have never run."""
        state = self.state
        if state.adapters is not None and not state.adapters.enter(request):
            state.held[request.request_id] = request
        elif resumed:
            state.queue.push_back(request, now)
        else:
            state.queue.push(request, now)

    def _open_gate(self, adapters: AdapterGate, now: float) -> None:
        """Queues the requests whose adapters have been given slots."""
        for request in adapters.open(now):
            del self.state.held[request.request_id]
            if _is_resumed(request):
                self.state.queue.push_back(request, now)
            else:
                self.state.queue.push(request, now)

    def _take_adapters(self, adapters: AdapterGate, result: StepResult) -> None:
        """Records the adapter reads that have ended. If a read failed, the adapter's
        requests fail."""
        adapters.pool.complete(result.seq)
        for read in result.adapters_read:
            if read.error:
                requests = self.state.requests.values()
                for request in [r for r in requests if r.adapter and r.adapter.key == read.key]:
                    request.give_up_adapter(read.error)
                    self.lifecycle.end_request(request, RequestState.FINISHED_ERROR)
                    self.state.outputs.put(request)
            adapters.pool.read_ended(read)

    def _shed(self, arrival: Request) -> bool:
        """Rejects a request if the queue is full; returns whether the rejected request is the
        arriving one."""
        loser = self._shedder.loser(arrival)
        if loser is None:
            return False
        loser.rejection = self._shedder.rejection(loser)
        loser.error = loser.rejection.message
        if loser is arrival:
            arrival.move_to(RequestState.FINISHED_ERROR)
            del self.state.requests[arrival.request_id]
        else:
            self.lifecycle.end_request(loser, RequestState.FINISHED_ERROR)
        self.state.outputs.put(loser)
        return loser is arrival


def _is_resumed(request: Request) -> bool:
    """Whether a request that was held is queued ahead of requests that have never run."""
    return request.state is RequestState.PREEMPTED or request.is_resubmitted
