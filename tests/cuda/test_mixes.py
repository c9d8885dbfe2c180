"""20,000 device operations with every kind of request: no races, and no waits except for the
expected ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.checkpoints.sdar import write_sdar
from tests.support.cuda.serving import (
    DRAFTS,
    HOST,
    Served,
    by_model,
    on_cuda,
    params,
    prompts,
)
from tests.support.engines.block_engine import BlockEngine
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

NUM_OPERATIONS = 20_000
ALWAYS = {"speculative_max_utilization": 2.0}
"""Drafts for any number of running requests."""
SCARCE = {"kv_cache_tokens": 96}
"""Pages for one long and one short request; others are preempted."""

HOST_PLACES = {"transfer.py", "verification.py", "drafter.py", "ngram.py", "device_model.py"}
"""Files where the host waits for drafts of steps in which a drafting row has processors, or any row
a grammar: the host places those rows."""
BLOCKS_WAIT = {"proposal.py"}
"""Files where the host waits between rounds of blocks."""


def mixed(folder: str, times: int, **options: Any) -> Served:
    """Requests with filters, penalties, biases and log-probabilities, and shared prompt
    prefixes."""
    return on_cuda(folder, times * prompts(), times * params(max_tokens=24), **options)


def drafted(folder: str, times: int, **options: Any) -> Served:
    given = [prompt[:10] for prompt in times * prompts(6, 3)]
    return on_cuda(folder, given, times * params(6, 20), **options)


def guided(times: int, **options: Any) -> Served:
    forms = [{"regex": r"\d{3}-\d{4}"}, {"choice": ["yes", "no"]}]
    asked = [
        SamplingParams(
            max_tokens=16,
            seed=i,
            temperature=1.0,
            structured_outputs=StructuredOutputsParams(**forms[i % 2]) if i % 3 else None,
        )
        for i in range(times)
    ]
    given = [3 * [1, 2, 3 + i % 5] for i in range(times)]
    return on_cuda("deploy/models/demo", given, asked, **options)


def blocks(folder: str, times: int) -> Served:
    given = [[token % 90 for token in prompt] for prompt in times * prompts(4)]
    asked = SamplingParams(temperature=0.0, max_tokens=16)
    return on_cuda(folder, given, asked, kind=BlockEngine, dllm_threshold=0.3)


@pytest.mark.long
def test_mixes_of_all_requests_race_nowhere(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    for name in ("qwen3", "sdar"):
        (tmp_path / name).mkdir()
    folder = str(tmp_path / "qwen3")
    write_checkpoint("qwen3", tmp_path / "qwen3")
    diffusing = write_sdar(tmp_path / "sdar", 4).folder
    drafts, model = {**DRAFTS, **ALWAYS}, {**by_model(folder), **ALWAYS}
    mixes: dict[str, tuple[Callable[[], Served], set[str]]] = {
        "mixed": (lambda: mixed(folder, 1), set()),
        "scarce": (lambda: mixed(folder, 1, **SCARCE), set()),
        "host": (lambda: mixed(folder, 1, **HOST), set()),
        "ranks": (lambda: mixed(folder, 1, num_ranks=2), set()),
        "drafts": (lambda: drafted(folder, 1, **drafts), HOST_PLACES),
        "model": (lambda: drafted(folder, 1, **model), HOST_PLACES),
        "model, ranks": (lambda: drafted(folder, 1, num_ranks=2, **model), HOST_PLACES),
        "grammars": (lambda: guided(12), set()),
        "grammars, drafts": (lambda: guided(8, **drafts), HOST_PLACES),
        "blocks": (lambda: blocks(diffusing, 1), BLOCKS_WAIT),
    }
    num_operations = 0
    for name, (serve, may_wait) in mixes.items():
        served = serve()
        num_operations += served.num_launches
        files = {wait.rpartition(" at ")[2].partition(":")[0] for wait in served.waits}
        assert served.findings == [], name
        assert files <= may_wait, (name, served.waits)
    assert num_operations >= NUM_OPERATIONS
