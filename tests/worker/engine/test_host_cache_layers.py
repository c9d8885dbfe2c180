"""Models with sliding windows, states or index keys: prefixes that come back from host memory are
bitwise equal to cold runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine
from tests.support.engines.poisoned_engine import LateExecutor
from worker.protocol.host_cache import HostCacheTotals
from worker.protocol.sampling import SamplingParams

PAGE = 8
LENGTHS = (60, 45, 52)
SCARCE_TOKENS = 96
SAMPLING = [
    SamplingParams(temperature=0.9, seed=number, max_tokens=10, ignore_eos=True, logprobs=3)
    for number in range(len(LENGTHS))
]
LAYERS = [
    "gpt-oss",
    "qwen3-next",
    "deepseek-v3.2",
    pytest.param("glm-5", marks=pytest.mark.long),
    pytest.param("gemma3", marks=pytest.mark.long),
    pytest.param("gemma4", marks=pytest.mark.long),
    pytest.param("gemma4-small", marks=pytest.mark.long),
    pytest.param("gemma3n", marks=pytest.mark.long),
    pytest.param("llama4", marks=pytest.mark.long),
    pytest.param("mistral", marks=pytest.mark.long),
]


class HostEngine(Engine):
    """Engine whose steps run late, and which overwrites free host memory."""

    executor_class = LateExecutor

    def __init__(self, folder: Path, **options: Any) -> None:
        common = {"page_size": PAGE, "batch_invariant": True, "kv_cache_tokens": SCARCE_TOKENS}
        host = {"host_cache_gib": 0.01, "host_cache_policy": "always"}
        super().__init__(str(folder), **{**common, **host, **options})

    def after_step(self) -> None:
        cache, host = self.core.scheduler.state.cache, self.runner._host_pages
        assert cache.host is not None
        assert host is not None
        host.slots.index_fill_(0, torch.tensor(cache.host._slots.free), float("nan"))
        if host.states is not None:
            assert cache._snapshots is not None
            assert cache._snapshots.host is not None
            free = torch.tensor(cache._snapshots.host._pool.free, dtype=torch.int64)
            host.states.snapshots.index_fill_(0, free, 255)

    @property
    def totals(self) -> HostCacheTotals:
        found = self.core.scheduler.take_report().load.host_cache
        assert found is not None
        return found


@pytest.fixture(scope="module", params=LAYERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp(request.param))
    write_specimen(request.param, folder)
    return folder


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def test_turns_that_hit_in_host_memory_equal_cold_runs(folder: Path) -> None:
    cold_options = {"enable_prefix_caching": False, "kv_cache_tokens": 1024, "overlap_depth": 0}
    prompts = make_prompts()
    with (
        Engine(str(folder), batch_invariant=True, page_size=PAGE, **cold_options) as cold,
        HostEngine(folder, overlap_depth=1) as engine,
    ):
        for turn in range(2):
            before = engine.totals.num_hit_tokens
            pairs = [([prompt], [params]) for prompt, params in zip(prompts, SAMPLING, strict=True)]
            expected = [cold.outcomes(*pair)[0] for pair in pairs]
            # One session after another: each evicts the previous one.
            assert [engine.outcomes(*pair)[0] for pair in pairs] == expected
            if turn:
                assert engine.totals.num_hit_tokens - before > 6 * PAGE
                assert engine.outcomes(prompts, SAMPLING) == expected, "together"
            prompts = [
                [*prompt, *outcome.token_ids, 5, 6, 7]
                for prompt, outcome in zip(prompts, expected, strict=True)
            ]
