"""Random mixtures of requests in engines that draft. Every outcome must equal that of the request
alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kernels.attention import AttentionBackend, AttentionMetadata, AttentionStep
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.engines.engine_driver import Outcome
from tests.support.engines.guided_engine import GuidedEngine
from tests.support.engines.speculation_cases import RandomGate
from tests.support.engines.states_engine import StatesEngine
from worker.core.executor_local import LocalExecutor
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams
from worker.rank.speculation import factory

SETTINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.1, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 0.7, "min_tokens": 15, "ignore_eos": False},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": {40: 1.5, 17: -2.0}, "prompt_logprobs": 1},
    {"temperature": 0.9, "structured_outputs": StructuredOutputsParams(regex="(ab|cd ){3,6}x")},
    {
        "temperature": 0.0,
        "frequency_penalty": 0.3,
        "logprobs": 2,
        "structured_outputs": StructuredOutputsParams(regex=r"[a-f]{2,5}(, [a-f]{2,5}){1,2}\."),
    },
    {"temperature": 0.8, "top_k": 20, "stop_token_ids": (17,), "bad_words_token_ids": ((40,),)},
)
"""Sampling parameters: log-probabilities, penalties, grammars, rules on tokens."""
_SIZES: Mapping[str, Any] = {"max_model_len": 256, "max_num_seqs": 4}


class MixtureEngine(GuidedEngine, StatesEngine):
    """Checks invariants after each step, and overwrites free states."""

    # A late step has no drafts in time for grammar masks.
    executor_class: type[LocalExecutor] = LocalExecutor

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **{**_SIZES, **options})
        gate = self.core.scheduler.steps.speculation
        self.gate: RandomGate | None = None
        """Samples the number of drafts; None if drafts are disabled."""
        if gate is not None:
            config = gate.config, self.config.scheduling
            self.gate = RandomGate(*config, stops_itself=gate.stops_itself)
            self.gate.random = random.Random(5)  # all engines of a test draft the same way
            self.core.scheduler.steps.speculation = self.gate

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of drafts and of accepted ones."""
        assert self.gate is not None
        return self.gate.totals.num_draft_tokens, self.gate.totals.num_accepted_tokens


@dataclass(frozen=True)
class Case:
    """A request, and its outcome alone, without drafts and cached prefixes."""

    prompt: list[int]
    sampling: SamplingParams
    alone: Outcome


def cases_of(folder: Path, count: int, **options: Any) -> list[Case]:
    """Requests with shared prefixes and all SETTINGS in turn; some continue others."""
    rng, found = np.random.default_rng(5), list[Case]()
    bases = [rng.integers(8, VOCAB_SIZE, 70).tolist() for _ in range(3)]
    alone = {"enable_prefix_caching": False, "overlap_depth": 0, **options}
    with MixtureEngine(folder, **alone) as engine:
        for number in range(count):
            prompt = bases[number % 3][: int(rng.integers(1, 50))]
            prompt += rng.integers(8, VOCAB_SIZE, int(rng.integers(2, 9))).tolist()
            if number % 4 == 3:  # the next turn of a conversation
                prompt = [*found[-1].prompt, *found[-1].alone.token_ids[:12], 15, 16]
            setting = {"ignore_eos": True, **SETTINGS[number % len(SETTINGS)]}
            most = int(rng.integers(12, 28))
            sampling = SamplingParams(seed=number, max_tokens=most, **setting)
            (outcome,) = engine.outcomes([prompt], [sampling])
            assert outcome.error is None, outcome.error
            found.append(Case(prompt, sampling, outcome))
    return found


@contextmanager
def drafting_engine(
    folder: Path, *, on_device: bool = False, **options: Any
) -> Iterator[MixtureEngine]:
    """An engine with drafts. If `on_device`, the device places rows whenever possible, as on
    CUDA."""
    if on_device:
        options = {"cpu_backend": "torch", **options}
    with (
        mock.patch.object(factory, "drafts_on_device", return_value=on_device),
        MixtureEngine(folder, **options) as engine,
    ):
        runner = engine.runner
        if on_device:
            read_lengths_on_device(runner._attention)
            if runner._head_attention is not runner._attention:
                read_lengths_on_device(runner._head_attention)
            if runner._states is not None:
                assert runner._states.replays is not None
                runner._states.replays._uses_bounds = True
        yield engine


def read_lengths_on_device(backend: AttentionBackend) -> None:
    """Makes an attention backend use the actual row lengths; lengths on the host are bounds."""
    plan = backend.plan

    def planned(metadata: AttentionMetadata) -> AttentionStep:
        return plan(replace(metadata, seq_lens_host=metadata.seq_lens.tolist()))

    backend.plan = planned  # type: ignore[method-assign]


class Mixture:
    """Random requests that arrive while others run. Some are aborted, like requests that reach a
    stop string; some are resumed on this engine after a few output tokens.

    Args:
        engine: an engine without requests.
        cases: requests to choose from.
        rng: chooses requests, priorities, aborts and the times of arrivals.
        count: number of requests.
    """

    def __init__(
        self, engine: MixtureEngine, cases: Sequence[Case], rng: random.Random, count: int
    ) -> None:
        self._engine, self._cases, self._rng = engine, cases, rng
        self._left = count
        self._outputs: dict[str, Outcome] = {}
        self._expected: dict[str, tuple[Case, int]] = {}
        """Case of each request that is not aborted, and its number of resumed tokens."""
        self.num_hits = 0
        """Number of requests that continued cached prefixes."""

    def run(self) -> list[str]:
        """Runs all requests; returns descriptions of those whose outcomes differ, and of anything
        left in the engine."""
        core, rng = self._engine.core, self._rng
        while self._left or core.has_work() or core.grammars.num_due:
            for _ in range(min(self._left, rng.randrange(3))):
                self._submit()
            if self._expected and rng.random() < 0.03:
                aborted = rng.choice(list(self._expected))
                core.scheduler.abort(aborted, 0)
                del self._expected[aborted]
            if core.has_work() or core.grammars.num_due:
                core.take_grammars(wait=not core.has_work())
                self._engine.step(self._outputs)
        self.num_hits += sum(outcome.num_cached > 0 for outcome in self._outputs.values())
        state = core.scheduler.state
        left = [f"left behind: {sorted(state.requests)}"] if state.requests else []
        return [*left, *self._differences()]

    def _submit(self) -> None:
        case, self._left = self._rng.choice(self._cases), self._left - 1
        tokens, num_resumed = case.alone.token_ids, 0
        if len(tokens) > 1 and case.alone.prompt_logprobs is None and self._rng.random() < 0.2:
            num_resumed = self._rng.randrange(1, len(tokens))
        request_id, outcome = self._engine.submit(
            [*case.prompt, *tokens[:num_resumed]],
            case.sampling,
            num_resumed=num_resumed,
            priority=self._rng.choice((4, 4, 9, 0)),
        )
        self._outputs[request_id], self._expected[request_id] = outcome, (case, num_resumed)

    def _differences(self) -> list[str]:
        found = []
        for request_id, (case, num_resumed) in self._expected.items():
            alone, outcome = case.alone, self._outputs[request_id]
            rest = replace(
                alone,
                token_ids=alone.token_ids[num_resumed:],
                logprobs=alone.logprobs[num_resumed:],
            )
            if outcome != rest:
                what = "tokens" if outcome.token_ids != rest.token_ids else "log-probabilities"
                number, end = self._cases.index(case), outcome.error or outcome.finish_reason
                found.append(f"case {number}, resumed after {num_resumed}: {what} ({end})")
        return found
