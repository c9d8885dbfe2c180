"""Drafts of MTP heads: tokens equal plain decoding, and acceptance depends on nothing but the text.

The heads predict nearly what their models do (`tests/support/checkpoints/mtp.py`), so that wrong
keys, values or hidden states show in the acceptance.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.chat import write_letters
from tests.support.checkpoints.mtp import (
    HEADS,
    with_keys,
    without_head,
    write_chain,
    write_with_head,
)
from tests.support.checkpoints.specimen import write_config
from tests.support.effort import IS_LONG
from tests.support.engines.device_lengths import ByDeviceLengths
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.forked_rank import forking_ranks
from tests.support.engines.guided_engine import TOKENS
from tests.support.engines.mixtures import Mixture, cases_of, drafting_engine
from worker.llm import LLM, TokensPrompt
from worker.models.config.model_config import load_model_config
from worker.protocol.sampling import SamplingParams
from worker.rank.speculation import factory
from worker.rank.speculation.heads import HeadProposer
from worker.rank.speculation.native_heads import NativeHeadProposer

MTP: dict[str, Any] = {
    "speculative_method": "mtp",
    "speculative_adaptive": False,
    "num_speculative_tokens": 3,
}
SIZES: dict[str, Any] = {"max_model_len": 256, "batch_invariant": True}
NATIVE = ("mimo", "qwen3")
NAMES = [
    pytest.param(name, marks=() if name in ("glm4-moe", "qwen3-5") else pytest.mark.long)
    for name in HEADS
]
WITH_STATES = [
    pytest.param(name, marks=() if name == "qwen3-5" else pytest.mark.long) for name in HEADS
]
"""In `make test` only the one whose model also has states, for tests of whole engines."""
MECHANISMS = [
    pytest.param(name, marks=() if name == "deepseek-v3.2" else pytest.mark.long)
    for name in ("deepseek-v3.2", "mimo-v2", "nemotron-3", "step3p5", "longcat", "ernie4-5-moe")
]
"""Heads with an indexer, a sliding window, several blocks, an LM head of their own, one layer where
the model has two, and without a final norm of their own."""
WINDOWED = ("mimo-v2", "step3p5")
"""Models with sliding windows: pages before these are freed, and few requests are preempted."""
SCARCE: dict[str, Any] = {"kv_cache_tokens": 256, "max_num_batched_tokens": 24}
NUM_PROMPTS = 24 if IS_LONG else 6
NUM_MIXTURES = 12 if IS_LONG else 1
UNCHANGED = 0.04
"""Difference of acceptance that counts as none: a few of the drafts."""


class HeadEngine(Engine):
    """An engine that reports its acceptance."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"kv_cache_tokens": 4096, **options}
        super().__init__(str(folder), **SIZES, **options)

    def acceptance(self, before: tuple[int, int] = (0, 0)) -> float:
        """Share of accepted drafts since the counts `before`."""
        drafted, accepted = (now - old for now, old in zip(self.counts, before, strict=True))
        assert drafted > 50, "too few drafts"
        return accepted / drafted

    @property
    def counts(self) -> tuple[int, int]:
        gate = self.core.scheduler.steps.speculation
        assert gate is not None
        return gate.totals.num_draft_tokens, gate.totals.num_accepted_tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {}


@pytest.fixture
def folder(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    name = request.param
    if name not in folders:
        folders[name] = write_with_head(name, tmp_path_factory.mktemp(name))
    return folders[name]


def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [20 + 11 * (i % 5) for i in range(count)]
    return [torch.randint(8, 97, (n,), generator=generator).tolist() for n in lengths]


def settings(count: int = NUM_PROMPTS) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(0.0, 0.0, 0.8)[i % 3], seed=i, max_tokens=30 + i % 4, ignore_eos=True
        )
        for i in range(count)
    ]


def run(folder: Path, **options: Any) -> tuple[list[Outcome], float]:
    """Outcomes with drafts, and their acceptance."""
    with HeadEngine(folder, **{**MTP, **options}) as engine:
        return engine.outcomes(prompts(), settings()), engine.acceptance()


def plain(folder: Path, **options: Any) -> list[Outcome]:
    with HeadEngine(folder, **options) as engine:
        return engine.outcomes(prompts(), settings())


def check_scarcity(engine: Engine, folder: Path) -> None:
    """Checks that requests were preempted."""
    if not folder.name.startswith(WINDOWED):
        assert engine.num_preemptions > 0, "pages were not scarce"


