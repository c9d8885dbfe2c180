"""Who gets how many tokens of a step: the running set and the queue share one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.cache.manager import CacheManager
from worker.request import Request
from worker.scheduler.admission import Admission, Admitted
from worker.scheduler.budget import StepBudget
from worker.scheduler.clock import Clock
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.displacement import Displacement
from worker.scheduler.drain import DrainRate
from worker.scheduler.fairness import TenantService
from worker.scheduler.load import Tally
from worker.scheduler.preemption import PageClaims, Withdrawal
from worker.scheduler.queue import WaitingQueue
from worker.scheduler.recall import Recall
from worker.scheduler.running import RunningSet
from worker.scheduler.siblings import Siblings
from worker.scheduler.step import StepBuilder
from worker.speculative.gate import SpeculationGate

_GOOD_PART = 0.125
"""Of a step, that decodes must take from urgent prompts to step aside: fewer cost these little."""


class StepFiller:
    """Puts a step together: decodes first, then prompts under way and new requests.

    A prompt that another one of the step outranks by the preemption gap is left out of it: it would
    only make the step longer for the other. So are decodes, for some steps in a row, where they
    would take a good part of each from a prompt that needs several.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        running: RunningSet,
        queue: WaitingQueue,
        tally: Tally,
        service: TenantService,
        drain: DrainRate,
        clock: Clock,
        *,
        recall: Recall,
        speculation: SpeculationGate | None = None,
    ) -> None:
        self.config = config
        self._speculation = speculation
        self._cache = cache
        self._running = running
        self._queue = queue
        self.withdrawal = Withdrawal(cache, running, queue, tally, clock)
        """The way back into the queue."""
        self._claims = PageClaims(config.page_size, cache, running, self.withdrawal)
        displacement = Displacement(
            *(config.preempt_priority_gap, config.page_size, cache, running, self.withdrawal),
            recall,
        )
        self.admission = Admission(
            *(config.admission, config.page_size, cache, running, queue),
            *(displacement, service, drain, recall),
            Siblings(config.page_size, config.max_num_batched_tokens // 8),
        )
        """The way into the running set."""
        self._num_without = 0
        """Steps in a row that left decodes out."""

    @property
    def new_prompt_share(self) -> float:
        """Part of a step's prompt tokens that prompts under way leave to those that wait."""
        if not self.config.enable_chunked_prefill:
            return 0.0
        return 1.0 - self.admission.options.max_prefill_share

    def fill(self, builder: StepBuilder, now: float) -> None:
        """Shares the step's tokens among those that run and those that wait."""
        # A copy: admission adds members, and claiming pages takes some back.
        members = [(request, request.num_pending) for request in self._running]
        prompts = [member for member in members if member[1] > 1]
        num_decodes = sum(pending == 1 for _, pending in members)
        if self._speculation is not None:
            builder.draft_threshold = self._speculation.begin(len(members), num_decodes, now)
        elder = self._queue.elder()
        running_level = max((request.level for request, _ in prompts), default=-1)
        enters = elder is not None and self.admission.can_admit(elder.level)
        level = max(running_level, elder.level if elder is not None and enters else -1)
        left_out = self._left_out(members, prompts, level)
        budget = self._budget(num_decodes - len(left_out))
        admitted: list[Admitted] = []
        if elder is not None:
            needs, above = self._claims_of_running(prompts, level, elder.priority)
            admitted = self.admission.round(budget, needs, now, running_level, above)
            parked = self.withdrawal.parked
            prompts = [
                m for m in prompts if m[0].lease is not None and m[0].request_id not in parked
            ]
        level = max([m[0].level for m in prompts] + [a.request.level for a in admitted], default=-1)
        prompts = [m for m in prompts if not self._is_outranked(m[0], level)]
        lengths = budget.allot(
            [pending for _, pending in prompts],
            [one.length for one in admitted],
            [one.cost for one in admitted],
            # By priority: for what a deadline adds, those that wait are taken first, but those
            # under way, which no deadline can lift any more, keep their share.
            [*[m[0].priority for m in prompts], *[one.request.priority for one in admitted]],
        )
        if left_out and sum(lengths) < budget.max_prompts:
            budget.add_decodes(len(left_out))  # slots or pages kept prompts out
            left_out = {}
        self._num_without = self._num_without + 1 if left_out else 0
        chunks = {m[0].request_id: length for m, length in zip(prompts, lengths, strict=False)}
        members = [member for member in members if member[0].request_id not in left_out]
        entering = list(zip(admitted, lengths[len(prompts) :], strict=True))
        self._claims.num_promised = sum(self.admission.num_pages(*one) for one in entering)
        self._step_running(members, chunks, budget, builder)
        for one, length in entering:
            self.admission.launch(one, length, builder)

    def _claims_of_running(
        self, prompts: Sequence[tuple[Request, int]], level: int, priority: int
    ) -> tuple[list[int], int]:
        """What prompts under way need: each of this priority; all of higher ones together."""
        stay = [member for member in prompts if not self._is_outranked(member[0], level)]
        if not self.config.enable_chunked_prefill:
            return [pending for _, pending in stay], 0
        equals = [pending for request, pending in stay if request.priority == priority]
        return equals, sum(pending for r, pending in stay if r.priority > priority)

    def _left_out(
        self,
        members: Sequence[tuple[Request, int]],
        prompts: Sequence[tuple[Request, int]],
        level: int,
    ) -> dict[str, Request]:
        """Decodes that step aside for prompts of this level, where these fill a step."""
        if level < 0:
            return {}  # no prompts
        decodes = {r.request_id: r for r, pending in members if pending == 1 and r.level <= level}
        options = self.admission.options
        if self._num_without < options.prefill_first_steps and self._prompts_fill_step(prompts):
            return decodes
        if self._num_without < options.urgent_first_steps:
            # Not by its level: what a deadline may have added was for the first token.
            gap = self.config.preempt_priority_gap
            outranked = {n: r for n, r in decodes.items() if gap and r.priority <= level - gap}
            if len(outranked) >= _GOOD_PART * self.config.max_num_batched_tokens:
                return outranked
        return {}

    def _prompts_fill_step(self, prompts: Sequence[tuple[Request, int]]) -> bool:
        waiting = sum(pending for _, pending in prompts)
        if self.admission.has_slots:
            waiting += self._queue.num_tokens - self._queue.num_expected_cached
        return waiting >= self._budget(0).max_prompts

    def _is_outranked(self, request: Request, level: int) -> bool:
        gap = self.config.preempt_priority_gap
        return gap > 0 and request.level <= level - gap

    def _budget(self, num_decodes: int) -> StepBudget:
        options = self.admission.options
        return StepBudget(
            self.config.max_num_batched_tokens,
            num_decodes,
            max_prefill_tokens=options.prefill_max_tokens,
            share=options.max_prefill_share,
            chunked=self.config.enable_chunked_prefill,
        )

    def _step_running(
        self,
        members: Sequence[tuple[Request, int]],
        chunks: Mapping[str, int],
        budget: StepBudget,
        builder: StepBuilder,
    ) -> None:
        """Adds the rows of those that ran before this step.

        Args:
            members: they and their pending tokens, in the order in which they may claim pages.
            chunks: what prompts among them compute now, by request id.
            budget: has tokens for the decodes.
            builder: of the step.
        """
        page_size = self.config.page_size
        parked = self.withdrawal.parked
        for request, pending in members:
            lease = request.lease
            if lease is None or request.request_id in parked:
                continue
            if pending == 1:
                length = int(budget.take_decode())
            else:
                length = chunks.get(request.request_id, 0)
            if length <= 0:
                continue
            # The last token of a prompt is known, and no draw of the slot that drafts could follow.
            drawn = request.num_computed >= request.num_prefill
            if pending == 1 and drawn and self._speculation is not None:
                num_drafts = budget.take_drafts(self._speculation.num_drafts(request))
                if num_drafts or request.num_unsettled:
                    self._claims.add_floating(request, lease, num_drafts, builder)
                    continue
            if request.num_computed + length > len(lease.pages) * page_size:
                length = self._claims.claim(request, lease, length, builder)
                if not length:
                    continue
            builder.add_row(request, lease, length)
        parked.clear()
