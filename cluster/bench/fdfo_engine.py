"""An engine over a block-diffusion model that answers the same prompts again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.bench.engine import GATEWAY, BenchEngine
from worker.engine.config import EngineConfig
from worker.wire.messages import BlockTotals
from worker.wire.sampling import SamplingParams


@dataclass(kw_only=True, slots=True)
class Answer:
    """What came of one prompt."""

    num_prompt: int
    token_ids: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    """By block: passes that found something to decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FdfoTurn:
    """All prompts, once."""

    answers: tuple[Answer, ...]
    seconds: float
    num_forwards: int
    num_passes: int
    """Of running blocks, summed over blocks."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Generated."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by wall time."""
        return self.num_tokens / self.seconds


class FdfoEngine(BenchEngine):
    """One arm.

    Args:
        config: of the engine; `max_num_seqs` is how many requests run at once.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.block_size = self.info.block_size
        if self.block_size == 1:
            self.close()
            raise ValueError(f"{config.model} is no block-diffusion model")

    def turn(self, prompts: Sequence[Sequence[int]], max_tokens: int, number: int) -> FdfoTurn:
        """Answers all prompts, submitted at once; nothing cached in another turn is found."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
        answers: dict[str, Answer] = {}
        before, start = self._totals(), time.monotonic()
        for prompt in prompts:
            data = np.asarray(prompt, dtype="<i4").tobytes()
            submit = self._request(data, sampling, cache_salt=str(number))
            answers[submit.request_id] = Answer(num_prompt=len(prompt))
            self._core.add(submit)
        last = before
        while self._core.has_work():
            report = self._step()
            last = report.load.blocks or last
            for delta in report.deltas.get(GATEWAY, ()):
                answer = answers[delta.request_id]
                answer.token_ids += delta.token_ids
                answer.rounds.append(delta.num_rounds - sum(answer.rounds))
        return FdfoTurn(
            answers=tuple(answers.values()),
            seconds=time.monotonic() - start,
            num_forwards=last.num_forwards - before.num_forwards,
            num_passes=last.num_passes - before.num_passes,
            block_size=self.block_size,
        )

    def _totals(self) -> BlockTotals:
        return self._core.scheduler.take_report().load.blocks or BlockTotals()
