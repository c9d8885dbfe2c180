"""With --batch-invariant a request has the same bits alone, in a batch and in chunks, in every
family (tokens and log-probabilities), and its tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.families import SPECIMENS, cases, write_specimen
from tests.support.effort import IS_LONG
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.family_checks import Checkpoint, make_prompts
from worker.protocol.sampling import SamplingParams

LENGTHS = (5, 33, 12, 47, 20) if IS_LONG else (5, 33, 12)
NUM_NEW = 8 if IS_LONG else 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3)


def outcomes(folder: Path, *, is_alone: bool, **options: Any) -> list[Outcome]:
    prompts = make_prompts(LENGTHS)
    common = {"batch_invariant": True, "kv_cache_tokens": 2048, "enable_prefix_caching": False}
    with Engine(str(folder), **common, **options) as engine:
        if is_alone:
            return [engine.outcomes([prompt], PARAMS)[0] for prompt in prompts]
        return engine.outcomes(prompts, PARAMS)


@pytest.mark.randomized  # with more requests
@pytest.mark.parametrize("cpu_threads", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", cases("functions"))
def test_bits_do_not_depend_on_other_requests(tmp_path: Path, name: str, cpu_threads: int) -> None:
    torch.set_num_threads(1)
    checkpoint = Checkpoint(name, tmp_path, write_specimen(name, tmp_path))
    if SPECIMENS[name].keys.get("attn_logit_softcapping"):
        with pytest.raises(ValueError, match="models with logit soft-capping"):
            outcomes(tmp_path, is_alone=True)
        return
    alone = outcomes(tmp_path, is_alone=True, cpu_threads=cpu_threads)
    checkpoint.check(make_prompts(LENGTHS), [one.token_ids for one in alone], NUM_NEW)
    assert outcomes(tmp_path, is_alone=False, cpu_threads=cpu_threads) == alone
    chunks = {"max_num_batched_tokens": 20, "max_num_seqs": 16}
    assert outcomes(tmp_path, is_alone=False, cpu_threads=cpu_threads, **chunks) == alone
