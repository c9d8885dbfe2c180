"""A fake model based on hashes, behind the real scheduler, block table and decoder.

The cache content of a position depends on everything that the position attends to, so a wrong page,
a page reused too early, a block read before its last pass or a wrong prefix hit changes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from tests.support.engines.block_engine import is_ahead
from tests.support.engines.indel_oracle import Moves
from worker.config import EngineConfig
from worker.core.scheduler import Scheduler, SchedulerConfig
from worker.core.scheduler.block_policy import BlockPolicy
from worker.models.config.model_config import ModelConfig
from worker.plan.plan import Plan, StepResult
from worker.protocol.messages import StepReport, Submit
from worker.protocol.sampling import SamplingParams
from worker.rank.diffusion.decoder import BlockDecoder
from worker.rank.tables import DeviceTables

VOCAB = 24
MASK = 23
MOVES = Moves(mask=MASK, delete=22, split=21)
BITS = 2**52 - 1


def block_contents(before: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Cache contents of a block's positions, given those before them."""
    seen = hash((tuple(before), tuple(ids)))
    return [hash((seen, place)) & BITS for place in range(len(ids))]


@lru_cache(maxsize=1 << 16)
def scores(content: int) -> np.ndarray:
    """Logits of a position: confidences between almost 0 and almost 1."""
    rng = np.random.default_rng(content)
    return (rng.normal(size=VOCAB) * rng.uniform(0.5, 6.0)).astype(np.float32)


def pure_logits(block_size: int) -> object:
    """The same logits without a cache, for the oracle."""

    def logits(token_ids: Sequence[int]) -> torch.Tensor:
        contents: list[int] = []
        for start in range(0, len(token_ids), block_size):
            contents += block_contents(contents, token_ids[start : start + block_size])
        return torch.from_numpy(np.stack([scores(content) for content in contents]))

    return logits


class InventedEngine:
    """Engine with the fake model; supports all block-diffusion options of EngineConfig.

    Args:
        block_size: positions per block; pages are twice as large.
        num_pages: pages that requests share.
        flat: whether all logits are equal, so that a round decides one position.
        depth: number of steps planned ahead of the step whose result is applied.
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_pages: int = 64,
        flat: bool = False,
        depth: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        **options: object,
    ) -> None:
        self.block_size, self._page_size, self._flat = block_size, 2 * block_size, flat
        config = EngineConfig.of(
            model="",
            page_size=self._page_size,
            **options,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=16 * block_size,
                page_size=self._page_size,
                num_pages=num_pages + 1,
                eos_token_ids=(1,),
                blocks=BlockPolicy.of(config.dllm, block_size),
            ),
            lambda: 0.0,
        )
        self._tables = DeviceTables(
            max_num_seqs=max_num_seqs,
            max_model_len=16 * block_size,
            page_size=self._page_size,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
            block_size=block_size,
        )
        model = SimpleNamespace(
            block_size=block_size,
            mask_token_id=MASK,
            edit_token_ids=(MOVES.delete, MOVES.split),
            vocab_size=VOCAB,
        )
        self._decoder = BlockDecoder(
            config,
            cast("ModelConfig", model),
            self._tables,
            forward=self._forward,
            score=self._score,
        )
        self._cache = np.full((num_pages + 1, self._page_size), -1, dtype=np.int64)
        self._depth = depth
        self._results: deque[StepResult] = deque()
        """Results of steps in flight: computed, but not known to the scheduler."""
        self.num_forwards = 0
        self.num_row_steps = 0
        """Forward passes of running blocks, summed over blocks."""
        self.num_ahead = 0
        """Number of steps planned before the previous result was known."""

    def add(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        self.scheduler.add(
            Submit(
                request_id=request_id,
                gateway_id="g",
                prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                sampling=sampling,
            )
        )

    def step(self) -> StepReport:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._tables.apply(plan)
            step = self._decoder.prepare(plan)
            self.num_ahead += is_ahead(plan)
            indices = step.logits_indices
            hidden = None if indices is None else self._forward(step.plan, indices)
            results = self._decoder.run(step, hidden)
            self._results.append(results.add_to(StepResult(plan.seq, [], 1.0)))
        if self._results and (plan is None or len(self._results) > self._depth):
            self.scheduler.apply(self._results.popleft())
        report = self.scheduler.take_report()
        self.scheduler.check_invariants()
        return report

    def _forward(self, plan: Plan, logits_indices: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        self.num_row_steps += sum(row.num_samples for row in plan.rows)
        hidden: list[int] = []
        for row in plan.rows:
            assert row.start % self.block_size == row.length % self.block_size == 0
            for start in range(row.start, row.start + row.length, self.block_size):
                before = [self._place(row.slot, position) for position in range(start)]
                seen = [int(self._cache[place]) for place in before]
                assert -1 not in seen, "it reads what was never written"
                ids = self._tables.token_pool[row.slot, start : start + self.block_size].tolist()
                contents = block_contents(seen, ids)
                for offset, content in enumerate(contents):
                    self._cache[self._place(row.slot, start + offset)] = content
                hidden += contents
        return torch.tensor(hidden, dtype=torch.float64).unsqueeze(1)[logits_indices]

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page = int(self._tables.page_table[slot, position // self._page_size])
        assert page > 0, "it touches the dummy page"
        return page, position % self._page_size

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._flat:
            return torch.zeros(len(hidden), VOCAB)
        rows = [scores(int(content)) for content in hidden[:, 0].tolist()]
        return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, VOCAB)
