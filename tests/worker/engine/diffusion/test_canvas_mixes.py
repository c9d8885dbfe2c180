"""DiffusionGemma: a step computes prompts, finished canvases and rounds of canvases in one pass;
tokens are those of each request alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints.canvases import LENGTH, write_canvases
from tests.support.engines.block_engine import AheadEngine, BlockEngine
from worker.plan.plan import BlockRow, Plan
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import SamplingParams

OPTIONS = {"page_size": 8, "cpu_backend": "torch"}
Asked = tuple[list[list[int]], list[SamplingParams]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("canvases")
    write_canvases(path)
    return str(path)


def requests(rng: np.random.Generator, count: int) -> Asked:
    """Requests of a few canvases, each of which takes up to 7 rounds."""
    prompts = [rng.integers(0, 60, int(rng.integers(1, 40))).tolist() for _ in range(count)]
    return prompts, [
        SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])),
            seed=index,
            max_tokens=int(rng.integers(1, 3 * LENGTH)),
            stop_token_ids=(5, 17),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            diffusion=DiffusionParams(steps=int(rng.integers(1, 8))),
        )
        for index in range(count)
    ]


def kinds(plan: Plan) -> set[str]:
    """What the rows of a step compute."""
    found = set()
    for row in plan.rows:
        if not isinstance(row, BlockRow):
            found.add("known tokens")
        else:
            found.add("canvas" if row.length == LENGTH else "known tokens and canvas")
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_mixed_steps_change_no_token(folder: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts, params = requests(rng, 8)
    with BlockEngine(folder, kv_cache_tokens=128, **OPTIONS) as engine:
        alone = [engine.serve([one], [own])[0] for one, own in zip(prompts, params, strict=True)]
        assert all(one.num_forwards == sum(one.rounds) for one in alone), "a pass by itself"
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": int(rng.integers(3 * LENGTH, 6 * LENGTH)),
        "kv_cache_tokens": int(rng.choice([96, 128, 256])),
        "dllm_fdfo": bool(rng.random() < 0.7),
        **OPTIONS,
    }
    with AheadEngine(folder, **settings) as engine:
        found = engine.serve(prompts, params)
        # If canvases wait for each other, none is running when another is finished.
        most = max(len(kinds(plan)) for plan in engine.plans)
        assert most == (3 if engine.config.dllm.fdfo else 2)
    for one, other in zip(found, alone, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