@pytest.mark.parametrize("folder", WITH_STATES, indirect=True)
def test_chunks_and_scarce_pages_change_neither_tokens_nor_acceptance(folder: Path) -> None:
    expected = plain(folder)
    outcomes, undisturbed = run(folder, num_speculative_tokens=1)
    assert outcomes == expected
    assert undisturbed > 0.5, "the head does not predict what the model does"
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 16}
    outcomes, acceptance = run(folder, **chunks, num_speculative_tokens=1)
    assert outcomes == expected
    assert acceptance == pytest.approx(undisturbed, abs=UNCHANGED)
    with HeadEngine(folder, **MTP, kv_cache_tokens=192) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        check_scarcity(engine, folder)


@pytest.mark.parametrize("folder", MECHANISMS, indirect=True)
def test_heads_predict_what_the_model_does(folder: Path) -> None:
    outcomes, acceptance = run(folder, num_speculative_tokens=1)
    assert outcomes == plain(folder)
    assert acceptance > 0.5


@pytest.mark.parametrize(
    "folder", ["mimo-v2", pytest.param("glm4-moe", marks=pytest.mark.long)], indirect=True
)
def test_further_drafts_do_not_depend_on_other_requests(folder: Path) -> None:
    outcomes, acceptance = run(folder)
    alone, expected = run(folder, max_num_seqs=1, speculative_max_utilization=2.0)
    assert outcomes == alone == plain(folder)
    assert acceptance == pytest.approx(expected, abs=0.001)


def test_further_heads_predict_further_tokens(tmp_path: Path) -> None:
    """In chunks, with preemptions, and after prefix hits."""
    torch.set_num_threads(1)
    drafts = {**MTP, "num_speculative_tokens": 2}
    one_head, two_heads = (write_chain(tmp_path / str(count), count) for count in (1, 2))
    expected, (outcomes, iterated) = plain(two_heads), run(one_head, **drafts)
    assert outcomes == expected
    with HeadEngine(two_heads, **drafts) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        acceptance, before = engine.acceptance(), engine.counts
        assert acceptance > iterated + 0.2
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.acceptance(before) == pytest.approx(acceptance, abs=UNCHANGED)
    config = load_model_config(str(two_heads))
    assert [config.with_mtp(n).windows[2:] for n in (1, 2, 3)] == [
        (None,),
        (None,) * 2,
        (None,) * 2,
    ]
    outcomes, scarce = run(two_heads, **MTP, **SCARCE)  # three drafts
    assert outcomes == expected
    assert scarce > iterated


@pytest.mark.long
def test_ranks_and_mixtures_with_further_heads(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_chain(tmp_path, 3)
    outcomes, acceptance = run(folder, tensor_parallel_size=2)
    assert outcomes == plain(folder, tensor_parallel_size=2)
    assert acceptance > 0.3
    cases, rng = cases_of(folder, 12), random.Random(3)
    for on_device, options in ((False, SCARCE), (True, {})):
        with drafting_engine(folder, on_device=on_device, page_size=8, **MTP, **options) as engine:
            for _ in range(3):
                assert Mixture(engine, cases, rng, 14).run() == []
            assert engine.counts[1] > 10, "too few drafts were accepted"


@pytest.mark.parametrize("folder", WITH_STATES, indirect=True)
def test_mixtures_change_no_bit(folder: Path) -> None:
    """With log-probabilities, penalties, grammars, aborted and resumed requests."""
    cases, rng = cases_of(folder, 24 if IS_LONG else 10), random.Random(3)
    for on_device, options in ((False, SCARCE), (True, {})):
        with drafting_engine(folder, on_device=on_device, page_size=8, **MTP, **options) as engine:
            for _ in range(NUM_MIXTURES):
                assert Mixture(engine, cases, rng, 14).run() == []
            # 21 to 45: a grammar that is compiled later changes the schedule.
            assert engine.counts[1] > 10, "too few drafts were accepted"
            if not on_device:
                check_scarcity(engine, folder)


@pytest.mark.long
@pytest.mark.parametrize("folder", ["qwen3-5", "glm4-moe"], indirect=True)
def test_texts_end_at_their_stop_strings(folder: Path) -> None:
    write_letters(folder, TOKENS, ["ab"])
    texts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts()]
    sampling = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=60, ignore_eos=True, stop=("e", "ab"))
        for i in range(len(texts))
    ]
    found = []
    for drafts in ({}, MTP):
        options = {"cpu_threads": 1, "kv_cache_tokens": 4096, **SIZES, **drafts}
        with forking_ranks(), LLM(str(folder), dtype="float32", **options) as llm:
            outputs = [one.outputs[0] for one in llm.generate(texts, sampling)]
        found.append([(one.text, one.finish_reason) for one in outputs])
    assert found[0] == found[1]
    assert sum(reason == "stop" for _, reason in found[0]) > 1


