"""Puts steps of blocks together."""

from __future__ import annotations

from collections.abc import Sequence

from worker.core.request import Request
from worker.core.scheduler.admission import Admitted
from worker.core.scheduler.block_ahead import rows_ahead
from worker.core.scheduler.block_budget import BlockBudget
from worker.core.scheduler.block_policy import MAX_ROUNDS, MAX_ROUNDS_AHEAD
from worker.core.scheduler.filler import StepFiller
from worker.core.scheduler.step import StepBuilder, StepInFlight


class BlockFiller(StepFiller):
    """Running blocks first, then prompts: together, or in steps of their own."""

    in_flight: StepInFlight | None = None
    """The step that the next one is to follow while its outcome is open."""

    def fill(self, builder: StepBuilder, now: float) -> None:
        """See the base class."""
        if self.in_flight is not None:
            self._fill_ahead(builder, self.in_flight)
            return
        policy = self.config.blocks
        assert policy is not None, "an autoregressive model has another filler"
        members = [(request, request.num_pending) for request in self._running]
        budget = BlockBudget(
            self.config.max_num_batched_tokens, policy, [pending for _, pending in members]
        )
        first = members
        if not policy.mixed_rounds:
            first = [member for member in members if self._is_prompt(member[0], policy.size)]
        lengths = [budget.grant(pending) for _, pending in first]
        admitted: list[Admitted] = []
        if len(self._queue):
            needs = [pending for _, pending in members if pending > 2 * policy.size]
            admitted = self.admission.round(budget, needs, now)
        self._add_rows(first, lengths, budget, builder)
        new_lengths = budget.grant_new([one.cost for one in admitted])
        for one, length in zip(admitted, new_lengths, strict=True):
            self.admission.launch(one, length, builder)
        if not policy.mixed_rounds and not builder.has_rows_without_draws:
            rest = [member for member in members if not builder.has_row_of(member[0])]
            lengths = [budget.grant(pending) for _, pending in rest]
            self._add_rows(rest, lengths, budget, builder)
        # While every request of the step is in a running block, nothing need be scheduled.
        if policy.inplace and not builder.has_rows_without_draws and not self._any_watched():
            builder.max_rounds = MAX_ROUNDS

    def _fill_ahead(self, builder: StepBuilder, step: StepInFlight) -> None:
        if len(self._queue):
            return  # who waits is to have the first place that comes free
        for row in rows_ahead(step, self._running, self._cache, self.config):
            lease = row.lease
            if row.num_missing:
                first = len(lease.pages)
                builder.write_pages(lease.slot, first, self._cache.extend(lease, row.num_missing))
            builder.add_window(row.request, lease, row.start, row.end)
        if not self._any_watched():
            builder.max_rounds = MAX_ROUNDS_AHEAD

    def _add_rows(
        self,
        members: Sequence[tuple[Request, int]],
        lengths: Sequence[int],
        budget: BlockBudget,
        builder: StepBuilder,
    ) -> None:
        by_id = {m[0].request_id: length for m, length in zip(members, lengths, strict=True)}
        self._step_running(members, by_id, budget, builder)

    def _any_watched(self) -> bool:
        """Whether anybody is to be told of every round."""
        params = [request.sampling.diffusion for request in self._running]
        return any(one is not None and one.stream_drafts for one in params)

    @staticmethod
    def _is_prompt(request: Request, block_size: int) -> bool:
        """Whether whole blocks of what it came with are still to be computed."""
        return request.num_computed < request.num_prefill // block_size * block_size
