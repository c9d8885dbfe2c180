"""DiffusionGemma generates the canvases of transformers, round by round, in all modes; each of its
features, broken on purpose, changes them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints.canvases import (
    LENGTH,
    MUTATIONS,
    Answer,
    CanvasCheckpoint,
    write_canvases,
)
from tests.support.checkpoints.mutations import broken
from tests.support.engines.block_engine import BlockEngine, BlockOutput
from tests.support.engines.block_oracle import Processors
from worker.config import EngineConfig
from worker.models.config.canvas_config import CanvasConfig
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import SamplingParams
from worker.rank.preflight import check_engine

FAMILY = "DiffusionGemmaForBlockDiffusion"
NUM_CANVASES = 2
PROMPTS = [[7, 3, 50] * 9, list(range(40, 56)), [5]]
"""Longer than a window, and shorter; whole pages, and not."""
OPTIONS = {"kv_cache_tokens": 512, "page_size": 8, "cpu_backend": "torch"}


def sampling(seed: int, *, greedy: bool = False, drafts: bool = False) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if greedy else 1.0,
        seed=seed,
        max_tokens=NUM_CANVASES * LENGTH,
        ignore_eos=True,
        diffusion=DiffusionParams(stream_drafts=True) if drafts else None,
    )


ALL = [sampling(seed) for seed in range(len(PROMPTS))]


class Case:
    """The checkpoint, and what transformers generates for the prompts."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint: CanvasCheckpoint = write_canvases(folder)
        self.folder = str(folder)
        self.expected = [self.answer(prompt, seed) for seed, prompt in enumerate(PROMPTS)]

    def answer(self, prompt: list[int], seed: int, *, greedy: bool = False) -> Answer:
        return self.checkpoint.answer(prompt, seed=seed, canvases=NUM_CANVASES, greedy=greedy)

    @property
    def outputs(self) -> list[tuple[list[int], list[int]]]:
        """Tokens and rounds of all requests."""
        return [(one.token_ids, one.rounds) for one in self.expected]

    def check(self, found: list[BlockOutput]) -> None:
        assert [one.token_ids for one in found] == [one.token_ids for one in self.expected]
        assert [one.rounds for one in found] == [one.rounds for one in self.expected]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(Path(tmp_path_factory.mktemp("canvases")))


@pytest.mark.checks("blocks", "alone", of=FAMILY, against="transformers")
@pytest.mark.parametrize("fdfo", [True, pytest.param(False, marks=pytest.mark.long)])
def test_alone_round_by_round(case: Case, fdfo: bool) -> None:
    rounds = {count for one in case.expected for count in one.rounds}
    assert max(rounds) == 7 > min(rounds), "choose other prompts"
    options = {**OPTIONS, "enable_prefix_caching": False, "dllm_fdfo": fdfo}
    with BlockEngine(case.folder, **options) as engine:
        for seed, (prompt, expected) in enumerate(zip(PROMPTS, case.expected, strict=True)):
            (found,) = engine.serve([prompt], sampling(seed, drafts=True))
            assert found.token_ids == expected.token_ids
            assert found.rounds == expected.rounds or not fdfo
            assert [draft[:-1] for draft in found.drafts] == (expected.drafts if fdfo else [])
        greedy = case.answer(PROMPTS[1], 3, greedy=True)
        (found,) = engine.serve([PROMPTS[1]], sampling(3, greedy=True))
    assert (found.token_ids, found.rounds) == (greedy.token_ids, greedy.rounds)


@pytest.mark.checks("batched", "prefix hit", of=FAMILY, against="transformers")
@pytest.mark.parametrize(("fdfo", "is_invariant"), [(True, False), (False, True)])
def test_batched_then_hitting_prefixes(case: Case, fdfo: bool, is_invariant: bool) -> None:
    options = {**OPTIONS, "dllm_fdfo": fdfo, "batch_invariant": is_invariant}
    with BlockEngine(case.folder, **options) as engine:
        case.check(engine.serve(PROMPTS, ALL))
        found = engine.serve(PROMPTS, ALL)
        case.check(found)
        assert [one.num_cached for one in found] == [24, 16, 0]
        # A request that continues after its first canvas, as on another worker.
        resumed = [*PROMPTS[0], *case.expected[0].token_ids[:LENGTH]]
        (again,) = engine.serve([resumed], sampling(0), [LENGTH])
    assert again.token_ids == case.expected[0].token_ids[LENGTH:]


@pytest.mark.checks("chunks", "scarce", of=FAMILY, against="transformers")
def test_chunks_and_scarce_pages(case: Case) -> None:
    scarce = {**OPTIONS, "kv_cache_tokens": 64, "max_num_batched_tokens": 16}
    with BlockEngine(case.folder, **scarce) as engine:
        found = engine.serve(2 * PROMPTS, 2 * ALL)
        # Preempted requests repeat rounds.
        assert [one.token_ids for one in found] == [one.token_ids for one in 2 * case.expected]
        assert engine.num_preemptions > 0, "pages were not scarce"


