"""An engine that decodes a fixed number of requests for a fixed number of steps, and its times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from cluster.bench.engine import GATEWAY, BenchEngine
from worker.config import EngineConfig
from worker.core.executor_factory import uses_cuda
from worker.core.timeline import StepRecord
from worker.wire.messages import (
    Abort,
    CompiledGrammar,
    Submit,
    SubmitBatch,
    Vocabulary,
)
from worker.wire.sampling import SamplingParams

KEPT_RECORDS = 5
_SETTLING_STEPS = 4
"""Steps between the last first token and the first step that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One engine's steps at one number of requests, per step in microseconds."""

    wall_us: float
    phases_us: dict[str, float]
    """Of StepTimes."""
    records: tuple[StepRecord, ...]
    """The last steps that counted."""

    @property
    def rank_us(self) -> float:
        """Rank 0's own time."""
        return self.compute_us + self.phases_us["prepare"]

    @property
    def compute_us(self) -> float:
        """The model and the draw alone."""
        return self.phases_us["forward"] + self.phases_us["sample"]

    @property
    def idle_us(self) -> float:
        """From the end of a draw to the next forward pass: what a device might idle at most."""
        return self.phases_us["bubble"] + self.phases_us["prepare"]


class DecodeEngine(BenchEngine):
    """One engine as `LLM` has it, driven step by step.

    Args:
        config: of the engine; `max_num_seqs` is the most requests of a turn.
        steps: that count in a turn.
        input_len: tokens of every prompt.
    """

    def __init__(self, config: EngineConfig, *, steps: int, input_len: int) -> None:
        self._steps = steps
        self._input_len = input_len
        # More than it takes: those that get their first token early run while others wait.
        self._max_tokens = 2 * steps + 64
        if uses_cuda(config) and config.kv_cache_tokens is None:
            # Several engines share the device: none may take all of it.
            pages = -(-(input_len + self._max_tokens) // config.page_size) + 1
            tokens = config.max_num_seqs * pages * config.page_size
            config = replace(config, kv_cache_tokens=tokens)
        super().__init__(config)

    def turn(self, running: int, number: int) -> Turn:
        """Brings `running` requests to decode, and times their steps."""
        steps = self._steps
        submitted = [self._submit(number, index) for index in range(running)]
        waiting = set(submitted)
        while waiting:
            for delta in self._core.step().deltas.get(GATEWAY, ()):
                waiting.discard(delta.request_id)
        self._steps_of(_SETTLING_STEPS)
        before, start = self._core.timeline.totals(), time.monotonic()
        self._steps_of(steps)
        elapsed, after = time.monotonic() - start, self._core.timeline.totals()
        records = tuple(self._core.timeline.records)[-KEPT_RECORDS:]
        for request_id in submitted:
            self._core.abort(Abort(request_id=request_id))
        while self._core.has_work():
            self._core.step()
        count = after.num_steps - before.num_steps
        assert count == steps, f"{count} steps were completed in {steps} turns"
        phases = {
            name: (value - getattr(before, name)) / steps * 1e6
            for name, value in msgspec.structs.asdict(after).items()
            if name != "num_steps"
        }
        return Turn(wall_us=elapsed / steps * 1e6, phases_us=phases, records=records)

    def learn(self, vocabulary: Vocabulary, grammar: CompiledGrammar) -> None:
        """Gives the engine a grammar that requests may name, as the worker's front does."""
        self._core.receive(SubmitBatch(vocabulary=vocabulary, grammars=[grammar]))

    def complete(
        self, params: Sequence[SamplingParams], grammar: str = ""
    ) -> tuple[list[int], float]:
        """Runs one request per parameters to its end; their lengths, and seconds in all."""
        lengths: dict[str, int] = {}
        for index, sampling in enumerate(params):
            submit = self._random_request(0, index, sampling)
            submit.grammar = grammar
            lengths[submit.request_id] = 0
            self._core.receive(SubmitBatch(submits=[submit]))
        while self._core.grammars.num_due:
            self._core.take_grammars(wait=True)
        start = time.monotonic()
        while self._core.has_work():
            for delta in self._step().deltas.get(GATEWAY, ()):
                lengths[delta.request_id] += len(delta.token_ids)
                assert delta.error is None, delta.error
        return list(lengths.values()), time.monotonic() - start

    def _steps_of(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _submit(self, number: int, index: int) -> str:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True, seed=0
        )
        submit = self._random_request(number, index, sampling)
        self._core.add(submit)
        return submit.request_id

    def _random_request(self, number: int, index: int, sampling: SamplingParams) -> Submit:
        rng = np.random.default_rng((number, index))
        prompt = rng.integers(0, self._core.info.vocab_size, self._input_len)
        return self._request(prompt.astype("<i4").tobytes(), sampling)
