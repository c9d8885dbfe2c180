"""Drafts on models whose layers keep a state per request: no bit of tokens and log-probabilities
changes in any mixture of requests, and states in the prefix cache are those of accepted tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Outcome
from tests.support.engines.mixtures import read_lengths_on_device
from tests.support.engines.oracle_drafts import OracleDrafts
from tests.support.engines.states_engine import DraftingEngine, StatesEngine
from worker.protocol.sampling import SamplingParams
from worker.rank.speculation import factory

pytestmark = pytest.mark.randomized  # with more requests
FAMILIES = (
    "qwen3-5",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in (
            *("qwen3-next", "nemotron-3", "lfm2", "granite-4", "falcon-h1", "kimi-linear"),
            "olmo-hybrid",
        )
    ),
)
NUM_REQUESTS = 12 if IS_LONG else 8
NUM_MIXES = 40 if IS_LONG else 2
SCARCE = {"kv_cache_tokens": 160, "max_num_batched_tokens": 13}


class Known:
    """Requests with shared prefixes, some of which continue others, and their outcomes alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(5)
        bases = [rng.integers(0, VOCAB_SIZE, 70).tolist() for _ in range(2)]
        self.prompts: list[list[int]] = []
        self.sampling: list[SamplingParams] = []
        self.outcomes: list[Outcome] = []
        self.num_hits = 0
        """Steps with requests that have continued cached prefixes."""
        with StatesEngine(folder, enable_prefix_caching=False, overlap_depth=0) as engine:
            for number in range(NUM_REQUESTS):
                prompt = bases[number % 2][: int(rng.integers(1, 70))]
                prompt += rng.integers(0, VOCAB_SIZE, int(rng.integers(2, 9))).tolist()
                if number % 3 == 2:  # the next turn of a conversation
                    last = self.outcomes[-1].token_ids[: int(rng.integers(4, 20))]
                    prompt = [*self.prompts[-1], *last, 5, 6]
                params = SamplingParams(
                    temperature=0.9 * (number % 4 > 0),
                    seed=number,
                    # With a penalty, the host places the rows of its steps.
                    frequency_penalty=0.5 * (number % 4 == 3),
                    max_tokens=int(rng.integers(12, 26)),
                    ignore_eos=True,
                    logprobs=2,
                )
                self.prompts.append(prompt)
                self.sampling.append(params)
                self.outcomes += engine.outcomes([prompt], [params])

    def draft(self, patch: pytest.MonkeyPatch) -> None:
        """Lets engines draft the outcomes, with errors."""
        pairs = zip(self.prompts, self.outcomes, strict=True)
        OracleDrafts(patch, [[*prompt, *one.token_ids] for prompt, one in pairs])

    def mix(self, rng: random.Random, **options: Any) -> DraftingEngine:
        """Runs random requests that arrive while others run, some of which are aborted; checks
        their outcomes, and returns the engine, which is closed."""
        with DraftingEngine(self.folder, max_num_seqs=4, **options) as engine:
            drafter, states = engine.runner._drafter, engine.runner._states
            assert drafter is not None
            assert states is not None
            assert states.replays is not None
            if drafter._on_device is not None:
                states.replays._uses_bounds = True
                read_lengths_on_device(engine.runner._attention)
            outputs: dict[str, Outcome] = {}
            numbers: dict[str, int] = {}
            left = 2 * NUM_REQUESTS
            while left or engine.core.has_work():
                for _ in range(min(left, rng.randrange(3))):
                    number, left = rng.randrange(NUM_REQUESTS), left - 1
                    priority = rng.choice((4, 4, 9, 0))
                    request_id, outcome = engine.submit(
                        self.prompts[number], self.sampling[number], priority=priority
                    )
                    outputs[request_id], numbers[request_id] = outcome, number
                if outputs and rng.random() < 0.03:
                    one = rng.choice(list(outputs))
                    engine.core.scheduler.abort(one, 0)
                    numbers.pop(one, None)
                if engine.core.has_work():
                    engine.step(outputs)
                running = engine.core.scheduler.state.running
                self.num_hits += any(request.num_cached > 0 for request in running)
            for request_id, number in numbers.items():
                assert outputs[request_id] == self.outcomes[number], self.sampling[number]
            assert engine.gate.totals.num_accepted_tokens > 20
            return engine


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp(request.param))
    write_specimen(request.param, folder)
    return Known(folder)


@pytest.mark.checks("drafts", of="Qwen3_5ForCausalLM", against="plain decoding")
@pytest.mark.parametrize("known", FAMILIES, indirect=True)
def test_mixtures_change_no_bit(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    known.draft(monkeypatch)
    num_preempted = 0
    for number in range(NUM_MIXES):
        on_device = number % 3 == 0
        monkeypatch.setattr(factory, "drafts_on_device", lambda *_, use=on_device: use)
        options: dict[str, Any] = {"overlap_depth": int(number % 4 < 3)}
        if number % 2:
            options |= SCARCE
        engine = known.mix(random.Random(number), **options)
        num_preempted += engine.num_preemptions
    assert num_preempted > 0, "pages were not scarce"
    assert known.num_hits > 20, "no prefix was hit"


@pytest.mark.long
@pytest.mark.parametrize("known", ["qwen3-5"], indirect=True)
def test_states_in_host_memory(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    known.draft(monkeypatch)
    host = {"host_cache_gib": 0.01, "host_cache_policy": "always"}
    engine = known.mix(random.Random(3), **host, **SCARCE)
    totals = engine.core.scheduler.state.cache.host
    assert totals is not None
    assert totals.totals.num_loaded > 0


@pytest.mark.parametrize("known", ["qwen3-5"], indirect=True)
def test_a_model_without_states_drafts(known: Known, tmp_path: Path) -> None:
    write_specimen("llama", tmp_path)
    draft = {"speculative_method": "draft", "speculative_model": str(tmp_path)}
    with DraftingEngine(known.folder, overlap_depth=1, page_size=16, **draft) as engine:
        for _ in range(2):  # then with hits
            assert engine.outcomes(known.prompts, known.sampling) == known.outcomes
        assert engine.gate.totals.num_draft_tokens > 40


@pytest.mark.long
@pytest.mark.parametrize("known", ["qwen3-5"], indirect=True)
def test_ranks_replay_alike(known: Known, tmp_path: Path) -> None:
    write_specimen("llama", tmp_path)
    with StatesEngine(known.folder, tensor_parallel_size=2) as engine:
        plain = engine.outcomes(known.prompts, known.sampling)
    draft = {"speculative_method": "draft", "speculative_model": str(tmp_path), "page_size": 16}
    with DraftingEngine(known.folder, tensor_parallel_size=2, **draft) as engine:
        for _ in range(2):  # then with hits
            assert engine.outcomes(known.prompts, known.sampling) == plain
        assert engine.gate.totals.num_draft_tokens > 40