def test_logits_processors_and_logprobs(case: Case) -> None:
    """A position is penalized for the tokens to its left, those of its canvas included."""
    ends = case.expected[1].token_ids[3:4]
    processors = Processors(
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        min_tokens=LENGTH + 3,
        logit_bias={ends[0]: 3.0},
    )
    prompt, seed = PROMPTS[1], 1
    expected = case.checkpoint.answer(
        *(prompt,), seed=seed, canvases=NUM_CANVASES, processors=processors, ends=ends
    )
    plain, restrained = (
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=NUM_CANVASES * LENGTH,
            ignore_eos=True,
            logprobs=2,
            **options,  # type: ignore[arg-type]  # fields by name
        )
        for options in ({}, {"stop_token_ids": tuple(ends), **asdict(processors)})
    )
    with BlockEngine(case.folder, **OPTIONS) as engine:
        free, found = engine.serve([prompt] * 2, [plain, restrained])
    assert free.token_ids == case.expected[seed].token_ids
    assert free.logprobs == pytest.approx(case.expected[seed].logprobs, abs=1e-4)
    count = len(found.token_ids)
    assert count > LENGTH + 3
    assert found.token_ids == expected.token_ids[:count] != free.token_ids[:count]
    assert found.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)


def test_a_position_without_any_allowed_token_spoils_no_other(case: Case) -> None:
    sampling = SamplingParams(
        seed=1,
        max_tokens=LENGTH,
        logprobs=0,
        allowed_token_ids=(5,),
        stop_token_ids=(5,),
        min_tokens=2,
    )
    with BlockEngine(case.folder, **OPTIONS) as engine:
        (found,) = engine.serve([PROMPTS[1]], sampling)
    assert np.isfinite(found.logprobs).all()
    assert (len(found.token_ids), found.token_ids[2]) == (3, 5)


@pytest.mark.checks("TP 2", of=FAMILY, against="transformers")
def test_two_ranks(case: Case) -> None:
    with BlockEngine(case.folder, **OPTIONS, tensor_parallel_size=2) as engine:
        case.check(engine.serve(PROMPTS, ALL))


@pytest.mark.long  # 23 mutations
@pytest.mark.checks("mutations", of=FAMILY, against="transformers")
def test_a_broken_feature_shows(case: Case, tmp_path: Path) -> None:
    unnoticed = []
    for feature, mutation in MUTATIONS.items():
        with broken(Path(case.folder), mutation, tmp_path / feature) as folder:
            if served(folder) == case.outputs[1:2]:
                unnoticed.append(feature)
    assert served(Path(case.folder)) == case.outputs[1:2], "nothing is broken yet"
    assert unnoticed == []


def served(folder: Path) -> list[tuple[list[int], list[int]]] | None:
    """Tokens and rounds of the second request; None if the checkpoint lacks weights that the model
    needs."""
    try:
        with BlockEngine(str(folder), **OPTIONS) as engine:
            return [(one.token_ids, one.rounds) for one in engine.serve(PROMPTS[1:2], ALL[1:2])]
    except ValueError as error:
        if "disagree" not in str(error):
            raise
        return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 7, "max_num_seqs": 1}, "at least 8, .* got 7"),
        ({"max_model_len": 249}, "exceeds .* maximum of 248 .* minus a canvas of 8"),
        ({"speculative_method": "ngram"}, "not supported for block-diffusion models"),
        ({"cpu_backend": "native"}, "--cpu-backend native is not supported for models with"),
    ],
    ids=str,
)
def test_options_that_do_not_suit(case: Case, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_engine(EngineConfig.of(model=case.folder, **options))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"t_min": -1.0}, "generation_config.json"),
        ({"max_denoising_steps": 0}, "generation_config.json"),
        ({"sampler_config": {"entropy_bound": "low"}}, "generation_config.json"),
    ],
    ids=str,
)
def test_values_of_generation_config_that_do_not_suit(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CanvasConfig.of(LENGTH, keys)


def test_an_end_token_within_a_canvas_ends_a_request(case: Case) -> None:
    tokens = case.expected[1].token_ids
    place = next(n for n in range(LENGTH + 1, len(tokens)) if tokens[n] not in tokens[:n])
    ended = SamplingParams(
        temperature=1.0, seed=1, max_tokens=100, ignore_eos=True, stop_token_ids=[tokens[place]]
    )
    short = SamplingParams(temperature=1.0, seed=1, max_tokens=3, ignore_eos=True)
    with BlockEngine(case.folder, **OPTIONS) as engine:
        first, second = engine.serve([PROMPTS[1]] * 2, [ended, short])
    assert (first.token_ids, first.finish_reason) == (tokens[: place + 1], "stop")
    assert (second.token_ids, second.finish_reason) == (tokens[:3], "length")
