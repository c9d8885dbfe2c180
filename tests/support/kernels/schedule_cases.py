"""Attention schedules of steps: keys of the longest program, and number of programs with work. Run
by the interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from kernels.attention import AttentionMetadata, triton_schedule
from kernels.attention.triton_backend import TritonAttention
from kernels.attention.triton_schedule import Schedule
from kernels.registry import registry

NUM_SMS = 132
NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
"""Heads of Llama-3.1-8B."""


class Cost(NamedTuple):
    keys: int
    """Keys of the longest program."""
    programs: int
    """Programs with keys."""


STEPS: dict[str, tuple[Cost, Sequence[int], Sequence[int]]] = {
    "a row of 8k": (Cost(256, 256), [8192], ()),
    "4 rows of 128k": (Cost(8192, 512), 4 * [128 << 10], ()),
    "256 rows of 1k": (Cost(1024, 2048), 256 * [1024], ()),
    "a prompt of 8k": (Cost(8192, 2048), [8192], [8192]),
    "a row of 100k among 64": (Cost(8192, 512), [*(40 * [1000]), 100_000, *(23 * [1000])], ()),
    "a suffix of 64 on 30k": (Cost(8192, 256), [30_064], [64]),
    "short suffixes beside a prompt": (Cost(8192, 264), [900, 40_000, 300], [500, 5, 5]),
}
"""Maximum keys in one program and minimum programs, for rows of these lengths and numbers of
queries. Update them when splits improve."""


def schedule_of(name: str, device: str, *, is_bound: bool = False) -> Schedule:
    """The schedule of a decode or an extend; with `is_bound` the host only knows the total number
    of queries."""
    _, seq_lens, query_lens = STEPS[name]
    starts = None
    if query_lens:
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(device)
    metadata = AttentionMetadata(
        page_table=torch.zeros(len(seq_lens), 1, dtype=torch.int32).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
        seq_lens_host=seq_lens,
        query_start=starts,
        query_lens_host=() if is_bound else query_lens,
        num_queries=sum(query_lens) if is_bound else 0,
        page_size=max(seq_lens),
    )
    q = torch.empty(
        sum(query_lens) or len(seq_lens), NUM_QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16,
        device="meta",
    )  # fmt: skip
    with registry.using("triton"):
        ((_, schedule),) = TritonAttention().plan(metadata)._schedules(q, NUM_KV_HEADS)
    return schedule


def cost_of(name: str, schedule: Schedule) -> Cost:
    """Cost of the step with this schedule in one layer."""
    _, seq_lens, _ = STEPS[name]
    items = [item for item in schedule.items.tolist() if item[0] >= 0]
    keys = max(min(length, seq_lens[row]) for row, _, _, length, *_ in items)
    return Cost(keys, NUM_KV_HEADS * len(items))


def schedule_case(device: str, dtype: torch.dtype) -> None:
    """Checks that every key of every tile is computed once, a row's last tile first, and that
    partial outputs are disjoint."""
    for name, (budget, seq_lens, query_lens) in STEPS.items():
        schedule = schedule_of(name, device)
        assert not schedule.arrived.any()
        items = [item[:5] for item in schedule.items.tolist() if item[0] >= 0]
        places = []
        by_tile: dict[tuple[int, int], list[list[int]]] = {}
        for row, tile, *rest in items:
            by_tile.setdefault((row, tile), []).append(rest)
        assert list(by_tile) == [
            (row, tile)
            for row, length in enumerate(query_lens or [1] * len(seq_lens))
            for tile in reversed(range(-(-length // schedule.queries)))
        ]
        for (row, _), own in by_tile.items():
            assert [split for split, *_ in own] == list(range(len(own)))
            assert len({length for _, length, _ in own}) == 1
            assert own[0][1] * len(own) >= seq_lens[row]
            places += [place for _, _, place in own if len(own) > 1]
        assert places == list(range(len(places)))
        assert len(places) <= schedule.num_partials
        cost = cost_of(name, schedule)
        assert cost.keys <= budget.keys, name
        assert cost.programs >= budget.programs, name


def bounded_case(device: str, dtype: torch.dtype) -> None:
    """Checks that no fewer programs are listed if the host only knows the total number of
    queries."""
    for name, (_, _, query_lens) in STEPS.items():
        if query_lens:
            exact, bounded = (schedule_of(name, device, is_bound=one) for one in (False, True))
            listed = bounded.items[bounded.items[:, 0] >= 0]
            assert torch.equal(listed[:, :5], exact.items[exact.items[:, 0] >= 0][:, :5]), name
            assert bounded.num_partials >= exact.num_partials, name


def idle_device_case(device: str, dtype: torch.dtype) -> None:
    """Checks that a schedule for fewer programs has longer programs, which leaves multiprocessors
    idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_schedule, "TARGET_PROGRAMS", 64)
        name = "4 rows of 128k"
        assert cost_of(name, schedule_of(name, device)).keys > STEPS[name][0].keys
        name = "a row of 8k"
        programs = cost_of(name, schedule_of(name, device)).programs
        assert programs < NUM_SMS < STEPS[name][0].programs


SCHEDULE_CASES = [schedule_case, bounded_case, idle_device_case]
