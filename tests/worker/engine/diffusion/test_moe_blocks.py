"""SDAR-MoE and LLaDA 2 from their formats: tokens and rounds of an independent reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.moe import LLADA2, MASK, SDAR_MOE, reference_logits, write_moe
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_oracle import Terms, answer
from tests.support.engines.guided_engine import EOS, VOCAB_SIZE, GuidedEngine, text_of
from worker.models.config import load_model_config
from worker.wire.sampling import SamplingParams
from worker.wire.structured import StructuredOutputsParams

MOE_FAMILIES = ("SDARMoeForCausalLM", "LLaDA2MoeModelLM")


@pytest.mark.checks(
    *("blocks", "batched", "TP 2"),
    of=MOE_FAMILIES,
    against="independent reference and an oracle",
)
@pytest.mark.parametrize("config", [SDAR_MOE, LLADA2], ids=["sdar_moe", "llada2_moe"])
def test_tokens_and_rounds(config: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = write_moe(config, tmp_path)
    size = config["block_size"]
    prompts = [[7, 3, 50], list(range(10, 10 + 2 * size)), [MASK, *range(40, 45 + size)]]

    def logits(token_ids: Sequence[int]) -> torch.Tensor:
        return reference_logits(checkpoint, token_ids)

    expected = [
        answer(
            logits, prompt, block_size=size, mask=MASK, max_tokens=2 * size,
            terms=Terms(threshold=0.25), ends=(2,),
        )
        for prompt in prompts
    ]  # fmt: skip
    assert min(one.margin for one in expected) > 1e-5
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * size)
    for options in ({}, {"batch_invariant": True}, {"tensor_parallel_size": 2}):
        with BlockEngine(
            checkpoint.folder,
            kv_cache_tokens=512,
            dllm_threshold=0.25,
            dllm_disable=("early_exit",),
            **options,
        ) as engine:
            found = engine.serve(prompts, sampling)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.rounds for one in found] == [one.rounds for one in expected]


@pytest.mark.checks("chunks", "scarce", of=MOE_FAMILIES, against="requests alone")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SDAR_MOE, id="sdar_moe", marks=pytest.mark.long),
        pytest.param(LLADA2, id="llada2_moe"),
    ],
)
def test_chunks_and_scarce_pages(config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_moe(config, tmp_path)
    prompts = [list(range(5 + start, 45 + start)) for start in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    options = {"batch_invariant": True, "page_size": 8}
    with BlockEngine(checkpoint.folder, kv_cache_tokens=1024, **options) as engine:
        alone = [engine.serve([prompt], sampling)[0].token_ids for prompt in prompts]
    scarce = {"kv_cache_tokens": 128, "max_num_batched_tokens": 32}
    with BlockEngine(checkpoint.folder, **options, **scarce) as engine:
        found = [one.token_ids for one in engine.serve(prompts, sampling)]
        assert engine.num_preemptions > 0, "pages were not scarce"
    assert found == alone


@pytest.mark.checks("grammar", of=MOE_FAMILIES, against="re")
@pytest.mark.parametrize("config", [SDAR_MOE, LLADA2], ids=["sdar_moe", "llada2_moe"])
def test_outputs_conform_to_their_grammars(config: dict[str, Any], tmp_path: Path) -> None:
    letters = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
    checkpoint = write_moe({**config, **letters}, tmp_path)
    patterns = (r"\d{3}-\d{4}", "yes|no|maybe so", r"[a-z]{2,6}(, [a-z]{2,6}){2,5}\.")
    sampling = [
        SamplingParams(
            temperature=0.9 * (number // 3),
            seed=number,
            max_tokens=80,
            structured_outputs=StructuredOutputsParams(regex=patterns[number % 3]),
        )
        for number in range(6)
    ]
    with GuidedEngine(checkpoint.folder, kv_cache_tokens=1024, dllm_threshold=0.3) as engine:
        outcomes = engine.outcomes([[7 + number] * 9 for number in range(6)], sampling)
    for number, outcome in enumerate(outcomes):
        assert outcome.finish_reason == "stop", outcome.error
        assert re.fullmatch(patterns[number % 3], text_of(outcome.token_ids))


def test_real_configurations(tmp_path: Path) -> None:
    """What the published config.json files leave out has the published code's defaults."""
    checkpoint = write_moe(LLADA2, tmp_path)
    model = load_model_config(checkpoint.folder)
    assert model.rotary_dim == 8
    assert model.moe is not None
    assert model.moe.shared_size == 32
    assert model.moe.dense_layers == {0}
    odd = write_moe({**LLADA2, "n_group": 3}, tmp_path / "odd")
    with pytest.raises(ValueError, match=r"n_group 3 in config\.json does not divide"):
        load_model_config(odd.folder)
