"""Steps of block-diffusion models, which decode the running block of each row in rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker.core.cache.lease import Lease
from worker.core.grammar.state import GrammarAdvance
from worker.core.request import Request
from worker.core.scheduler.admission import Admission, Admitted
from worker.core.scheduler.block_ahead import rows_ahead
from worker.core.scheduler.block_policy import MAX_ROUNDS, MAX_ROUNDS_AHEAD, BlockBudget
from worker.core.scheduler.finish import take_tokens
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.page_claims import PageClaims
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.core.scheduler.state import SchedulerState
from worker.core.scheduler.step import InFlightRow, StepBuilder, StepInFlight
from worker.plan.plan import Accept, BlockOutcome, BlockRow, StepResult
from worker.protocol.diffusion import BlockTotals
from worker.protocol.messages import TokenLogprobs

_Member = tuple[Request, int]
"""A running request and its pending positions."""


class BlockSteps:
    """Builds block-diffusion steps and applies their results.

        0 ────────────── num_computed ─────────────── known ──────── end of the running block
        │ in KV cache    │ prompt, or a block with    │ undecoded
        │                │ its last pass outstanding  │

    Blocks begin at multiples of the block size, so a prompt's tail shares its block with the first
    generated tokens. A running block is recomputed in place in every round; everything before it is
    computed once. A preempted request keeps the (opaque) state of its running block and resumes
    with it. Only finished blocks enter the prefix cache.

    With a grammar, a block is decoded from left to right. A round proposes the token of the
    leftmost undecoded position, sampled with the grammar's mask, and confident tokens after it.
    Those that the grammar accepts are listed in the next Plan and are treated like a prompt's tail
    from then on.

    Args:
        state: the scheduler's state.
        lifecycle: ends and holds requests.
        admission: admits new requests.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle, admission: Admission) -> None:
        assert state.config.blocks is not None, "the model is autoregressive"
        self.speculation: SpeculationGate | None = None
        """Always None: only autoregressive models use drafts."""
        self._state = state
        self._policy = state.config.blocks
        self._lifecycle = lifecycle
        self._admission = admission
        self._claims = PageClaims(state, lifecycle)
        self._totals = state.stats.load.blocks = BlockTotals()
        self._accepted: list[tuple[Request, Lease]] = []
        """Requests with grammar-accepted tokens that have not been sent to the ranks yet."""

    def build(
        self, builder: StepBuilder, now: float, in_flight: Sequence[StepInFlight] = ()
    ) -> None:
        """Adds rows to a step: running blocks and prompts, together or in separate steps.

        While a step is in flight, the next one is planned ahead only if its rows do not depend on
        the outcome (`rows_ahead`). No request is admitted or preempted before the result is
        available.

        Args:
            builder: receives rows of running and newly admitted requests.
            now: time on the scheduler's clock, in seconds.
            in_flight: steps that have no results yet, oldest first.
        """
        if in_flight:
            self._build_ahead(builder, in_flight[-1])
        else:
            self._build(builder, now)
        if builder.num_tokens:
            builder.accepts = [
                Accept(lease.slot, len(request.token_ids))
                for request, lease in self._accepted
                if request.lease is lease
            ]
            self._accepted.clear()

    def counts(self, step: StepInFlight, result: StepResult) -> list[int]:
        """Number of the result's tokens for each row. Raises ValueError if they do not add up."""
        is_block = [isinstance(planned.row, BlockRow) for planned in step.rows]
        num_blocks = sum(is_block)
        outcomes = result.blocks or []
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        if (num_blocks, num_tokens) != (len(outcomes), len(result.token_ids)):
            raise ValueError(
                f"step {result.seq} has {num_blocks} running blocks; got {len(outcomes)} outcomes "
                f"and {len(result.token_ids)} tokens, {num_tokens} expected"
            )
        ordered = iter(outcomes)
        return [next(ordered).num_tokens if has_block else 0 for has_block in is_block]

    def take(
        self,
        step: StepInFlight,
        result: StepResult,
        counts: Sequence[int],
        advances: Iterator[GrammarAdvance],
    ) -> None:
        """Updates requests with the results of a step, and ends those that are finished.

        Args:
            step: the oldest step in flight.
            result: result of the step.
            counts: number of the result's tokens for each row.
            advances: grammar outcomes, one for each block with a grammar and new tokens.
        """
        self._totals.num_forwards += result.num_forwards
        outcomes, next_token = iter(result.blocks or ()), 0
        logprobs = result.logprobs or [None] * len(result.token_ids)
        interrupted: list[Request] = []
        for planned, count in zip(step.rows, counts, strict=True):
            request = planned.request
            if not isinstance(planned.row, BlockRow):
                if not planned.is_stale:
                    request.blocks.num_forwards += 1
                    self._commit_pages(planned, planned.row.start + planned.row.length)
                continue
            outcome = next(outcomes)
            tokens = slice(next_token, next_token + count)
            token_ids = result.token_ids[tokens]
            next_token += count
            self._totals.num_rounds += outcome.num_rounds
            self._totals.num_passes += outcome.num_forwards
            if planned.is_stale:
                self._state.stats.num_dropped_tokens += len(token_ids)
                continue
            self._take_block(planned, planned.row, outcome, token_ids, logprobs[tokens], advances)
            if not token_ids and not self._policy.inplace:
                interrupted.append(request)
        self._state.running.drop_finished()
        for request in interrupted:
            self._lifecycle.requeue(request)  # its block is unfinished: resume it via the queue

    def _build(self, builder: StepBuilder, now: float) -> None:
        policy, state = self._policy, self._state
        members = [(request, request.num_pending) for request in state.running]
        budget = BlockBudget(
            state.config.max_num_batched_tokens, policy, [pending for _, pending in members]
        )
        first = members
        if not policy.mixed_rounds:
            first = [member for member in members if self._is_prompt(member[0])]
        lengths = [budget.grant(pending) for _, pending in first]
        admitted: list[Admitted] = []
        if state.queue.num_requests:
            admitted = self._admission.round(
                budget.headroom(self._admission.max_requests),
                now,
                is_shared=any(pending > 2 * policy.size for _, pending in members),
            )
        if any(state.cache.is_loading(new.lease) for new in admitted):
            state.cache.load_now(builder.seq)
        self._add_rows(first, lengths, builder)
        new_lengths = budget.grant_new([new.cost for new in admitted])
        for new, length in zip(admitted, new_lengths, strict=True):
            self._admission.launch(new, length, builder)
        if not policy.mixed_rounds and not builder.has_rows_without_samples:
            rest = [member for member in members if not builder.has_row_of(member[0])]
            self._add_rows(rest, [budget.grant(pending) for _, pending in rest], builder)
        self._lifecycle.deferred.clear()
        # While every request of the step is in a running block, nothing needs to be scheduled.
        if policy.inplace and not builder.has_rows_without_samples and not self._any_watched():
            builder.max_rounds = MAX_ROUNDS

    def _build_ahead(self, builder: StepBuilder, step: StepInFlight) -> None:
        state = self._state
        if state.queue.num_requests:
            return  # a waiting request is to get the first slot that becomes free
        for row in rows_ahead(step, state.running, state.cache, state.config):
            lease = row.lease
            if row.num_missing:
                first = len(lease.pages)
                state.cache.allocate(lease, row.num_missing)
                builder.write_pages(lease.slot, state.cache.page_rows(lease, first))
            builder.add_window(row.request, lease, row.start, row.end)
        if not self._any_watched():
            builder.max_rounds = MAX_ROUNDS_AHEAD

    def _add_rows(
        self, members: Sequence[_Member], lengths: Sequence[int], builder: StepBuilder
    ) -> None:
        for (request, _), length in zip(members, lengths, strict=True):
            lease = request.lease
            if lease is not None and request.request_id not in self._lifecycle.deferred:
                self._claims.add_row(request, lease, length, builder)

    def _any_watched(self) -> bool:
        """Whether any running request streams its block after every round (`stream_drafts`)."""
        params = [request.sampling.diffusion for request in self._state.running]
        return any(p is not None and p.stream_drafts for p in params)

    def _is_prompt(self, request: Request) -> bool:
        """Whether full blocks of the tokens known at admission have yet to be computed."""
        size = self._policy.size
        return request.num_computed < request.num_prefill // size * size

    def _take_block(
        self,
        planned: InFlightRow,
        row: BlockRow,
        outcome: BlockOutcome,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None],
        advances: Iterator[GrammarAdvance],
    ) -> None:
        request = planned.request
        guided = next(advances) if request.grammar is not None and token_ids else None
        request.blocks.num_rounds += outcome.num_rounds
        request.blocks.num_forwards += outcome.num_forwards
        request.blocks.state = outcome.state
        end = row.start + row.length
        if row.is_window:
            assert outcome.num_forwards, "a rank considers a continuing request ended"
            end = request.num_to_compute  # as of the previous step
        computed = end if outcome.is_committed else end - self._policy.size
        request.num_computed = computed
        if token_ids and request.times.first_token_s < 0.0:
            request.times.first_token_s = self._state.clock()
        num_known = len(request.token_ids)
        ended = take_tokens(request, token_ids, guided)
        num_taken = len(request.token_ids) - num_known
        self._totals.num_tokens += num_taken
        request.delivery.logprobs += [one for one in logprobs[:num_taken] if one is not None]
        self._commit_pages(planned, computed)
        if ended is not None:
            self._lifecycle.finish(request, ended)
            return
        if token_ids or outcome.draft is not None:
            self._state.outputs.put(request, draft=outcome.draft)
        if request.grammar is not None:
            self._accepted.append((request, planned.lease))
            if guided is not None and guided.is_pending:
                self._lifecycle.hold(request)

    def _commit_pages(self, planned: InFlightRow, num_computed: int) -> None:
        """Commits full pages of finished blocks to the prefix cache.

        HAZARD: if a request ended within a block, that block was computed with the tokens after the
        end. Neither such a block nor a running block must enter the prefix cache.
        """
        known = len(planned.request.token_ids) // self._policy.size * self._policy.size
        self._state.cache.commit(planned.lease, planned.request.token_ids, min(num_computed, known))
