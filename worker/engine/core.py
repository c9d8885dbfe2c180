"""One worker group's engine without its surroundings: requests in, one report per step out."""

from __future__ import annotations

from collections import deque

from worker.engine.base import Executor, StepFuture
from worker.engine.config import EngineConfig
from worker.scheduler.scheduler import Clock, Scheduler, SchedulerConfig
from worker.wire.messages import Abort, EngineInfo, StepReport, Submit


class EngineCore:
    """Couples the scheduler with an executor.

    Depth 0 and depth 1 are this one loop: a step is launched, and results are taken once more
    than `overlap_depth` steps are in flight.

        depth 0   schedule 1 │ launch 1 │ result 1 │ apply 1 │ schedule 2 │ launch 2 │ …
        depth 1   schedule 1 │ launch 1 │ schedule 2 │ launch 2 │ result 1 │ apply 1 │ …

    Args:
        config: the group's engine configuration.
        info: what the executor's `start` said.
        executor: a started executor.
        clock: the time source of scheduling decisions.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self.info = info
        self._executor = executor
        self._overlap_depth = min(config.overlap_depth, executor.max_overlap_depth)
        self._in_flight: deque[StepFuture] = deque()
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                page_size=info.page_size,
                num_pages=info.max_total_tokens // info.page_size + 1,
                eos_token_ids=tuple(info.eos_token_ids),
                block_hash_salt=info.block_hash_salt,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            clock,
        )

    def add(self, submit: Submit) -> None:
        """Queues a request; the front has refused what can never fit."""
        self.scheduler.add(submit)

    def abort(self, abort: Abort) -> None:
        """Ends a request wherever it is; unknown ones are ignored."""
        self.scheduler.abort(abort.request_id, abort.attempt)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> StepReport:
        """Launches the next step if there is one and takes the oldest result that is due.

        Raises:
            RankFailure: a rank ended.
        """
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append(self._executor.launch(plan))
        if self._in_flight and (plan is None or len(self._in_flight) > self._overlap_depth):
            self.scheduler.apply(self._in_flight.popleft().result())
        return self.scheduler.take_report()
