"""Ranks in separate processes, over Gloo, against one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.forked_rank import RANK_FORKER
from tests.support.engines.plan_driver import generate, make_runner
from tests.support.engines.tensor_parallel_rank import (
    run_rank,
    run_rank_on_shared_device,
    run_rank_without_symmetric_memory,
    scenario,
)

# Exact ties aside, sums in another order move fp32 logits by about this much.
TOLERANCE = 1e-4


def run_ranks(
    world_size: int, folders: list[str], directory: Path, **options: object
) -> list[tuple[list, torch.Tensor, torch.Tensor]]:  # type: ignore[type-arg]  # saved as is
    arguments = [(rank, world_size, folders, options, str(directory)) for rank in range(world_size)]
    start_and_join(run_rank, arguments)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(world_size)]


def start_and_join(target: Callable[..., None], arguments: list[tuple[object, ...]]) -> None:
    processes = [RANK_FORKER.start(target, *each) for each in arguments]
    for process in processes:
        process.join(timeout=600)
        assert process.exitcode == 0


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


def test_ranks_that_share_a_gpu_meet_over_gloo(tmp_path: Path) -> None:
    names = ["GPU-a", "GPU-b", "GPU-a"]
    arguments = [(rank, names, str(tmp_path)) for rank in range(3)]
    start_and_join(run_rank_on_shared_device, arguments)
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    for total, side_by_side, _ in results:
        assert total.dtype == torch.bfloat16
        assert total.tolist() == [4.5] * 3
        assert side_by_side.tolist() == [[0.0, 1.0, 2.0]] * 2
    assert [together for _, _, together in results] == [
        [[0, 0], [2, 20]],
        [[1, 10]],
        [[0, 0], [2, 20]],
    ]


@pytest.mark.parametrize(("function", "begun"), [("empty", 0), ("rendezvous", 1)])
def test_a_rank_without_symmetric_memory_does_not_block_the_others(
    function: str, begun: int, tmp_path: Path
) -> None:
    """Rank 1 fails to allocate, or in the middle of the rendezvous, whose waits are short."""
    arguments = [(rank, function, str(tmp_path)) for rank in range(2)]
    start_and_join(run_rank_without_symmetric_memory, arguments)
    for rank in range(2):
        is_none, calls, total = torch.load(tmp_path / f"rank{rank}.pt")
        assert is_none
        assert calls == begun
        assert total.tolist() == [3.0] * 3
