"""Who gets how many tokens of a step: the running set and the queue share one budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker.core.cache.manager import CacheManager
from worker.core.request import Request
from worker.core.scheduler.admission import Admission, Admitted
from worker.core.scheduler.budget import StepBudget
from worker.core.scheduler.clock import Clock
from worker.core.scheduler.config import SchedulerConfig
from worker.core.scheduler.displacement import Displacement
from worker.core.scheduler.drain import DrainRate
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.load import Tally
from worker.core.scheduler.preemption import PageClaims, Withdrawal
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.recall import Recall
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.siblings import Siblings
from worker.core.scheduler.step import StepBuilder
from worker.core.speculation.gate import SpeculationGate
from worker.core.step_forecast import StepForecast

_GOOD_PART = 0.125
"""Of a step, in tokens or time, that decodes must take from urgent prompts to step aside."""


class Aside(NamedTuple):
    """Decodes that are left out of a step."""

    requests: Mapping[str, Request]
    """By request id."""
    num_tokens: int
    """Of prompts that this is for: with fewer in the step, it was for nothing."""


class StepFiller:
    """Puts a step together: decodes first, then prompts under way and new requests.

    A prompt that another one of the step outranks by the preemption gap is left out of it: it would
    only make the step longer for the other. So are decodes, for some steps in a row, where they
    would take a good part of each, in tokens or in time.
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
        forecast: StepForecast,
        speculation: SpeculationGate | None = None,
    ) -> None:
        self.config = config
        self._forecast = forecast
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
        aside = self._aside(members, prompts, level, elder if enters else None)
        budget = self._budget(num_decodes - len(aside.requests))
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
        if aside.requests and sum(lengths) < min(aside.num_tokens, budget.max_prompts):
            budget.add_decodes(len(aside.requests))  # slots or pages kept prompts out
            aside = Aside({}, 0)
        self._num_without = self._num_without + 1 if aside.requests else 0
        chunks = {m[0].request_id: length for m, length in zip(prompts, lengths, strict=False)}
        members = [member for member in members if member[0].request_id not in aside.requests]
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

    def _aside(
        self,
        members: Sequence[tuple[Request, int]],
        prompts: Sequence[tuple[Request, int]],
        level: int,
        elder: Request | None,
    ) -> Aside:
        """Decodes that step aside for prompts of this level, running ones or the elder's."""
        if level < 0:
            return Aside({}, 0)  # no prompts
        decodes = {r.request_id: r for r, pending in members if pending == 1 and r.level <= level}
        options = self.admission.options
        if self._num_without < options.prefill_first_steps and self._prompts_fill_step(prompts):
            return Aside(decodes, self.config.max_num_batched_tokens)
        if self._num_without < options.urgent_first_steps:
            # Not by its level: what a deadline may have added was for the first token.
            gap = self.config.preempt_priority_gap
            outranked = {n: r for n, r in decodes.items() if gap and r.priority <= level - gap}
            if outranked:
                num_tokens = sum(n for r, n in prompts if not self._is_outranked(r, level))
                if elder is not None and not self._is_outranked(elder, level):
                    num_tokens += self.admission.cost(elder)
                if self._takes_good_part(outranked, num_tokens):
                    return Aside(outranked, num_tokens)
        return Aside({}, 0)

    def _takes_good_part(self, decodes: Mapping[str, Request], num_tokens: int) -> bool:
        """Whether a step of so many prompt tokens would be much less of one with these decodes."""
        most = self.config.max_num_batched_tokens
        if num_tokens + len(decodes) > most and len(decodes) >= _GOOD_PART * most:
            return True
        context = sum(request.num_computed for request in decodes.values())
        part = self._forecast.decode_part(len(decodes), context, min(num_tokens, most))
        return part >= _GOOD_PART

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
        drafts = self._speculation is not None and self._speculation.is_open
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
            if pending == 1 and (drafts or request.num_unverified):
                num_drafts = self._num_drafts(request, budget) if drafts else 0
                if num_drafts or request.num_unverified:
                    self._claims.add_draft_row(request, lease, num_drafts, builder)
                    continue
            if request.num_computed + length > len(lease.pages) * page_size:
                length = self._claims.claim(request, lease, length, builder)
                if not length:
                    continue
            builder.add_row(request, lease, length)
        parked.clear()

    def _num_drafts(self, request: Request, budget: StepBudget) -> int:
        # The last token of a prompt is known, and no draw of the slot that drafts could follow.
        if self._speculation is None or request.num_computed < request.num_prefill:
            return 0
        return budget.take_drafts(self._speculation.num_drafts(request))
