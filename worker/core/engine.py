"""Engine core of one worker group: scheduler, grammars and executor in one step loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from worker.config import EngineConfig
from worker.core.executor import AwaitResult, Executor
from worker.core.executor_factory import uses_cuda
from worker.core.grammar.guided import GuidedRequests
from worker.core.grammar.state import GrammarProblem, GrammarState, GrammarStatus
from worker.core.grammar.store import GrammarStore
from worker.core.scheduler import Clock, Scheduler, SchedulerConfig
from worker.core.scheduler.speculation_gate import create_gate
from worker.core.timeline import Timeline
from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import Abort, EngineInfo, StepReport, StepShape, Submit, SubmitBatch


class EngineCore:
    """Steps the scheduler and an executor: requests in, one report per step out.

    Depth 0 and depth 1 are one loop: a step is launched, and the oldest result is taken once more
    than `overlap_depth` steps are in flight.

        depth 0   schedule 1 │ launch 1 │ result 1 │ apply 1 │ schedule 2 │ launch 2 │ …
        depth 1   schedule 1 │ launch 1 │ schedule 2 │ launch 2 │ result 1 │ apply 1 │ …

    A Plan with draws under a grammar is sent without their masks, since these depend on the step
    before. Masks follow as soon as no earlier step is in flight; the forward pass runs meanwhile:

        depth 0   launch 1 │ masks 1 │ result 1 │ apply 1 │ launch 2 │ masks 2 │ …
        depth 1   launch 1 │ masks 1 │ launch 2 │ result 1 │ apply 1 │ masks 2 │ launch 3 │ …

    On CPU no step is launched behind one that computes part of a prompt, whatever the depth. Such a
    step takes long beside scheduling, so that hiding the latter gains next to nothing; but a
    request that arrives while it runs, which is likely, would wait for another whole step. Once the
    result is in, it joins the very next one. A GPU computes prompts in little more time than the
    host takes to launch them, and would idle between them: there overlap does not end at prompts
    (`Executor.overlaps_prompts`).

    The step after one of running blocks (block diffusion) depends on which blocks that finishes. At
    depth 1 it is launched ahead where ranks can correct its rows by themselves; elsewhere it is
    launched as soon as the result is applied, and the report follows while it runs:

        ahead     schedule 2 │ launch 2 │ result 1 │ apply 1 │ report 1 │ schedule 3 │ …
        else      result 1 │ apply 1 │ take in arrivals │ schedule 2 │ launch 2 │ report 1 │ …

    Args:
        config: the group's engine configuration.
        info: what `executor.start` returned.
        executor: a started executor.
        clock: `time.monotonic`, or a test's own.
        on_launch: called with the Plan and the shape of each step just before it is launched.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        executor: Executor,
        clock: Clock,
        on_launch: Callable[[Plan, StepShape], None] | None = None,
    ) -> None:
        self.info = info
        config = config.with_limits(info.max_num_seqs, info.max_num_batched_tokens)
        self._on_launch = on_launch
        self._executor = executor
        self._overlap_depth = min(config.overlap_depth, executor.max_overlap_depth)
        self._has_blocks = info.block_size > 1
        self._in_flight: deque[AwaitResult] = deque()
        self._prompt_launched = False
        """Whether the step launched last computes part of a prompt, so that none is to follow."""
        self._masks_due: Plan | None = None
        """The Plan launched last, while it waits for masks; else None."""
        self.grammars = GrammarStore(info)
        self._guided = GuidedRequests(self.grammars.advance, info.vocab_size)
        self.timeline = Timeline(clock)
        self.scheduler = Scheduler(
            SchedulerConfig.of(config, info), clock, create_gate(config, on_cuda=uses_cuda(config))
        )

    def receive(self, batch: SubmitBatch) -> None:
        """Takes a batch of the frontend: grammars, submits, aborts, and new rules of admission."""
        self.grammars.receive(batch)
        for submit in batch.submits:
            self.add(submit)
        for abort in batch.aborts:
            self.abort(abort)
        if batch.admission is not None:
            self.scheduler.set_admission(batch.admission)

    def add(self, submit: Submit) -> None:
        """Queues a request that the frontend has found to fit.

        A request that names a grammar is held, and no other with it, until its matcher is ready.
        A repeated submit is ignored.
        """
        if self.scheduler.add(submit) and submit.grammar:
            self.grammars.request(submit)

    def abort(self, abort: Abort) -> None:
        """Ends a request wherever it is; unknown ones are ignored."""
        self.scheduler.abort(abort.request_id, abort.attempt)

    def take_grammars(self, *, wait: bool = False) -> None:
        """Resumes requests whose matchers are ready; with `wait`, waits for at least one."""
        for request_id, attempt, grammar in self.grammars.take(wait=wait):
            self.guide(request_id, attempt, grammar)

    def guide(self, request_id: str, attempt: int, grammar: GrammarState | GrammarProblem) -> None:
        """Resumes a held request with its matcher, or ends it where there is a problem."""
        if isinstance(grammar, GrammarProblem):
            self.scheduler.provide(request_id, attempt, grammar)
        elif self.scheduler.provide(request_id, attempt, GrammarStatus.of(grammar)):
            self._guided.add(request_id, attempt, grammar)

    def close(self) -> None:
        """Ends the grammars' threads. The executor is the caller's to close."""
        self.grammars.close()

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self, take_in: Callable[[], object] | None = None) -> StepReport:
        """Launches the next step if there is one and takes the oldest result that is due.

        Args:
            take_in: passes what has arrived to `receive`; called before a step that is launched
                once the result is in.

        Raises:
            RankFailure: a rank ended.
        """
        now = self.timeline.enter()
        self.take_grammars()
        launched = not (self._in_flight and self._prompt_launched) and self._launch(now)
        result: StepResult | None = None
        if self._in_flight and (not launched or len(self._in_flight) > self._overlap_depth):
            awaited = self.timeline.now()
            await_result = self._in_flight.popleft()
            result = await_result()
            collected = self.timeline.now()
            drawn = self.scheduler.drawn_under_grammar(result)
            self.scheduler.apply(result, self._guided.advance(drawn))
            self._send_masks()
            if self._has_blocks and self._overlap_depth and not self._in_flight:
                self.timeline.completed(result, awaited, collected)
                if self._launch_before_report(take_in):
                    return self.report()
                result = None  # the timeline has it
        report = self.report()
        if result is not None:
            self.timeline.completed(result, awaited, collected)
        report.load.step_times = self.timeline.totals()
        self.timeline.leave(idle=not self.has_work())
        return report

    def _launch_before_report(self, take_in: Callable[[], object] | None) -> bool:
        self.timeline.leave(idle=False)
        if take_in is not None:
            take_in()
        launched = self._launch(self.timeline.enter())
        if launched:
            self.timeline.leave(idle=False)  # to report is part of delivering
        return launched

    def report(self) -> StepReport:
        """Report of all since the last one, with the present load; takes no step."""
        self._guided.drop(self.scheduler.take_ended())
        report = self.scheduler.take_report()
        report.load.step_times = self.timeline.totals()
        return report

    def _launch(self, scheduling: float) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if self._on_launch is not None:
            self._on_launch(plan, self.scheduler.launched_shape)
        scheduled = self.timeline.now()
        self._in_flight.append(self._executor.launch(plan))
        self.timeline.launched(plan.num_tokens, scheduling, scheduled)
        follows_prompts = self._has_blocks or self._executor.overlaps_prompts
        self._prompt_launched = plan.has_prompts and not follows_prompts
        self._masks_due = plan if plan.masked else None
        self._send_masks()
        return True

    def _send_masks(self) -> None:
        """Sends the masks that the newest step waits for, unless an earlier step is in flight."""
        plan = self._masks_due
        if plan is None or len(self._in_flight) > 1:
            return
        drafts = self._executor.drafts(plan.seq) if plan.drafts_under_grammar else []
        self._executor.sample(plan.seq, self._guided.masks(self.scheduler.masked_rows(), drafts))
        self._masks_due = None
