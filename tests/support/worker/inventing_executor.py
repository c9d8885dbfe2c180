"""An engine core with an executor that invents tokens and records the order of calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor import AwaitResult, Executor
from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import EngineInfo, Submit
from worker.protocol.sampling import SamplingParams

INFO = EngineInfo(
    model="invented",
    max_model_len=64,
    max_total_tokens=64,
    vocab_size=100,
    page_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=1024,
    eos_token_ids=[0],
    block_hash_salt="",
)


class InventingExecutor(Executor):
    """Records the order of launches and collections."""

    max_overlap_depth = 1

    def __init__(self, *, overlaps_prompts: bool = False) -> None:
        self.overlaps_prompts = overlaps_prompts
        self.journal: list[str] = []
        self.plans: list[Plan] = []
        self.masks: list[bytes] = []
        self._tokens: Iterator[int] = iter(range(1, 10_000))

    def start(self) -> EngineInfo:
        return INFO

    def launch(self, plan: Plan) -> AwaitResult:
        self.journal.append(f"launch {plan.seq}")
        self.plans.append(plan)
        tokens = [next(self._tokens) for row in plan.rows if row.num_samples]
        return partial(self._collect, StepResult(seq=plan.seq, token_ids=tokens, compute_ms=1.0))

    def _collect(self, result: StepResult) -> StepResult:
        self.journal.append(f"result {result.seq}")
        return result

    def drafts(self, seq: int) -> list[list[int]]:
        raise AssertionError("nothing is drafted here")

    def sample(self, seq: int, masks: bytes) -> None:
        self.journal.append(f"masks {seq}")
        self.masks.append(masks)

    @property
    def death_fds(self) -> list[int]:
        return []

    def raise_on_death(self) -> None:
        pass

    def close(self) -> None:
        pass


def submit(request_id: str, num_prompt: int = 5, max_tokens: int = 3) -> Submit:
    return Submit(
        request_id=request_id,
        gateway_id="g",
        prompt=np.arange(num_prompt, dtype="<i4").tobytes(),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0),
    )


def make_core(
    overlap_depth: int, *, overlaps_prompts: bool = False
) -> tuple[EngineCore, InventingExecutor]:
    executor = InventingExecutor(overlaps_prompts=overlaps_prompts)
    config = EngineConfig.of(
        model="invented", page_size=4, max_num_seqs=4, overlap_depth=overlap_depth
    )
    core = EngineCore(config, INFO, executor, lambda: 0.0)
    return core, executor


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for delta in core.step().deltas.get("g", ()):
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        core.scheduler.check_invariants()
    return tokens
