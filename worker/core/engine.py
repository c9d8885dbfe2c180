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
from worker.plan.plan import Plan
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
        self._follows_prompts = info.block_size > 1 or executor.overlaps_prompts
        self._launches_before_report = info.block_size > 1 and self._overlap_depth > 0
        self._in_flight: deque[AwaitResult] = deque()
        self._prompt_launched = False
        """Whether the step launched last computes part of a prompt, so that none is to follow."""
        self._masks_due: Plan | None = None
        """The Plan launched last, while it waits for masks; else None."""
        self.grammars = GrammarStore(info)
        self._guided: GuidedRequests | None = None
        """Requests under a grammar; None before the first one."""
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
            if self._guided is None:
                self._guided = GuidedRequests(self.grammars.advance, self.info.vocab_size)
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
        self.timeline.enter()
        if self.grammars.num_due:
            self.take_grammars()
        may_launch = not (self._in_flight and self._prompt_launched)
        launched = may_launch and self._launch()
        if self._in_flight and (not launched or len(self._in_flight) > self._overlap_depth):
            self._collect()
            if self._launches_before_report and self._launch_before_report(take_in):
                return self.report()
        report = self.report()
        self.timeline.leave(idle=not self.has_work())
        report.load.step_times = self.timeline.totals()
        return report

    def report(self) -> StepReport:
        """Report of all since the last one, with the present load; takes no step."""
        if self._guided is not None:
            self._guided.drop(self.scheduler.take_ended())
        report = self.scheduler.take_report()
        report.load.step_times = self.timeline.totals()
        return report

    def _launch(self) -> bool:
        """Launches the next step; False if there is nothing to do before a result is in."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        step = self.scheduler.launched
        if self._on_launch is not None:
            self._on_launch(plan, step.shape)
        scheduled = self.timeline.now()
        self._in_flight.append(self._executor.launch(plan))
        self.timeline.launched(step.num_tokens, scheduled)
        self._prompt_launched = step.has_chunks and not self._follows_prompts
        if plan.masked:
            self._masks_due = plan
            self._send_masks(plan)
        return True

    def _collect(self) -> None:
        """Waits for the oldest step's result and applies it."""
        awaited = self.timeline.now()
        result = self._in_flight.popleft()()
        self.timeline.collected(result, awaited)
        if self._guided is None:
            self.scheduler.apply(result)
        else:
            drawn = self.scheduler.drawn_under_grammar(result)
            self.scheduler.apply(result, self._guided.follow(drawn))
        if self._masks_due is not None:
            self._send_masks(self._masks_due)

    def _launch_before_report(self, take_in: Callable[[], object] | None) -> bool:
        """Block diffusion without a step in flight: launches the next step before the report."""
        if self._in_flight:
            return False
        self.timeline.leave(idle=False)
        if take_in is not None:
            take_in()
        self.timeline.enter()
        launched = self._launch()
        if launched:
            self.timeline.leave(idle=False)  # to report is part of delivering
        return launched

    def _send_masks(self, plan: Plan) -> None:
        """Sends the masks of the newest step, unless an earlier step is in flight."""
        if len(self._in_flight) > 1:
            return
        assert self._guided is not None, "a Plan with masked rows, and no request under a grammar"
        drafts = self._executor.drafts(plan.seq) if plan.drafts_under_grammar else []
        self._executor.sample(plan.seq, self._guided.masks(self.scheduler.masked_rows(), drafts))
        self._masks_due = None
