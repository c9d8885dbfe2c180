"""Steps of autoregressive models: each running request samples its next token, or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from worker.core.grammar.state import GrammarAdvance
from worker.core.request import Request, RequestState
from worker.core.scheduler.admission import Admission, Admitted
from worker.core.scheduler.budget import StepBudget
from worker.core.scheduler.deferral import DecodeDeferral, Deferrable
from worker.core.scheduler.finish import take_tokens
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.page_claims import PageClaims
from worker.core.scheduler.prefill_limit import prefill_limit_s
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.core.scheduler.state import SchedulerState
from worker.core.scheduler.step import InFlightRow, StepBuilder, StepInFlight
from worker.plan.plan import DraftRow, StepResult

_LEAST_PART = 16
"""Inverse of the minimum fraction of the step's token budget that is available to prompts,
regardless of the decodes' targets. A prompt thus takes at most 16 times as many steps as with the
whole budget."""


class Member(NamedTuple):
    """A running request and its number of pending tokens: 1 for a decode, more for a running
    prefill."""

    request: Request
    num_pending: int


class TokenSteps:
    """Builds steps: decodes first, then running prefills and new requests. Applies their results.

        running      decodes have one pending token, running prefills have more
        may enter    the request that has waited longest, if there is a free slot or a victim
        budget       tokens for prompts: those left by decodes, limited by the decodes' targets
        admission    waiting requests enter while there are slots, pages and tokens
        lengths      tokens of each prompt, running or new; some decodes may be deferred
        rows         running requests claim pages in order, then new requests get theirs;
                     drafts use the tokens that are left

    A prompt that another one outranks by the preemption gap is skipped, since it would only make
    the step longer for the more urgent one. Decodes are also skipped, for a limited number of
    consecutive steps, if they would take a large part of each step's tokens or time
    (`DecodeDeferral`).

    Requests whose cached pages are being loaded from host memory are admitted, but have no rows
    until the loads have completed, so that other requests do not wait for them.

    Args:
        state: the scheduler's state.
        lifecycle: ends and holds requests.
        admission: admits new requests.
        speculation: decides on drafts; None if speculative decoding is disabled.
    """

    def __init__(
        self,
        state: SchedulerState,
        lifecycle: Lifecycle,
        admission: Admission,
        speculation: SpeculationGate | None,
    ) -> None:
        self.speculation = speculation
        self._state = state
        self._config = state.config
        self._has_windows = state.cache.has_windows
        self._lifecycle = lifecycle
        self._admission = admission
        self._claims = PageClaims(state, lifecycle)
        self._deferral = DecodeDeferral(state, admission)

    def build(
        self, builder: StepBuilder, now: float, in_flight: Sequence[StepInFlight] = ()
    ) -> None:
        """Adds rows to a step, sharing its tokens between running and waiting requests.

        Args:
            builder: receives rows of running requests and of those that are admitted.
            now: time on the scheduler's clock, in seconds.
            in_flight: steps in flight, oldest first; unused here.
        """
        # Running: decodes, drafts, prompts. This is a copy, since admission adds and preempts
        # members.
        state = self._state
        members = [Member(request, request.num_pending) for request in self._computable()]
        num_decodes = sum([member.num_pending == 1 for member in members])
        prompts = [member for member in members if member.num_pending > 1]
        if (gate := self.speculation) is not None:
            costs = state.forecast.costs if state.forecast.is_ready else None
            builder.draft_threshold = gate.begin_step(len(members), num_decodes, now, costs)

        # May enter: if no request may and there are no prompts, the step only has decodes.
        entrant = state.queue.oldest() if state.queue.num_requests else None
        if entrant is not None and not self._admission.can_admit(entrant.level):
            entrant = None
        if entrant is None and not prompts:
            self._add_decodes(members, num_decodes, builder)
            return

        # Budget: without the decodes that may be deferred.
        room = self._budget(0, self._admission.options.prefill_max_tokens).max_prompts
        deferrable = self._deferral.candidates(members, prompts, entrant, room)
        limit_s = self._prefill_limit_s(members, deferrable.requests)
        most = self._max_prompt_tokens(limit_s, prompts, entrant)
        budget = self._budget(num_decodes - len(deferrable.requests), most)

        # Admission: new requests may preempt or outrank running prefills. Those whose pages are
        # being loaded have no rows yet.
        admitted = [] if entrant is None else self._admit(entrant, prompts, budget, now)
        loading: list[Admitted] = []
        if self._admission.waits_for_loads(admitted, builder):
            loading = [new for new in admitted if state.cache.is_loading(new.lease)]
            admitted = [new for new in admitted if new not in loading]
        prompts = self._prompts_of_step(prompts, admitted)
        self._share(members, prompts, admitted, deferrable, budget, builder)
        if loading:
            self._launch_loading(loading, budget, builder)

    def _share(
        self,
        members: Sequence[Member],
        prompts: Sequence[Member],
        admitted: Sequence[Admitted],
        deferrable: Deferrable,
        budget: StepBudget,
        builder: StepBuilder,
    ) -> None:
        """Shares the tokens of a step between decodes, running prefills and admitted requests, and
        adds their rows."""
        # Lengths: by priority rather than level, which a near deadline only raises for admission.
        lengths = budget.allot(
            [member.num_pending for member in prompts],
            [new.length for new in admitted],
            [new.cost for new in admitted],
            [*[m.request.priority for m in prompts], *[new.request.priority for new in admitted]],
        )
        chunks = {m.request.request_id: length for m, length in zip(prompts, lengths, strict=False)}
        entering = list(zip(admitted, lengths[len(prompts) :], strict=True))
        deferred = self._deferral.decide(deferrable, sum(lengths), budget.max_prompts)
        budget.add_decodes(len(deferrable.requests) - len(deferred))

        # Rows: pages of new requests are reserved while running ones claim theirs.
        self._claims.num_promised = sum(self._admission.num_pages(*new) for new in entering)
        left_out = [member for member in members if member.request.request_id in deferred]
        members = [member for member in members if member.request.request_id not in deferred]
        missing = self._add_rows(members, chunks, budget, builder)
        for new, length in entering:
            self._admission.launch(new, length, builder)
        if self._deferral.withdraws(deferrable, sum(lengths) - missing, budget.max_prompts):
            self._claims.num_promised = 0  # launched
            budget.give_back(missing)
            budget.add_decodes(len(left_out))
            self._add_rows(left_out, {}, budget, builder)

    def _launch_loading(
        self, loading: Sequence[Admitted], budget: StepBudget, builder: StepBuilder
    ) -> None:
        """Launches admitted requests whose pages are being loaded. They only get rows if the step
        has no other rows; the step then waits for the loads."""
        lengths = [0] * len(loading)
        if not builder.num_tokens:
            self._state.cache.load_now(builder.seq)
            lengths = budget.allot(
                [], [new.length for new in loading], [new.cost for new in loading]
            )
        for new, length in zip(loading, lengths, strict=True):
            self._admission.launch(new, length, builder)

    @staticmethod
    def counts(step: StepInFlight, result: StepResult) -> list[int]:
        """Number of the result's tokens for each row.

        Raises:
            ValueError: the result has the wrong number of tokens.
        """
        if result.num_sampled is None:
            counts = [planned.row.num_samples for planned in step.rows]
        else:
            num_sampled = iter(result.num_sampled)
            counts = [
                next(num_sampled) if isinstance(planned.row, DraftRow) else planned.row.num_samples
                for planned in step.rows
            ]
        if sum(counts) != len(result.token_ids):
            raise ValueError(
                f"step {step.seq}: expected {sum(counts)} tokens, got {len(result.token_ids)}"
            )
        return counts

    def take(
        self,
        step: StepInFlight,
        result: StepResult,
        counts: Sequence[int],
        advances: Iterator[GrammarAdvance],
    ) -> None:
        """Appends a step's sampled tokens to its requests, and finishes those that end.

        Args:
            step: the oldest step in flight.
            result: result of the step.
            counts: number of the result's tokens for each row.
            advances: outcomes of the grammars, one for each row with tokens under a grammar.
        """
        if result.logprobs is not None or result.prompt_logprobs is not None:
            _take_logprobs(step, result, counts)
        if result.pooled is not None:
            _take_pooled(step, result.pooled)
        if self.speculation is not None:
            self.speculation.observe(step, result, counts, self._state.stats.load.step_shape)
        any_finished = False
        next_token = 0
        for planned, count in zip(step.rows, counts, strict=True):
            first_token, next_token = next_token, next_token + count
            if planned.request.lease is not planned.lease:  # stale, inlined for speed
                self._state.stats.num_dropped_tokens += count
                continue
            any_finished |= self._take_row(
                planned, step.seq, result.token_ids[first_token:next_token], advances
            )
        if any_finished:
            self._state.running.drop_finished()

    def _take_row(
        self,
        planned: InFlightRow,
        seq: int,
        token_ids: list[int],
        advances: Iterator[GrammarAdvance],
    ) -> bool:
        """Appends the step's tokens to a request; returns whether they end it."""
        row, request, lease = planned
        count = len(token_ids)
        if self._state.cache.keeps_states:
            self._end_snapshots(planned, seq, count)
        if isinstance(row, DraftRow):
            request.num_placeholders -= 1
            request.num_unverified -= row.num_drafts
            request.num_computed += count - 1
        else:
            request.num_placeholders -= count
        if count and request.times.first_token_s < 0.0:
            request.times.first_token_s = self._state.clock()
        guided = next(advances) if count and request.grammar is not None else None
        num_known = len(request.token_ids)
        ended = take_tokens(request, token_ids, guided)
        if num_known + count > len(request.token_ids):
            self._drop(request, num_known + count - len(request.token_ids))
        # A speculative row has computed all known tokens except the newest.
        end = len(request.token_ids) - 1
        if not isinstance(row, DraftRow):
            end = row.start + row.length
        if end >= (lease.num_cached_pages + 1) * self._config.page_size or lease.snapshots:
            self._state.cache.commit(lease, request.token_ids, end)
        if self._has_windows:
            self._state.cache.advance(lease, end)
        if request.delivery.pooled is not None:
            request.times.first_token_s = self._state.clock()
            ended = RequestState.FINISHED_STOPPED
        if ended is not None:
            self._lifecycle.finish(request, ended)
            return True
        if count or request.delivery.prompt_logprobs:
            self._state.outputs.put(request)
            if guided is not None and guided.is_pending:
                self._lifecycle.hold(request)
            elif guided is not None and guided.status.is_free:
                request.grammar = None
                self._lifecycle.note_unguided(request)
        return False

    def _end_snapshots(self, planned: InFlightRow, seq: int, count: int) -> None:
        """Ends the snapshots of a row of step `seq`, which has sampled `count` tokens.

        A draft row leaves the state at the row's first position. This is the position of the newest
        token or, if the device chose it, a position from which all tokens of the row fit in its
        range.
        """
        row, request, lease = planned
        end = row.start + row.length
        if not isinstance(row, DraftRow):
            self._state.cache.end_snapshots(lease, seq, end, end)
            return
        newest = len(request.token_ids) - 1
        first = min(newest, end - 1 - min(row.num_drafts, row.length - 1))
        self._state.cache.end_snapshots(lease, seq, first if count else 0, newest)

    def _drop(self, request: Request, count: int) -> None:
        """Drops tokens that were sampled after one that ends or holds a request, and their
        log-probabilities."""
        self._state.stats.num_dropped_tokens += count
        if request.delivery.logprobs:
            del request.delivery.logprobs[-count:]

    def _computable(self) -> Sequence[Request]:
        """Running requests, except those whose pages are being loaded."""
        cache, running = self._state.cache, self._state.running
        if not cache.has_loads:
            return running
        return [r for r in running if r.lease is not None and not cache.is_loading(r.lease)]

    def _admit(
        self, oldest: Request, prompts: Sequence[Member], budget: StepBudget, now: float
    ) -> list[Admitted]:
        """Runs an admission round that takes the running prefills into account."""
        needs, above = self._needs(prompts, oldest.level, oldest.priority)
        return self._admission.round(
            budget.headroom(needs, self._admission.max_requests, above),
            now,
            running_level=max((request.level for request, _ in prompts), default=-1),
            is_shared=bool(needs or above),
        )

    def _needs(self, prompts: Sequence[Member], level: int, priority: int) -> tuple[list[int], int]:
        """Pending tokens of the running prefills that `level` does not outrank: a list for prefills
        of priority `priority`, and the total for prefills of higher priority. Without chunked
        prefill, the list is for all of these prefills, and the total is 0."""
        stay = [m for m in prompts if not self._deferral.is_outranked(m.request, level)]
        if not self._config.enable_chunked_prefill:
            return [pending for _, pending in stay], 0
        equals = [pending for request, pending in stay if request.priority == priority]
        return equals, sum(pending for r, pending in stay if r.priority > priority)

    def _prompts_of_step(
        self, prompts: Sequence[Member], admitted: Sequence[Admitted]
    ) -> list[Member]:
        """Running prefills that were not preempted and are not outranked by another prompt."""
        deferred = self._lifecycle.deferred
        left = [
            member
            for member in prompts
            if member.request.lease is not None and member.request.request_id not in deferred
        ]
        levels = [m.request.level for m in left] + [planned.request.level for planned in admitted]
        level = max(levels, default=-1)
        return [member for member in left if not self._deferral.is_outranked(member.request, level)]

    def _prefill_limit_s(
        self, members: Sequence[Member], deferrable: Mapping[str, Request]
    ) -> float:
        """Time that prefill may take in a step according to the targets of its decodes,
        in seconds."""
        forecast = self._state.forecast
        if not (forecast.is_ready and self._config.enable_chunked_prefill):
            return inf
        decodes = [request for request, pending in members if pending == 1]
        if deferrable:
            decodes = [r for r in decodes if r.request_id not in deferrable]
        default_s = self._admission.options.default_tpot_ms / 1e3
        return prefill_limit_s(decodes, forecast.costs, default_s)

    def _max_prompt_tokens(
        self, limit_s: float, prompts: Sequence[Member], oldest: Request | None
    ) -> int:
        """Maximum number of prompt tokens in a step if prefill may take `limit_s` seconds; 0 for no
        limit.

        Computed for the prompt with the longest prefix, whose attention takes longest. If any
        prompt requests log-probabilities, all tokens are assumed to need them.
        """
        max_tokens = self._admission.options.prefill_max_tokens
        if limit_s == inf:
            return max_tokens
        most = self._config.max_num_batched_tokens
        num_cached = max([request.num_computed for request, _ in prompts], default=0)
        scored = any(request.needs_prompt_logprobs for request, _ in prompts)
        if oldest is not None:
            num_cached = max(num_cached, oldest.num_to_compute - self._admission.cost(oldest))
            scored = scored or oldest.needs_prompt_logprobs
        tokens = self._state.forecast.prompt_tokens(limit_s, num_cached, scored=scored)
        if tokens >= (max_tokens or most):
            return max_tokens
        return max(int(tokens), most // _LEAST_PART, 1)

    def _budget(self, num_decodes: int, max_prompt_tokens: int) -> StepBudget:
        return StepBudget(
            self._config.max_num_batched_tokens,
            num_decodes,
            max_prefill_tokens=max_prompt_tokens,
            share=self._admission.options.max_prefill_share,
            chunked=self._config.enable_chunked_prefill,
        )

    def _add_decodes(
        self, members: Sequence[Member], num_decodes: int, builder: StepBuilder
    ) -> None:
        """Adds the rows of a step without prompts. Only drafts need a budget, since
        `max_num_batched_tokens` is at least `max_num_seqs`."""
        self._deferral.num_steps = self._claims.num_promised = 0
        if self.speculation is not None:
            budget = StepBudget(self._config.max_num_batched_tokens, num_decodes)
            self._add_rows(members, {}, budget, builder)
            return
        deferred, page_size = self._lifecycle.deferred, self._config.page_size
        for request, pending in members:
            lease = request.lease
            if pending != 1 or lease is None or request.request_id in deferred:
                continue
            if request.num_computed < len(lease.pages) * page_size:
                builder.add_row(request, lease, 1)
            else:
                self._claims.add_row(request, lease, 1, builder)
        deferred.clear()

    def _add_rows(
        self,
        members: Sequence[Member],
        chunks: Mapping[str, int],
        budget: StepBudget,
        builder: StepBuilder,
    ) -> int:
        """Adds the rows of requests that were running before this step.

        Args:
            members: running requests, in the order in which they may claim pages.
            chunks: number of tokens to compute for each prompt among them, by request id.
            budget: the step's budget, which has tokens for the decodes.
            builder: receives the rows.

        Returns:
            Number of tokens in `chunks` for which there are no pages.
        """
        missing = 0
        deferred, claims = self._lifecycle.deferred, self._claims
        drafts = self.speculation is not None and self.speculation.is_open
        for request, pending in members:
            lease = request.lease
            length = chunks.get(request.request_id, 0)
            if lease is None or request.request_id in deferred:
                missing += length
                continue
            if pending > 1:
                missing += length - claims.add_row(request, lease, length, builder)
            elif pending == 1 and budget.take_decode():
                num_drafts = self._num_drafts(request, budget) if drafts else 0
                if num_drafts or request.num_unverified:
                    claims.add_draft_row(request, lease, num_drafts, builder)
                else:
                    claims.add_row(request, lease, 1, builder)
        deferred.clear()
        return missing

    def _num_drafts(self, request: Request, budget: StepBudget) -> int:
        # Drafts follow a sampled token, not the last token of a prompt.
        if self.speculation is None or request.num_computed < request.num_prefill:
            return 0
        return budget.take_drafts(self.speculation.num_drafts(request))


def _take_pooled(step: StepInFlight, pooled: Mapping[int, bytes]) -> None:
    """Adds a result's vectors to its requests, which then end. Vectors of stale rows
    are dropped."""
    for index, vector in pooled.items():
        planned = step.rows[index]
        if not planned.is_stale:
            planned.request.delivery.pooled = vector


def _take_logprobs(step: StepInFlight, result: StepResult, counts: Sequence[int]) -> None:
    """Adds a result's log-probabilities to its requests; log-probabilities of stale rows are
    dropped.

    Args:
        step: the step as it was planned.
        result: result of the step.
        counts: number of the result's tokens for each row.
    """
    sampled = result.logprobs or ()
    prompts = result.prompt_logprobs or {}
    next_token = 0
    for index, (planned, count) in enumerate(zip(step.rows, counts, strict=True)):
        delivery = planned.request.delivery
        first_token, next_token = next_token, next_token + count
        if planned.is_stale:
            continue
        delivery.logprobs += [
            planned for planned in sampled[first_token:next_token] if planned is not None
        ]
        if delivery.prompt_logprobs is not None and index in prompts:
            # A preempted prefill recomputes its first chunks.
            new = prompts[index][delivery.num_prompt_scored - planned.row.start :]
            delivery.prompt_logprobs += new
            delivery.num_prompt_scored += len(new)