@pytest.mark.parametrize(
    "folder", ["mimo", "qwen3-5", pytest.param("glm4-moe", marks=pytest.mark.long)], indirect=True
)
def test_prefix_hits_and_resumed_requests_keep_the_acceptance(folder: Path) -> None:
    texts = [text * 3 for text in prompts()]
    with HeadEngine(folder, **{**MTP, "num_speculative_tokens": 1}) as engine:
        first = engine.outcomes(texts, settings())
        undisturbed, before = engine.acceptance(), engine.counts
        assert engine.outcomes(texts, settings()) == first
        assert engine.acceptance(before) == pytest.approx(undisturbed, abs=UNCHANGED)
    with HeadEngine(folder, **MTP) as engine:  # another worker, from half of the output on
        halves = [text + one.token_ids[:15] for text, one in zip(texts, first, strict=True)]
        outputs = [
            engine.submit(half, one, num_resumed=15)
            for half, one in zip(halves, settings(), strict=True)
        ]
        engine.drain(dict(outputs))
        for (_, outcome), whole in zip(outputs, first, strict=True):
            assert outcome.token_ids == whole.token_ids[15:]
        assert engine.acceptance() > 0.4


@pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=() if name == "mimo" else pytest.mark.long) for name in HEADS],
    indirect=True,
)
def test_ranks_draft_alike(folder: Path) -> None:
    expected = plain(folder, tensor_parallel_size=2)
    outcomes, acceptance = run(folder, tensor_parallel_size=2)
    assert outcomes == expected
    assert acceptance > 0.4


@pytest.mark.parametrize("folder", ["mimo"], indirect=True)
def test_torch_drafts_as_the_compiled_library(folder: Path) -> None:
    tokens, shares = list[list[list[int]]](), list[float]()
    for backend, proposer in (("native", NativeHeadProposer), ("torch", HeadProposer)):
        with HeadEngine(folder, **MTP, cpu_backend=backend) as engine:
            assert type(engine.runner._heads) is proposer
            tokens.append(engine.generate(prompts(), settings()))
            shares.append(engine.acceptance())
    assert tokens[0] == tokens[1]
    assert shares[0] == pytest.approx(shares[1], abs=UNCHANGED)


@pytest.mark.parametrize("folder", ["mimo", "qwen3-5"], indirect=True)
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 1])
def test_rows_that_the_device_places(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_only = {"cpu_backend": "torch"}
    expected = plain(folder, **torch_only)
    monkeypatch.setattr(factory, "drafts_on_device", lambda *_: True)
    with HeadEngine(folder, **MTP, **torch_only, overlap_depth=depth) as engine:
        backend, heads = ByDeviceLengths(), engine.runner._heads
        assert isinstance(heads, HeadProposer)
        engine.runner._attention = heads._backend = backend
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.acceptance() > 0.4


@pytest.mark.parametrize("folder", ["mimo"], indirect=True)
def test_without_the_method_the_head_is_not_loaded(folder: Path) -> None:
    with HeadEngine(folder) as engine:
        assert engine.runner.model.mtp is None
        assert len(engine.runner._kv_caches) == 1


def test_models_without_a_head_are_rejected(tmp_path: Path) -> None:
    write_with_head("mimo", tmp_path)
    without_head(tmp_path)
    with pytest.raises(ValueError, match=r"has no MTP head .* use ngram"):
        HeadEngine(tmp_path, **MTP)
    with_keys(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    with pytest.raises(ValueError, match="mtp is not supported for Qwen2ForCausalLM: use ngram"):
        HeadEngine(tmp_path, **MTP)


@pytest.mark.parametrize("kinds", [["linear_attention", "moe"], ["attention", "attention"], []])
def test_heads_with_other_blocks_are_rejected(tmp_path: Path, kinds: list[str]) -> None:
    write_config(HEADS["nemotron-3"], tmp_path)
    with_keys(tmp_path, mtp_layers_block_type=kinds)
    config = load_model_config(str(tmp_path), weights=False)
    with pytest.raises(ValueError, match="mtp is not supported for NemotronHForCausalLM: use"):
        config.with_mtp(1)
