"""The scheduler of block-diffusion models: a row's last block is decided round by round."""

from __future__ import annotations

from worker.request import Request, RequestState
from worker.scheduler.block_policy import BlockPolicy
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.finish import finish_state, stop_reason
from worker.scheduler.plan import BlockOutcome, StepResult
from worker.scheduler.scheduler import Clock, Scheduler
from worker.scheduler.step import Share, StepInFlight
from worker.wire.messages import BlockTotals, StepShape


class BlockScheduler(Scheduler):
    """Sees of a running block whether it is done, and nothing of how it gets there.

        0 ────────────── num_computed ─────────────── known ──────── end of the running block
        │ in KV cache    │ prompt, or a block whose   │ undecided, or
        │                │ last pass is still to come │ prompt's tail in front

    Blocks lie at multiples of the block size, so a prompt's tail shares its block with the first
    tokens. A running block is computed again in every round, in place; what is before it is
    computed once. A request that is taken back keeps the state of its running block, which no one
    here reads, and goes on with it. Only blocks that are done enter the prefix cache.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        assert config.blocks is not None, "an autoregressive model has another scheduler"
        super().__init__(config, clock)
        self._policy: BlockPolicy = config.blocks
        self._totals = self._tally.blocks = BlockTotals()

    def _counts(self, step: StepInFlight, result: StepResult) -> list[int]:
        num_blocks = sum(share.sample for share in step.shares)
        outcomes = result.blocks or []
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        if (num_blocks, num_tokens) != (len(outcomes), len(result.token_ids)):
            raise ValueError(
                f"step {result.seq} has {num_blocks} running blocks; got {len(outcomes)} outcomes "
                f"and {len(result.token_ids)} tokens, {num_tokens} expected"
            )
        ordered = iter(outcomes)
        return [next(ordered).num_tokens if share.sample else 0 for share in step.shares]

    def _take_result(self, step: StepInFlight, result: StepResult, counts: list[int]) -> None:
        self._totals.num_forwards += result.num_forwards
        # Several passes took the time of this step: nothing can be learned from its shape.
        self._tally.step_shape = StepShape()
        outcomes, next_token = iter(result.blocks or ()), 0
        interrupted: list[Request] = []
        for share, count in zip(step.shares, counts, strict=True):
            request = share.request
            is_stale = request.lease is not share.lease
            if not share.sample:
                if not is_stale:
                    request.num_forwards += 1
                    self._commit_pages(share, share.end)
                continue
            outcome = next(outcomes)
            token_ids = result.token_ids[next_token : next_token + count]
            next_token += count
            self._count(outcome)
            if is_stale:
                self._tally.num_dropped_tokens += len(token_ids)
                continue
            self._take_block(share, outcome, token_ids)
            if not token_ids and not self._policy.inplace:
                interrupted.append(request)
        self._running.drop_finished()
        for request in interrupted:
            self._interrupt(request)

    def _count(self, outcome: BlockOutcome) -> None:
        self._totals.num_rounds += outcome.num_rounds
        self._totals.num_passes += outcome.num_forwards
        self._totals.num_tokens += outcome.num_tokens

    def _take_block(self, share: Share, outcome: BlockOutcome, token_ids: list[int]) -> None:
        request = share.request
        request.num_rounds += outcome.num_rounds
        request.num_forwards += outcome.num_forwards
        request.block_state = outcome.state
        computed = share.end if outcome.is_committed else share.end - self._policy.size
        request.num_computed = computed
        if token_ids and request.slo is not None and request.first_token_s < 0.0:
            request.first_token_s = self._clock()
        state: RequestState | None = None
        for token_id in token_ids:
            request.token_ids.append(token_id)
            state = finish_state(request, token_id)
            if state is not None:
                break
        self._commit_pages(share, computed)
        if state is not None:
            self._end(request, state, keep_place=True)
            stopped = state is RequestState.FINISHED_STOPPED
            self._outbox.put(
                request, stop_reason(request, self.config.eos_token_ids) if stopped else None
            )
        elif token_ids:
            self._outbox.put(request)

    def _commit_pages(self, share: Share, num_computed: int) -> None:
        """HAZARD: a block that its request ended in the middle of was computed with what came
        after the end; it does not enter the prefix cache, nor does a running one."""
        known = len(share.request.token_ids) // self._policy.size * self._policy.size
        self._cache.commit(share.lease, share.request.token_ids, min(num_computed, known))

    def _interrupt(self, request: Request) -> None:
        """Gives back slot and pages of a block that is not done; it comes again by the queue."""
        self._filler.withdrawal.withdraw(request)
        self._queue.push_back(request, self._clock())
