"""Warm-up steps are within the engine's limits, and include the largest."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from worker.config import EngineConfig
from worker.plan.plan import BlockRow, Plan
from worker.rank.warmup import (
    CACHE_VARIABLE,
    choose_kernel_cache,
    warm_up,
    warm_up_limits,
)

VOCAB_SIZE = 50
MASK_BYTES = 8


def steps_of(
    max_model_len: int, block_size: int = 1, canvas_length: int = 0, **options: object
) -> tuple[EngineConfig, list[tuple[Plan, bytes]]]:
    config = EngineConfig.of(model="m", **options)
    limits = warm_up_limits(
        config, max_model_len=max_model_len, block_size=block_size, canvas_length=canvas_length
    )
    ran: list[tuple[Plan, bytes]] = []

    def execute(plan: Plan, masks: bytes) -> None:
        ran.append((plan, masks))

    warm_up(execute, limits, vocab_size=VOCAB_SIZE, show=False)
    return config, ran


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 100, 1000])
@pytest.mark.parametrize("max_model_len", [9, 101, 5000])
def test_steps_are_within_limits_and_reach_them(
    max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int, block_size: int
) -> None:
    config, ran = steps_of(
        *(max_model_len, block_size),
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
    )
    totals = []
    for plan, masks in ran:
        lengths = [row.length for row in plan.rows]
        assert lengths == sorted(lengths), "decodes come first"
        assert sorted({row.slot for row in plan.rows}) == list(range(len(plan.rows)))
        assert len(plan.rows) <= config.scheduling.max_num_seqs
        assert all(length % block_size == 0 for length in lengths)
        assert sum(lengths) <= config.scheduling.max_num_batched_tokens
        assert max(lengths) < max_model_len, "what it samples has a place, too"
        known = {admit.slot: len(admit.token_ids) // 4 for admit in plan.admits}
        own = block_size if block_size > 1 else 0
        assert known == {row.slot: row.length - own for row in plan.rows}
        assert len(masks) == MASK_BYTES * len(plan.masked)
        totals.append(sum(lengths))
    prompts = totals[: totals.index(max(totals)) + 1]
    assert prompts[0] == block_size
    assert all(after <= 2 * before for before, after in pairwise(prompts))
    longest = min(max_num_batched_tokens, max_model_len - 1) // block_size * block_size
    most = min(max_num_batched_tokens // block_size * block_size, max_num_seqs * longest)
    assert prompts[-1] == most


def test_steps_of_canvases() -> None:
    """Known tokens, which sample nothing, canvases, which are done after one round, and both."""
    _, ran = steps_of(500, canvas_length=16, max_num_seqs=5, max_num_batched_tokens=100)
    counts = []
    for plan, _ in ran:
        kinds = {type(row) for row in plan.rows}
        assert len(kinds) == 1
        assert not any(row.num_samples for row in plan.rows) or kinds == {BlockRow}
        assert sum(row.length for row in plan.rows) <= 100
        if kinds == {BlockRow}:
            known = [row.length - 16 for row in plan.rows]
            assert known == [len(admit.token_ids) // 4 for admit in plan.admits]
            assert known in ([1], [1, 2], [0] * len(known))
            assert all(admit.block and admit.block.params for admit in plan.admits)
            counts.append(len(plan.rows))
    assert counts == [1, 2, 4, 5, 1, 2, 1, 1, 1], "sizes, both, kinds of sampling and processors"
    assert max(sum(row.length for row in plan.rows) for plan, _ in ran) == 100


def test_drafts_are_run_up_to_the_most() -> None:
    _, ran = steps_of(
        5000,
        speculative_method="ngram",
        num_speculative_tokens=20,
        max_num_batched_tokens=512,
    )
    drafted = [(plan, masks) for plan, masks in ran if plan.drafts_under_grammar]
    assert [plan.rows[0].num_samples for plan, _ in drafted] == [2, 3, 5, 9, 17, 21]
    assert all(len(masks) == MASK_BYTES * plan.rows[0].num_samples for plan, masks in drafted)


def test_without_drafts_none_are_run() -> None:
    _, ran = steps_of(5000)
    assert not any(plan.drafts_under_grammar for plan, _ in ran)


def test_progress_of_the_startup_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = EngineConfig.of(model="m", max_num_seqs=64, max_num_batched_tokens=1000)
    limits = warm_up_limits(config, max_model_len=5000, block_size=1)
    ran: list[Plan] = []
    for show in (False, True):
        assert not caplog.messages
        ran.clear()
        warm_up(lambda plan, _: ran.append(plan), limits, vocab_size=VOCAB_SIZE, show=show)
    assert len(caplog.messages) == 4
    assert caplog.messages[-1] == f"compiling kernels: 100 % of {len(ran)} kinds of steps"


def test_kernels_are_kept_elsewhere_where_the_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "new" / "triton"))
    choose_kernel_cache()
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "new" / "triton")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "triton"))
    choose_kernel_cache()
    assert CACHE_VARIABLE not in os.environ
