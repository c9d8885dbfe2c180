"""Engine core of a worker group: scheduler, grammars and executor in one step loop."""

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
    """Runs the scheduler and an executor step by step: requests in, one report per step out.

    Depth 0 and depth 1 share one loop: a step is launched, and the oldest result is collected once
    more than `overlap_depth` steps are in flight.

        depth 0   schedule 1 │ launch 1 │ result 1 │ apply 1 │ schedule 2 │ launch 2 │ …
        depth 1   schedule 1 │ launch 1 │ schedule 2 │ launch 2 │ result 1 │ apply 1 │ …

    A Plan that samples under a grammar is sent without masks, which depend on the previous step.
    The masks are sent as soon as no earlier step is in flight; the forward pass runs in the
    meantime:

        depth 0   launch 1 │ masks 1 │ result 1 │ apply 1 │ launch 2 │ masks 2 │ …
        depth 1   launch 1 │ masks 1 │ launch 2 │ result 1 │ apply 1 │ masks 2 │ launch 3 │ …

    On CPU, no step is queued after one that computes part of a prompt, at any depth. Such a step
    takes much longer than scheduling, so overlap would gain little, and a request that arrives
    while it runs would have to wait for another whole step instead of joining the next one. A GPU
    takes little more time to compute prompts than the host takes to launch them, and would idle
    between them. On GPUs, steps therefore overlap with prefill steps, too
    (`Executor.overlaps_prompts`).

    In block diffusion, the next step depends on which running blocks this step completes. At
    depth 1, it is launched ahead if ranks can correct its rows themselves; otherwise, it is
    launched as soon as the result is applied, before the report:

        ahead     schedule 2 │ launch 2 │ result 1 │ apply 1 │ report 1 │ schedule 3 │ …
        else      result 1 │ apply 1 │ receive arrivals │ schedule 2 │ launch 2 │ report 1 │ …

    Args:
        config: the group's engine configuration.
        info: the result of `executor.start`.
        executor: a started executor.
        clock: `time.monotonic`, or a fake clock in tests.
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
        self._overlap_depth = min(config.execution.overlap_depth, executor.max_overlap_depth)
        self._follows_prompts = info.block_size > 1 or executor.overlaps_prompts
        self._launches_before_report = info.block_size > 1 and self._overlap_depth > 0
        self._in_flight: deque[AwaitResult] = deque()
        self._prompt_launched = False
        """Whether the last launched step computes part of a prompt and no step may overlap with
        it.
        """
        self._masks_due: Plan | None = None
        """The last launched Plan while it waits for masks; otherwise None."""
        self.grammars = GrammarStore(info)
        self._guided: GuidedRequests | None = None
        """Requests under a grammar; None before the first one."""
        self.timeline = Timeline(clock)
        self.scheduler = Scheduler(
            SchedulerConfig.of(config, info), clock, create_gate(config, on_cuda=uses_cuda(config))
        )

    def receive(self, batch: SubmitBatch) -> None:
        """Handles a batch from the frontend: grammars, submits, aborts, and admission options."""
        self.grammars.receive(batch)
        for submit in batch.submits:
            self.add(submit)
        for abort in batch.aborts:
            self.abort(abort)
        if batch.admission is not None:
            self.scheduler.set_admission(batch.admission)

    def add(self, submit: Submit) -> None:
        """Queues a request that the frontend has validated.

        A request with a grammar or a thinking budget is held until its matcher is ready; other
        requests are not delayed. A repeated submit is ignored.
        """
        if self.scheduler.add(submit) and submit.is_guided:
            self.grammars.request(submit)

    def abort(self, abort: Abort) -> None:
        """Aborts a request in any state; unknown requests are ignored."""
        self.scheduler.abort(abort.request_id, abort.attempt)

    def take_grammars(self, *, wait: bool = False) -> None:
        """Resumes requests whose matchers are ready; with `wait`, waits until at least one is."""
        for request_id, attempt, grammar in self.grammars.take(wait=wait):
            self.guide(request_id, attempt, grammar)

    def guide(self, request_id: str, attempt: int, grammar: GrammarState | GrammarProblem) -> None:
        """Resumes a held request with its matcher, or fails it if there is a problem."""
        if isinstance(grammar, GrammarProblem):
            self.scheduler.provide(request_id, attempt, grammar)
        elif self.scheduler.provide(request_id, attempt, GrammarStatus.of(grammar)):
            if grammar.is_free:  # a resumed request, or one held until the end of its reasoning
                if self._guided is not None:
                    self._guided.drop([(request_id, attempt)])
                return
            if self._guided is None:
                self._guided = GuidedRequests(self.grammars.advance, self.info.vocab_size)
            self._guided.add(request_id, attempt, grammar)

    def close(self) -> None:
        """Stops the grammar threads. The caller closes the executor."""
        self.grammars.close()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self, take_in: Callable[[], object] | None = None) -> StepReport:
        """Launches the next step if allowed, collects the oldest result if due, and reports.

        Args:
            take_in: receives new batches and passes them to `receive`; called before a step that is
                launched between a result and its report (block diffusion).

        Raises:
            RankFailure: a rank failed or exited.
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
        """Returns a report of everything since the last one, with the current load. Runs no
        step."""
        if self._guided is not None:
            self._guided.drop(self.scheduler.take_unguided())
        report = self.scheduler.take_report()
        report.load.step_times = self.timeline.totals()
        return report

    def _launch(self) -> bool:
        """Launches the next step; returns False if there is nothing to do before the next
        result."""
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
            sampled = self.scheduler.sampled_under_grammar(result)
            self.scheduler.apply(result, self._guided.advance(sampled))
        if self._masks_due is not None:
            self._send_masks(self._masks_due)

    def _launch_before_report(self, take_in: Callable[[], object] | None) -> bool:
        """Launches the next step before the report, for block diffusion without another step in
        flight."""
        if self._in_flight:
            return False
        self.timeline.leave(idle=False)
        if take_in is not None:
            take_in()
        self.timeline.enter()
        launched = self._launch()
        if launched:
            self.timeline.leave(idle=False)  # the report counts as delivery
        return launched

    def _send_masks(self, plan: Plan) -> None:
        """Sends the masks of the newest step, unless an earlier step is in flight."""
        if len(self._in_flight) > 1:
            return
        assert self._guided is not None, "a Plan with masked rows, and no request under a grammar"
        drafts = self._executor.drafts(plan.seq) if plan.drafts_under_grammar else []
        self._executor.sample(plan.seq, self._guided.masks(self.scheduler.masked_rows(), drafts))
        self._masks_due = None
