"""SDAR-MoE and LLaDA 2 from their formats: tokens and rounds of an independent reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.moe import LLADA2, MASK, SDAR_MOE, reference_logits, write_moe
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_oracle import Terms, answer
from worker.models.config import load_model_config
from worker.wire.sampling import SamplingParams

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
