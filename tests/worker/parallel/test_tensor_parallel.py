"""Ranks in processes of their own, over Gloo, against one rank."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from plan_driver import generate, make_runner
from tensor_parallel_rank import run_rank, scenario

# Exact ties aside, sums in another order move fp32 logits by about this much.
TOLERANCE = 1e-4


def run_ranks(
    world_size: int, folders: list[str], directory: Path, **options: object
) -> list[tuple[list, torch.Tensor, torch.Tensor]]:  # type: ignore[type-arg]  # saved as is
    context = multiprocessing.get_context("forkserver")
    # The server imports torch once for all ranks.
    context.set_forkserver_preload(["worker.engine.runner"])
    processes = [
        context.Process(target=run_rank, args=(rank, world_size, folders, options, str(directory)))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=200)
        assert process.exitcode == 0
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    torch.set_num_threads(1)
    names = ("llama", "qwen2", "qwen3")
    folders = [tmp_path_factory.mktemp(name) for name in names]
    for name, folder in zip(names, folders, strict=True):
        write_checkpoint(name, Path(folder))
    return [str(folder) for folder in folders]


def test_two_ranks_equal_one(folders: list[str], tmp_path: Path) -> None:
    first, second = run_ranks(2, folders, tmp_path, batch_invariant=True)
    expected = []
    for folder in folders:
        runner = make_runner(folder)
        for requests in scenario(together=False):
            generate(runner, requests)
            expected.append(requests[0])
    for run, request in enumerate(expected):
        tokens, logits = first[0][run][0]
        torch.testing.assert_close(logits, torch.stack(request.logits), atol=TOLERANCE, rtol=0)
        assert tokens == request.tokens
    for mine, theirs in zip(first[0], second[0], strict=True):
        for (tokens, logits), (other_tokens, other_logits) in zip(mine, theirs, strict=True):
            assert tokens == other_tokens
            assert torch.equal(logits, other_logits)
    # Batch-invariant: alone and whole, or batched and chunked, at equal size: the same bits.
    for run in range(0, len(first[0]), 2):
        assert torch.equal(first[0][run][0][1], first[0][run + 1][0][1])
    assert first[1].tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_four_ranks_sum_in_fixed_order(folders: list[str], tmp_path: Path) -> None:
    results = run_ranks(4, folders[2:], tmp_path, batch_invariant=True)
    total = sum((torch.full((3,), rank + 0.1) for rank in range(4)), torch.zeros(3))
    for saved, _, ordered in results:
        assert torch.equal(saved[0][0][1], saved[1][0][1])
        assert torch.equal(ordered, total)
