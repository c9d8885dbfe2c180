"""LoRA adapters of a rank: equal to merged weights, and independent of each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints.adapters import merge_adapter, write_adapter
from tests.support.checkpoints.dense import VOCAB_SIZE, write_checkpoint
from tests.support.engines.plan_driver import Request, generate, make_runner
from worker.plan.plan import AdapterLoad, AdapterRead, Plan
from worker.rank.runner import ModelRunner

RANKS = (1, 3, 8, 16, 24, 4, 2, 12)
TARGETS = (
    *(("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("up_proj",), ("k_proj", "o_proj")),
    *(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),) * 4,
)
OPTIONS = {
    "batch_invariant": True,
    "cpu_backend": "torch",
    "max_num_seqs": 40,
    "kv_cache_tokens": 8192,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of unlike ranks, modules and scales."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(
            *(base, folder / str(number), rank),
            targets=TARGETS[number],
            seed=number,
            use_rslora=bool(number % 2),
        )
        for number, rank in enumerate(RANKS)
    ]


@pytest.fixture(scope="module")
def runner(base: Path, adapters: list[Path]) -> ModelRunner:
    runner = make_runner(
        str(base), enable_lora=True, max_loras=len(RANKS), max_lora_rank=24, **OPTIONS
    )
    load(runner, adapters)
    return runner


def load(runner: ModelRunner, folders: Sequence[Path]) -> None:
    """Loads adapters to the slots from 1 on."""
    reads = [AdapterRead(key, str(folder)) for key, folder in enumerate(folders, 1)]
    loads = [AdapterLoad(read.key, read.key) for read in reads]
    result = runner.execute(Plan(0, [], [], [], adapter_reads=reads, adapter_loads=loads))
    assert [(read.key, read.error) for read in result.adapters_read] == [
        (read.key, "") for read in reads
    ]


def requests(slot: int, adapter: int, count: int = 4) -> list[Request]:
    """Requests of one adapter that differ in prompt, arrival and length."""
    rng = np.random.default_rng(adapter)
    return [
        Request(
            prompt=rng.integers(0, VOCAB_SIZE, 5 + 9 * number).tolist(),
            new_tokens=6,
            slot=slot + number,
            arrival=number,
            adapter=adapter,
        )
        for number in range(count)
    ]


def test_eight_adapters_in_a_batch_equal_merged_weights_and_each_alone(
    base: Path, adapters: list[Path], runner: ModelRunner, tmp_path: Path
) -> None:
    batch = [requests(4 * number, number + 1) for number in range(len(RANKS))]
    plain = requests(36, 0)
    generate(runner, [*chain.from_iterable(batch), *plain], chunk=24)
    for number, (adapter, mine) in enumerate(zip(adapters, batch, strict=True), 1):
        alone = requests(0, number)[-1]
        alone.arrival = 0
        generate(runner, [alone], page_seed=number)
        assert alone.tokens == mine[-1].tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(mine[-1].logits))
        merged = make_runner(str(merge_adapter(base, adapter, tmp_path / str(number))), **OPTIONS)
        expected = requests(0, 0)
        for request, own in zip(expected, mine, strict=True):
            request.prompt = own.prompt
        generate(merged, expected)
        assert [request.tokens for request in expected] == [request.tokens for request in mine]
    without = make_runner(str(base), **OPTIONS)
    expected = requests(0, 0)
    generate(without, expected)
    for request, own in zip(expected, plain, strict=True):
        assert torch.equal(torch.stack(request.logits), torch.stack(own.logits))
    assert len({str(mine[-1].tokens) for mine in [*batch, plain]}) == 1 + len(RANKS)
