"""Plans of decode steps with all features that captured graphs must support, and their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from tests.support.checkpoints.dense import VOCAB_SIZE
from worker.plan.plan import Admit, LogitsParams, PageWrite, Plan, PlannedRow, Row, StepResult
from worker.rank.runner import ModelRunner

SLOTS = (0, 3, 5, 6)
PAGES = (1, 4, 6, 7, 20)
NOBODYS_PAGES = (2, 3, 5, 8)
OPTIONS = {"kv_cache_tokens": 256, "page_size": 8, "cpu_backend": "torch"}
GRAPH_SIZES = (2, 4)
REPLAYS = [*(4, 4), *(2, 2), *(4, 4), *(4, 4), *(2, 2), 2]
"""Sizes of the replayed graphs: forward pass and sampling of each decode step, or only the forward
pass if a row has logits processors."""
TOKEN_SIZES = (4, 8, 16)
"""Numbers of tokens for which steps are captured."""
RAGGED_REPLAYS = [16, *REPLAYS[:-1], 4, REPLAYS[-1]]
"""Sizes of the replayed graphs if steps with prompts also replay graphs for their forward
passes."""
_MASK_WORDS = -(-VOCAB_SIZE // 32)
_ODD_TOKENS = np.full((1, _MASK_WORDS), 0xAAAAAAAA, dtype="<u4").tobytes()
_LOGITS_PARAMS = LogitsParams(num_prompt=5, frequency_penalty=1.5, num_logprobs=2)


def make_plans() -> list[tuple[Plan, bytes]]:
    """Prompts, then decodes in steps of 1 to 4; each Plan with its masks."""
    admits = [
        _admit(0, 7, 0.0, 0, 1.0),
        _admit(3, 4, 0.9, 0, 1.0),
        _admit(5, 6, 0.9, 0, 0.8),
        _admit(6, 5, 0.0, 0, 1.0, logits_params=_LOGITS_PARAMS),
    ]
    writes = [PageWrite(slot, 0, [slot + 1]) for slot in SLOTS]
    prompts: list[Row] = [
        PlannedRow(0, 0, 7, 1),
        PlannedRow(3, 0, 4, 1),
        PlannedRow(5, 0, 4, 0),
    ]
    masked: list[Row] = [
        PlannedRow(6, 0, 1, 0),
        PlannedRow(0, 10, 1, 1),
        PlannedRow(3, 6, 1, 1),
    ]
    last_but_one_of_prompt = PlannedRow(5, 4, 1, 0)
    return [
        (Plan(1, admits, writes, prompts), b""),
        # A row that does not sample.
        (
            Plan(
                2,
                [],
                [],
                [PlannedRow(0, 7, 1, 1), PlannedRow(3, 4, 1, 1), last_but_one_of_prompt],
            ),
            b"",
        ),
        # A new page.
        (Plan(3, [], [PageWrite(0, 1, [20])], [PlannedRow(0, 8, 1, 1)]), b""),
        (Plan(4, [], [], [PlannedRow(s, n, 1, 1) for s, n in ((3, 5), (5, 5), (0, 9))]), b""),
        # A grammar on the second sample, after a row that does not sample, then no grammar.
        (Plan(5, [], [], masked, masked=[1]), _ODD_TOKENS),
        (Plan(6, [], [], [PlannedRow(0, 11, 1, 1), PlannedRow(5, 6, 1, 1)]), b""),
        (Plan(7, [], [], [PlannedRow(6, 1, 4, 1)]), b""),
        # Logits processors sample outside of the graph.
        (Plan(8, [], [], [PlannedRow(0, 12, 1, 1), PlannedRow(6, 5, 1, 1)]), b""),
    ]


def plans_for(runner: ModelRunner) -> list[tuple[Plan, bytes]]:
    """The plans with a page table for each group of layers; each group has separate pages."""
    num_groups = len(runner._tables.group_tables)
    each = runner.hello().num_pages // num_groups
    plans = []
    for plan, masks in make_plans():
        writes = [
            PageWrite(
                write.slot, write.start, [page + group * each for page in write.page_ids], group
            )
            for write in plan.page_writes
            for group in range(num_groups)
        ]
        plans.append((msgspec.structs.replace(plan, page_writes=writes), masks))
    return plans


def run_plans(runner: ModelRunner) -> list[StepResult]:
    """Runs all plans in sequence."""
    return [runner.execute(plan, masks) for plan, masks in plans_for(runner)]


def run_plans_ahead(runner: ModelRunner) -> list[StepResult]:
    """Runs all plans, launching each before the results of the previous one are taken."""
    steps, results = [], []
    for plan, masks in plans_for(runner):
        steps.append(runner.sample(runner.forward(plan), masks))
        results += [step.result() for step in steps[-2:-1]]
    return [*results, steps[-1].result()]


def noting_replays(replayed: list[int]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Replacement for capturing a graph: a replay calls the function that a graph would repeat.

    Args:
        replayed: receives the size of each replayed graph: rows of a forward pass or of sampling,
            or tokens if rows have any length.
    """

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(launch, partial)

        def replay() -> None:
            what = launch.args[0]
            replayed.append(what if isinstance(what, int) else what.num_tokens or len(what.rows))
            launch()

        return replay

    return capture


def assert_same(
    results: list[StepResult], expected: list[StepResult], tolerance: float = 1e-4
) -> None:
    """Checks that tokens are equal, and log-probabilities almost equal."""
    assert [result.token_ids for result in results] == [other.token_ids for other in expected]
    for result, other in zip(results, expected, strict=True):
        for scored, reference in zip(result.logprobs or [], other.logprobs or [], strict=True):
            assert (scored is None) == (reference is None)
            if scored is not None and reference is not None:
                assert scored.logprobs == pytest.approx(reference.logprobs, abs=tolerance)
    assert expected[7].logprobs is not None
    assert results[4].token_ids[1] % 2, "masked"


def assert_same_state(runner: ModelRunner, other: ModelRunner, tolerance: float = 1e-4) -> None:
    """Checks that caches are equal, except for the row and page of padding."""
    for slot in SLOTS:
        assert torch.equal(runner._tables.token_pool[slot], other._tables.token_pool[slot])
    for mine, theirs in zip(runner._kv_caches.values(), other._kv_caches.values(), strict=True):
        torch.testing.assert_close(mine.k[[*PAGES]], theirs.k[[*PAGES]], atol=tolerance, rtol=0)
        assert not mine.k[[*NOBODYS_PAGES]].any(), "an unused page was written"


def _admit(
    slot: int, length: int, temperature: float, top_k: int, top_p: float, *,
    logits_params: LogitsParams | None = None,
) -> Admit:  # fmt: skip
    tokens = np.random.default_rng(slot).integers(0, VOCAB_SIZE, length).astype("<i4").tobytes()
    return Admit(slot, tokens, temperature, top_k, top_p, 0.0, slot + 40, logits_params)
