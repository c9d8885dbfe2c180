"""An engine over a block-diffusion model that answers the same prompts again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.bench.engine import GATEWAY, BenchEngine
from worker.config import EngineConfig
from worker.wire.diffusion import BlockTotals
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

    def turn(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], number: int
    ) -> FdfoTurn:
        """Answers all prompts, submitted at once; nothing that another one cached is found.

        Where each prompt has its own number of tokens, end tokens do not count.
        """
        before, start = self._totals(), time.monotonic()
        answers = self._answer(prompts, max_tokens, number)
        return self._turn(answers, time.monotonic() - start, before)

    def turn_in_waves(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, number: int
    ) -> FdfoTurn:
        """The same with as many at once as can run, so that nobody ever waits for a place."""
        before, start = self._totals(), time.monotonic()
        answers: list[Answer] = []
        for first in range(0, len(prompts), self.config.max_num_seqs):
            wave = prompts[first : first + self.config.max_num_seqs]
            answers += self._answer(wave, max_tokens, number)
        return self._turn(answers, time.monotonic() - start, before)

    def _answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], number: int
    ) -> list[Answer]:
        one_for_all = isinstance(max_tokens, int)
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        answers: dict[str, Answer] = {}
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=limit, seed=0, ignore_eos=not one_for_all
            )
            data = np.asarray(prompt, dtype="<i4").tobytes()
            submit = self._request(data, sampling, cache_salt=f"{number} {index}")
            answers[submit.request_id] = Answer(num_prompt=len(prompt))
            self._core.add(submit)
        while self._core.has_work():
            for delta in self._step().deltas.get(GATEWAY, ()):
                answer = answers[delta.request_id]
                answer.token_ids += delta.token_ids
                answer.rounds.append(delta.num_rounds - sum(answer.rounds))
        return list(answers.values())

    def _turn(self, answers: Sequence[Answer], seconds: float, before: BlockTotals) -> FdfoTurn:
        after = self._totals()
        return FdfoTurn(
            answers=tuple(answers),
            seconds=seconds,
            num_forwards=after.num_forwards - before.num_forwards,
            num_passes=after.num_passes - before.num_passes,
            block_size=self.block_size,
        )

    def _totals(self) -> BlockTotals:
        return self._core.scheduler.take_report().load.blocks or BlockTotals()
