"""A model with linear attention on a fake device: graphs run its steps, and nothing races."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.cuda.serving import DRAFTS, HOST, KINDS, Served, on_cpu, on_cuda, prompts
from tests.support.effort import IS_LONG
from worker.protocol.sampling import SamplingParams
from worker.rank.runner import ModelRunner

NUM_OPERATIONS = 20_000
MAX_TOKENS = 12 if IS_LONG else 6
SCARCE = {"kv_cache_tokens": 96}
"""Pages for one long and one short request; others are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp("qwen3-next"))
    write_specimen("qwen3-next", folder)
    return str(folder)


def requests(times: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with shared prefixes, and all kinds of sampling."""
    given = times * [[token % VOCAB_SIZE for token in prompt] for prompt in prompts()]
    kinds = [{**kind, "stop_token_ids": [1, 2]} for kind in KINDS]
    asked = [
        SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(given))
    ]
    return given, asked


def served(
    folder: str, times: int, *, max_tokens: int = MAX_TOKENS, **options: Any
) -> tuple[Served, int]:
    """Outputs, and number of graph replays."""
    replays = 0

    def count(runner: ModelRunner) -> None:
        nonlocal replays
        assert runner._graphs is not None
        forward = runner._graphs.forward

        def counted(*args: Any) -> Any:
            nonlocal replays
            replays += 1
            return forward(*args)

        runner._graphs.forward = counted  # type: ignore[method-assign]

    return on_cuda(folder, *requests(times, max_tokens), meddle=count, **options), replays


@pytest.mark.randomized  # with more tokens
@pytest.mark.parametrize(
    "options", [{}, pytest.param(SCARCE, marks=pytest.mark.long)], ids=["plain", "scarce"]
)
def test_graphs_yield_what_eager_steps_do(folder: str, options: dict[str, Any]) -> None:
    found, replays = served(folder, 1, **options)
    assert found.findings == []
    assert found.waits == []
    assert replays > (20 if IS_LONG else 8)
    assert found.tokens == on_cpu(folder, *requests(1, MAX_TOKENS), **options)


@pytest.mark.randomized  # with more tokens
@pytest.mark.parametrize(
    "options", [{}, pytest.param(SCARCE, marks=pytest.mark.long)], ids=["plain", "scarce"]
)
def test_graphs_replay_drafts(folder: str, options: dict[str, Any]) -> None:
    """Steps of drafts neither wait nor race; their tokens are those without drafts."""
    given = [3 * prompt[:10] for prompt in requests(1, MAX_TOKENS)[0][: 6 if IS_LONG else 3]]
    asked = [
        SamplingParams(seed=i, max_tokens=20 if IS_LONG else 12, temperature=0.7 * (i % 2))
        for i in range(len(given))
    ]
    drafted = 0

    def count(runner: ModelRunner) -> None:
        assert runner._graphs is not None
        forward = runner._graphs.forward

        def counted(batch: Any) -> Any:
            nonlocal drafted
            drafted += batch.has_replay
            return forward(batch)

        runner._graphs.forward = counted  # type: ignore[method-assign]

    always = {**DRAFTS, "speculative_max_utilization": 2.0, "num_speculative_tokens": 4}
    found = on_cuda(folder, given, asked, meddle=count, **always, **options)
    assert (found.findings, found.waits) == ([], [])
    assert drafted > 8
    assert found.tokens == on_cpu(folder, given, asked, **options)


@pytest.mark.long
def test_states_in_host_memory_do_not_race(folder: str) -> None:
    given, asked = requests(1, 4)
    given, asked = 2 * given[1:6:2], 2 * asked[1:6:2]
    options = {**HOST, "host_cache_gib": 0.004, "max_num_seqs": 2}
    found = on_cuda(folder, given, asked, enforce_eager=True, **options)
    assert (found.findings, found.waits) == ([], [])
    assert found.num_loaded > 3
    assert found.tokens == on_cpu(folder, given, asked)


@pytest.mark.long
def test_mixes_of_requests_race_nowhere(folder: str) -> None:
    launches = 0
    for options in ({}, {**SCARCE, "max_num_batched_tokens": 24}):
        found, _ = served(folder, 4, max_tokens=24, **options)
        assert found.findings == []
        assert found.waits == []
        launches += found.num_launches
    assert launches > NUM_OPERATIONS, launches
