"""The scheduler of block-diffusion models: a row's last block is decided round by round."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from worker.core.cache.lease import Lease
from worker.core.grammar.state import Followed
from worker.core.request import Request, RequestState
from worker.core.scheduler.block_filler import BlockFiller
from worker.core.scheduler.block_policy import BlockPolicy
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.finish import stop_reason, take_tokens
from worker.core.scheduler.scheduler import Clock, Scheduler
from worker.core.scheduler.step import InFlightRow, StepInFlight
from worker.plan.plan import Accept, BlockOutcome, BlockRow, Plan, StepResult
from worker.wire.diffusion import BlockTotals


class BlockScheduler(Scheduler):
    """Sees of a running block whether it is done, and nothing of how it gets there.

        0 ────────────── num_computed ─────────────── known ──────── end of the running block
        │ in KV cache    │ prompt, or a block whose   │ undecided, or
        │                │ last pass is still to come │ prompt's tail in front

    Blocks lie at multiples of the block size, so a prompt's tail shares its block with the first
    tokens. A running block is computed again in every round, in place; what is before it is
    computed once. A request that is taken back keeps the state of its running block, which no one
    here reads, and goes on with it. Only blocks that are done enter the prefix cache.

    Under a grammar a block is decided from left to right. A round proposes the token of the
    leftmost undecided position, drawn under the grammar's mask, and those after it that are sure
    enough; they count as far as the grammar goes along, and the next Plan tells the ranks how far
    that is. To everybody else they are like a prompt's tail, in front of what is undecided.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        assert config.blocks is not None, "an autoregressive model has another scheduler"
        super().__init__(config, clock)
        self._policy: BlockPolicy = config.blocks
        self._totals = self._tally.blocks = BlockTotals()
        self._accepted: list[tuple[Request, Lease]] = []
        """Under a grammar, with known tokens in their running blocks that ranks do not know."""

    def schedule(self) -> Plan | None:
        """See the base class.

        While a step is in flight, its outcome, which the next one follows from, is open: what
        comes is planned ahead as far as that can be (see `rows_ahead`), else not at all. So nobody
        is admitted or taken back before the result is in.
        """
        assert isinstance(self._filler, BlockFiller)
        self._filler.in_flight = self._in_flight[-1] if self._in_flight else None
        plan = super().schedule()
        if plan is None or not self._accepted:
            return plan
        accepts = [
            Accept(lease.slot, len(request.token_ids))
            for request, lease in self._accepted
            if request.lease is lease
        ]
        self._accepted.clear()
        return msgspec.structs.replace(plan, accepts=accepts)

    def _counts(self, step: StepInFlight, result: StepResult) -> list[int]:
        is_block = [isinstance(one.row, BlockRow) for one in step.rows]
        num_blocks = sum(is_block)
        outcomes = result.blocks or []
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        if (num_blocks, num_tokens) != (len(outcomes), len(result.token_ids)):
            raise ValueError(
                f"step {result.seq} has {num_blocks} running blocks; got {len(outcomes)} outcomes "
                f"and {len(result.token_ids)} tokens, {num_tokens} expected"
            )
        ordered = iter(outcomes)
        return [next(ordered).num_tokens if one else 0 for one in is_block]

    def _take_result(
        self,
        step: StepInFlight,
        result: StepResult,
        counts: list[int],
        followed: Iterator[Followed],
    ) -> None:
        self._totals.num_forwards += result.num_forwards
        outcomes, next_token = iter(result.blocks or ()), 0
        interrupted: list[Request] = []
        for one, count in zip(step.rows, counts, strict=True):
            request = one.request
            if not isinstance(one.row, BlockRow):
                if not one.is_stale:
                    request.num_forwards += 1
                    self._commit_pages(one, one.row.start + one.row.length)
                continue
            outcome = next(outcomes)
            token_ids = result.token_ids[next_token : next_token + count]
            next_token += count
            self._count(outcome)
            if one.is_stale:
                self._tally.num_dropped_tokens += len(token_ids)
                continue
            self._take_block(one, one.row, outcome, token_ids, followed)
            if not token_ids and not self._policy.inplace:
                interrupted.append(request)
        self._running.drop_finished()
        for request in interrupted:
            self._interrupt(request)

    def _count(self, outcome: BlockOutcome) -> None:
        self._totals.num_rounds += outcome.num_rounds
        self._totals.num_passes += outcome.num_forwards

    def _take_block(
        self,
        one: InFlightRow,
        row: BlockRow,
        outcome: BlockOutcome,
        token_ids: list[int],
        followed: Iterator[Followed],
    ) -> None:
        request = one.request
        guided = next(followed) if request.grammar is not None and token_ids else None
        request.num_rounds += outcome.num_rounds
        request.num_forwards += outcome.num_forwards
        request.block_state = outcome.state
        end = row.start + row.length
        if row.is_window:
            assert outcome.num_forwards, "a rank took a request for ended that goes on"
            end = request.num_wanted  # as the step before has left it
        computed = end if outcome.is_committed else end - self._policy.size
        request.num_computed = computed
        if token_ids and request.first_token_s < 0.0:
            request.first_token_s = self._clock()
        num_known = len(request.token_ids)
        state = take_tokens(request, token_ids, guided)
        self._totals.num_tokens += len(request.token_ids) - num_known
        self._commit_pages(one, computed)
        if state is not None:
            self._end(request, state, keep_place=True)
            stopped = state is RequestState.FINISHED_STOPPED
            self._outbox.put(
                request, stop_reason(request, self.config.eos_token_ids) if stopped else None
            )
        elif token_ids or outcome.draft is not None:
            self._outbox.put(request, draft=outcome.draft)
        if state is None and request.grammar is not None:
            self._accepted.append((request, one.lease))
            if guided is not None and guided.is_pending:
                self._hold(request)

    def _commit_pages(self, one: InFlightRow, num_computed: int) -> None:
        """HAZARD: a block that its request ended in the middle of was computed with what came
        after the end; it does not enter the prefix cache, nor does a running one."""
        known = len(one.request.token_ids) // self._policy.size * self._policy.size
        self._cache.commit(one.lease, one.request.token_ids, min(num_computed, known))

    def _interrupt(self, request: Request) -> None:
        """Gives back slot and pages of a block that is not done; it comes again by the queue."""
        self._filler.withdrawal.withdraw(request)
        self._queue.push_back(request, self._clock())
