"""An engine that runs steps as late as possible and overwrites all free memory."""

from __future__ import annotations

from functools import partial

import torch

from tests.support.engines.engine_driver import Engine
from worker.core.executor import AwaitResult
from worker.core.executor_local import LocalExecutor
from worker.plan.plan import Plan, StepResult


class LateExecutor(LocalExecutor):
    """Runs each step only when its result is requested."""

    def launch(self, plan: Plan) -> AwaitResult:
        return partial(self.run, plan)

    def sample(self, seq: int, masks: bytes) -> None:
        self.masks = masks

    def run(self, plan: Plan) -> StepResult:
        await_result = super().launch(plan)
        if plan.masked:
            super().sample(plan.seq, self.masks)
        return await_result()


class PoisonedEngine(Engine):
    executor_class = LateExecutor

    def after_step(self) -> None:
        cache, runner = self.core.scheduler.state.cache, self.runner
        pages = torch.tensor(cache._pages.free, dtype=torch.int64)
        for group in runner._layout.groups:
            for layer in group.layers:
                for plane in runner._kv_caches[layer].planes:
                    plane.index_fill_(0, pages * group.layers_per_page, float("nan"))
        slots = torch.tensor(cache._slots.free, dtype=torch.int64)
        runner._tables.token_pool.index_fill_(0, slots, 1)
        runner._tables.page_table.index_fill_(0, slots, 0)
