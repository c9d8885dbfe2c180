"""Aborts, preemptions, scarce pages and every switch: no token changes, no page is lost."""

from __future__ import annotations

import dataclasses
from typing import Any, cast, get_args

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from tests.support.engines.block_oracle import Logits, Processors, Terms, answer
from tests.support.engines.invented_model import MASK, MOVES, VOCAB, InventedEngine, pure_logits
from worker.core.scheduler import block_steps
from worker.protocol.diffusion import EDITING, DiffusionParams, DllmAlgorithm, DllmFeature
from worker.protocol.messages import TokenLogprobs
from worker.protocol.sampling import SamplingParams

FEATURES = get_args(DllmFeature)
ALGORITHMS = get_args(DllmAlgorithm)
NUM_REQUESTS = 14


def make_terms(rng: np.random.Generator, algorithm: str) -> Terms:
    steps = None if rng.random() < 0.5 else int(rng.integers(1, 5))
    if algorithm == "LowConfidence":
        return Terms(threshold=float(rng.uniform(0.3, 0.9)), steps=steps)
    if algorithm == "EntropyBounded":
        return Terms(algorithm=algorithm, entropy_bound=float(rng.uniform(0.0, 4.0)))
    if algorithm not in EDITING:
        return Terms(algorithm=algorithm, steps=steps)
    return Terms(
        algorithm=algorithm,
        threshold=float(rng.uniform(0.3, 0.7)),
        edit_threshold=float(rng.uniform(0.2, 0.7)),
        max_post_edit_steps=int(rng.integers(0, 4)),
        penalty=float(rng.choice([0.0, 2.0])),
    )


def make_processors(rng: np.random.Generator, max_tokens: int) -> Processors:
    return Processors(
        frequency_penalty=float(rng.uniform(0.0, 0.5)),
        presence_penalty=float(rng.uniform(-0.5, 1.0)),
        repetition_penalty=float(rng.uniform(0.8, 1.5)),
        min_tokens=int(rng.integers(0, max_tokens + 1)),
        logit_bias={token: float(rng.uniform(-3.0, 3.0)) for token in (2, 5, 6)},
        allowed_token_ids=None if rng.random() < 0.7 else (1, *range(4, VOCAB)),
    )


def make_sampling(
    terms: Terms, max_tokens: int, processors: Processors | None, logprobs: int | None
) -> SamplingParams:
    fields: dict[str, Any] = {name: getattr(terms, name) for name in terms.__dataclass_fields__}
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        diffusion=DiffusionParams(**fields),
        logprobs=logprobs,
        **({} if processors is None else dataclasses.asdict(processors)),
    )


