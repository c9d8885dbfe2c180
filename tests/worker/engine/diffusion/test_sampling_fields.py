"""Every combination of sampling parameters is served by a block-diffusion family, or rejected with
what to do instead; none fails within a step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.support.checkpoints.canvases import write_canvases
from tests.support.checkpoints.moe import LLADA2_2, write_moe
from tests.support.checkpoints.sdar import write_sdar
from tests.support.effort import IS_LONG
from tests.support.engines.block_engine import BlockEngine
from worker.protocol.diffusion import DiffusionParams, DllmAlgorithm
from worker.protocol.limits import refuse
from worker.protocol.messages import Submit
from worker.protocol.pooling import PoolingParams
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams, ThoughtTokens
from worker.rank.diffusion.base import lowest

WRITERS = {
    "DiffusionGemma": write_canvases,
    "SDAR": lambda folder: write_sdar(folder, 8),
    "LLaDA 2.2": lambda folder: write_moe(LLADA2_2, folder),
}
VALUES: Mapping[str, tuple[Any, ...]] = {
    "n": (2,),
    "temperature": (0.0, 1.5),
    "top_p": (0.3,),
    "top_k": (3,),
    "min_p": (0.2,),
    "seed": (2**63, -1),
    "max_tokens": (1, 9, 20),
    "min_tokens": (1,),
    "frequency_penalty": (2.0, -2.0),
    "presence_penalty": (2.0, -2.0),
    "repetition_penalty": (0.01, 100.0),
    "logit_bias": ({5: 100.0, 7: -100.0},),
    "bad_words": (("word",),),
    "bad_words_token_ids": (((5,),), ((5, 7),)),
    "allowed_token_ids": ((5,), (5, 7, 9)),
    "logprobs": (0, 20),
    "logprob_token_ids": ((5, 7),),
    "prompt_logprobs": (0,),
    "stop": (("word",),),
    "stop_token_ids": ((5, 7),),
    "include_stop_str_in_output": (True,),
    "ignore_eos": (True,),
    "skip_special_tokens": (False,),
    "structured_outputs": (StructuredOutputsParams(regex="a+"),),
    "thought": (ThoughtTokens(opening=5, closing=7), ThoughtTokens(opening=5, closing=7, budget=3)),
    "diffusion": (),
    "pooling": (PoolingParams(),),
}
"""Values of each field of SamplingParams besides its default."""
NEEDS: Mapping[str, Mapping[str, Any]] = {"logprob_token_ids": {"logprobs": 0}}
"""Values of other fields that a field needs."""
DIFFUSION: Mapping[str, tuple[Any, ...]] = {
    "algorithm": get_args(DllmAlgorithm),
    "threshold": (0.0, 1.0),
    "steps": (1, 3, 1024),
    "entropy_bound": (0.0, 1024.0),
    "edit_threshold": (0.5,),
    "max_post_edit_steps": (0, 3),
    "penalty": (3.0,),
    "stream_drafts": (True,),
}
"""Values of each field of DiffusionParams besides its default."""
REMEDIES = ("remove it", "use ")
NUM_RANDOM = 200 if IS_LONG else 24


def every_field() -> list[SamplingParams]:
    """Each value of each field by itself."""
    found = [
        SamplingParams(**{name: value, **NEEDS.get(name, {})})  # type: ignore[arg-type]
        for name, values in VALUES.items()
        for value in values
    ]
    diffusion = [DiffusionParams(**{n: v}) for n, values in DIFFUSION.items() for v in values]
    return found + [SamplingParams(diffusion=one) for one in diffusion]


def combinations(count: int) -> list[SamplingParams]:
    """Random values of several fields."""
    rng, found = random.Random(3), []
    for _ in range(count):
        own = {n: rng.choice(DIFFUSION[n]) for n in rng.sample(sorted(DIFFUSION), 2)}
        names = rng.sample(sorted(set(VALUES) - {"diffusion"}), 5)
        fields = {name: rng.choice(VALUES[name]) for name in names}
        for name in names:
            fields = {**NEEDS.get(name, {}), **fields}
        diffusion = rng.choice([None, DiffusionParams(**own)])
        found.append(SamplingParams(diffusion=diffusion, **fields))
    return found


def test_values_of_all_fields() -> None:
    assert set(VALUES) == {*SamplingParams.__struct_fields__}
    assert set(DIFFUSION) == {*DiffusionParams.__struct_fields__}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.long if name == "LLaDA 2.2" else ()) for name in WRITERS],
)
def test_served_or_rejected_with_a_remedy(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    WRITERS[family](tmp_path)
    prompt = [7, 3, 50, 9, 11]
    accepted = []
    with BlockEngine(str(tmp_path), kv_cache_tokens=2048, cpu_backend="torch") as engine:
        for sampling in every_field() + combinations(NUM_RANDOM):
            submit = Submit(
                request_id="a",
                gateway_id="g",
                prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                sampling=sampling,
            )
            rejection = refuse(submit, engine.core.info)
            if rejection is None:
                accepted.append(sampling)
                continue
            assert rejection.param in (*VALUES, "model", "thinking_token_budget")
            assert any(remedy in rejection.message for remedy in REMEDIES), rejection.message
        # Grammars need a tokenizer: `test_guided_blocks`.
        accepted = [one for one in accepted if one.structured_outputs is None]
        assert len(accepted) > NUM_RANDOM // 4
        found = engine.serve([prompt] * len(accepted), accepted)
    for sampling, output in zip(accepted, found, strict=True):
        assert output.finish_reason in ("stop", "length"), sampling
        assert len(output.token_ids) <= (sampling.max_tokens or 0), sampling
        assert len(output.logprobs) == len(output.token_ids) * (sampling.logprobs is not None)
        allowed = sampling.allowed_token_ids
        assert allowed is None or {*output.token_ids} <= {*allowed}, sampling


def test_positions_without_any_allowed_token_are_decided_last() -> None:
    values = np.array([[np.nan, 0.5, np.nan, 0.1]], dtype=np.float32)
    undecided = np.array([[True, True, True, False]])
    for count, expected in enumerate(([1], [0, 1], [0, 1, 2]), 1):
        found = lowest(values, undecided, np.array([count]))
        assert np.flatnonzero(found).tolist() == expected
