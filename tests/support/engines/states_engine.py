"""Engines for models with a state per request, with and without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.engines.engine_driver import Engine
from tests.support.engines.poisoned_engine import LateExecutor
from tests.support.engines.speculation_cases import NGRAM, RandomGate
from worker.core.executor_local import LocalExecutor

PAGE = 8


class StatesEngine(Engine):
    """Runs steps late and overwrites free states. Free pages are not overwritten, because torch's
    attention multiplies masked values by 0."""

    executor_class: type[LocalExecutor] = LateExecutor

    def __init__(self, folder: Path, **options: Any) -> None:
        common = {"kv_cache_tokens": 2048, "page_size": PAGE, "batch_invariant": True}
        super().__init__(str(folder), **{**common, **options})

    def after_step(self) -> None:
        cache, states = self.core.scheduler.state.cache, self.runner._states
        if states is None:
            return
        slots = torch.tensor(list(cache._slots.free), dtype=torch.int64)
        free = slots.tolist()
        # With host memory, free snapshots may still wait to be copied there.
        if cache._snapshots is not None and cache._snapshots.host is None:
            free += [states.num_slots + number for number in cache._snapshots._pool.free]
        for layer in states.caches.values():
            for plane in layer.planes:
                plane.index_fill_(0, torch.tensor(free, dtype=torch.int64), float("nan"))
            for inputs in layer.inputs:
                inputs.view(states.num_slots, -1).index_fill_(0, slots, float("nan"))


class DraftingEngine(StatesEngine):
    """Drafts random numbers of tokens."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **{**NGRAM, "num_speculative_tokens": 5, **options})
        gate = self.core.scheduler.steps.speculation
        assert gate is not None
        own = RandomGate(gate.config, self.config.scheduling, stops_itself=gate.stops_itself)
        self.core.scheduler.steps.speculation = own
        self.gate = own