class Crowd:
    """Requests with their oracle's answers, and their outcomes."""

    def __init__(self, engine: InventedEngine, rng: np.random.Generator) -> None:
        size = engine.block_size
        self.engine, self._rng = engine, rng
        logits = cast("Logits", pure_logits(size))
        self.expected, self.outputs, self.reasons = {}, {}, {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        """Of the requests that return them."""
        self.num_rounds: dict[str, int] = {}
        self.waiting: list[tuple[str, list[int], SamplingParams]] = []
        stem = rng.integers(0, VOCAB, 4 * size).tolist()
        for index in range(NUM_REQUESTS):
            terms = make_terms(rng, ALGORITHMS[index % len(ALGORITHMS)])
            length, max_tokens = int(rng.integers(1, 5 * size)), int(rng.integers(1, 4 * size))
            prompt = (stem + rng.integers(0, VOCAB, 6 * size).tolist())[-length:]
            if index % 3:
                prompt = (stem + rng.integers(0, VOCAB, size).tolist())[:length]
            name = str(index)
            moves = terms.algorithm == "JointThresholdInDel"
            is_processed = bool(rng.random() < 0.4) and not moves
            processors = make_processors(rng, max_tokens) if is_processed else None
            self.expected[name] = answer(
                logits, prompt, block_size=size, mask=MASK, max_tokens=max_tokens, terms=terms,
                ends=(1,), processors=processors, moves=MOVES,
            )  # fmt: skip
            self.outputs[name] = []
            logprobs = 2 if rng.random() < 0.5 and not moves else None
            if logprobs is not None:
                self.logprobs[name] = []
            sampling = make_sampling(terms, max_tokens, processors, logprobs)
            self.waiting.append((name, prompt, sampling))

    def run(self, *, abort_share: float = 0.0, take_back_share: float = 0.0) -> None:
        while self.waiting or self.engine.scheduler.has_work():
            if self.waiting and self._rng.random() < 0.4:
                self.engine.add(*self.waiting.pop())
            if self._rng.random() < abort_share:
                name = str(self._rng.integers(NUM_REQUESTS))
                if name in self.outputs and name not in self.reasons:
                    self.engine.scheduler.abort(name, 0)
            scheduler = self.engine.scheduler
            if self._rng.random() < take_back_share and len(scheduler.state.running):
                lifecycle, last = scheduler.lifecycle, scheduler.state.running.last()
                if lifecycle.is_idle(last):
                    lifecycle.preempt(last)
            for delta in self.engine.step().deltas.get("g", ()):
                self.outputs[delta.request_id] += delta.token_ids
                if delta.logprobs is not None:
                    self.logprobs[delta.request_id] += delta.logprobs
                self.num_rounds[delta.request_id] = delta.num_rounds
                if delta.finish_reason is not None:
                    self.reasons[delta.request_id] = delta.finish_reason

    def check(self) -> None:
        for name, reason in self.reasons.items():
            expected, output = self.expected[name], self.outputs[name]
            if reason == "abort":
                assert output == expected.token_ids[: len(output)]
            else:
                assert output == expected.token_ids, f"request {name}"
                assert reason == ("stop" if output[-1] == 1 else "length")
        for name, logprobs in self.logprobs.items():
            assert [one.token_ids[0] for one in logprobs] == self.outputs[name]
            assert {len(one.token_ids) for one in logprobs} <= {3}
            found = [one.logprobs[0] for one in logprobs]
            assert found == pytest.approx(self.expected[name].logprobs[: len(found)], abs=1e-4)


def seeds(short: tuple[int, ...], number: int) -> list[ParameterSet]:
    """All seeds below a number; those that are not `short` only run in `make check-long`."""
    return [
        pytest.param(seed, marks=() if seed in short else pytest.mark.long)
        for seed in range(number)
    ]


@pytest.mark.parametrize("fdfo", [True, False])
@pytest.mark.parametrize("seed", seeds((0, 4, 5), 12))
def test_any_order_of_events(seed: int, fdfo: bool) -> None:
    """The short seeds cover each block size, all features, and aborts."""
    rng = np.random.default_rng(seed)
    size = (4, 8, 2)[seed % 3]
    disable = tuple(name for name in FEATURES if seed and rng.random() < 0.4)
    engine = InventedEngine(
        size,
        num_pages=int(rng.integers(11, 22)),
        max_num_seqs=int(rng.integers(2, 9)),
        max_num_batched_tokens=int(rng.integers(2, 20)) * size,
        depth=(seed // 2 + fdfo) % 2,
        dllm_fdfo=fdfo,
        dllm_disable=disable,
    )
    crowd = Crowd(engine, rng)
    crowd.run(abort_share=0.2 if seed % 2 else 0.0, take_back_share=0.1)
    crowd.check()
    load = engine.scheduler.take_report().load
    assert load.num_free_pages == load.num_total_pages
    assert load.num_running == load.num_waiting == 0


@pytest.mark.parametrize("seed", seeds((0, 1), 4))
def test_a_step_ahead_repeats_no_round_and_runs_nothing_that_is_done(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds equal the oracle's, and there are no other passes."""
    monkeypatch.setattr(block_steps, "MAX_ROUNDS", 2)
    monkeypatch.setattr(block_steps, "MAX_ROUNDS_AHEAD", 1 + seed % 2)
    rng = np.random.default_rng(seed)
    engine = InventedEngine(
        (4, 8)[seed % 2], num_pages=int(rng.integers(16, 40)), depth=1, dllm_disable=("early_exit",)
    )
    crowd = Crowd(engine, rng)
    crowd.run(take_back_share=0.2)
    crowd.check()
    assert engine.num_ahead > 10
    for name, rounds in crowd.num_rounds.items():
        assert rounds == sum(crowd.expected[name].rounds)
    assert engine.num_row_steps == sum(crowd.num_rounds.values())
    load = engine.scheduler.take_report().load
    assert load.num_free_pages == load.num_total_pages


@pytest.mark.parametrize("abort_share", [0.0, 0.5])
@pytest.mark.parametrize("seed", seeds((1,), 4))
def test_preempted_in_mid_block_it_repeats_no_round(
    seed: int, abort_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds equal the oracle's, so blocks are resumed; no pass includes finished rows or aborted
    requests."""
    monkeypatch.setattr(block_steps, "MAX_ROUNDS", 1)
    rng = np.random.default_rng(seed)
    engine = InventedEngine(8, num_pages=16, dllm_disable=("early_exit",))
    crowd = Crowd(engine, rng)
    crowd.run(abort_share=abort_share, take_back_share=0.5)
    crowd.check()
    assert engine.scheduler.take_report().load.num_preemptions > 10
    assert ("abort" in crowd.reasons.values()) == bool(abort_share)
    for name, rounds in crowd.num_rounds.items():
        if crowd.reasons[name] != "abort":
            assert rounds == sum(crowd.expected[name].rounds)
    assert engine.num_row_steps == sum(crowd.num_rounds.values())
