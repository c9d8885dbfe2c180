"""Steps on static buffers, padded as a captured graph needs them, against steps of their own size.

Only the capture itself is left out: a replay here calls what a graph would repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, write_checkpoint
from plan_driver import make_runner

from kernels import registry
from worker.engine.graphs import DecodeGraphs
from worker.engine.runner import ModelRunner
from worker.scheduler.plan import Admit, PageWrite, Plan, Row, StepResult, TokenRules

MASK_WORDS = -(-VOCAB_SIZE // 32)
ODD_TOKENS = np.full((1, MASK_WORDS), 0xAAAAAAAA, dtype="<u4").tobytes()
RULES = TokenRules(num_prompt=5, frequency_penalty=1.5, num_logprobs=2)


@pytest.fixture(autouse=True)
def _on_triton() -> Iterator[None]:
    torch.set_num_threads(1)
    with registry.using("triton"):
        yield


def admit(slot: int, length: int, *sampling: float, rules: TokenRules | None = None) -> Admit:
    tokens = np.random.default_rng(slot).integers(0, VOCAB_SIZE, length).astype("<i4").tobytes()
    temperature, top_k, top_p = sampling
    return Admit(slot, tokens, temperature, int(top_k), top_p, 0.0, slot + 40, rules)


def make_plans() -> list[tuple[Plan, bytes]]:
    """Slots 0, 3, 5 (and 6, by rules) compute their prompts, then decode in steps of 1 to 4."""
    admits = [
        admit(0, 7, 0.0, 0, 1.0),
        admit(3, 4, 0.9, 0, 1.0),
        admit(5, 6, 0.9, 0, 0.8),
        admit(6, 5, 0.0, 0, 1.0, rules=RULES),
    ]
    writes = [PageWrite(slot, 0, [slot + 1]) for slot in (0, 3, 5, 6)]
    prompts = [Row(0, 0, 7, True), Row(3, 0, 4, True), Row(5, 0, 4, False)]
    masked = [Row(6, 0, 1, False), Row(0, 10, 1, True), Row(3, 6, 1, True)]
    last_of_prompt = Row(5, 4, 1, False)
    return [
        (Plan(1, admits, writes, prompts), b""),
        # A prompt's last token but one draws nothing; slot 0 begins a page.
        (Plan(2, [], [], [Row(0, 7, 1, True), Row(3, 4, 1, True), last_of_prompt]), b""),
        (Plan(3, [], [PageWrite(0, 1, [20])], [Row(0, 8, 1, True)]), b""),
        (Plan(4, [], [], [Row(s, n, 1, True) for s, n in ((3, 5), (5, 5), (0, 9))]), b""),
        # A grammar on the second draw, behind a row that draws nothing, then none again.
        (Plan(5, [], [], masked, masked=[1]), ODD_TOKENS),
        (Plan(6, [], [], [Row(0, 11, 1, True), Row(5, 6, 1, True)]), b""),
        (Plan(7, [], [], [Row(6, 1, 4, True)]), b""),
        # Rules draw outside of the graph.
        (Plan(8, [], [], [Row(0, 12, 1, True), Row(6, 5, 1, True)]), b""),
    ]  # fmt: skip


def run(runner: ModelRunner) -> list[StepResult]:
    return [runner.execute(plan, masks) for plan, masks in make_plans()]


def test_padded_steps_on_static_buffers_draw_the_same(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    options = {"kv_cache_tokens": 256, "page_size": 8}
    own, static = make_runner(str(tmp_path), **options), make_runner(str(tmp_path), **options)
    expected = run(own)
    sizes: list[int] = []

    def capture(launch):  # type: ignore[no-untyped-def]
        def replay() -> None:
            sizes.append(launch.args[0])
            launch()

        return replay

    with torch.inference_mode():
        step = static._static_step(4)
    static._graphs = DecodeGraphs(step, (2, 4), capture, show_progress=False)
    results = run(static)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    # Forward and draw of each decode step; only the forward pass where rules draw.
    assert sizes == [*(4, 4), *(2, 2), *(4, 4), *(4, 4), *(2, 2), 2]
    assert all(token % 2 for token in results[4].token_ids[1:]), "masked"
    for result, other in zip(results, expected, strict=True):
        for scored, wanted in zip(result.logprobs or [], other.logprobs or [], strict=True):
            assert (scored is None) == (wanted is None)
            if scored is not None and wanted is not None:
                assert scored.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert results[7].logprobs is not None
    # Only the padding's row, and pages that no request holds, know of the padding.
    for slot in (0, 3, 5, 6):
        assert torch.equal(static._tables.token_pool[slot], own._tables.token_pool[slot])
    pages = [slot + 1 for slot in (0, 3, 5, 6)] + [20]
    for mine, theirs in zip(static._kv_caches, own._kv_caches, strict=True):
        torch.testing.assert_close(mine.k[pages], theirs.k[pages], atol=1e-4, rtol=0)
        assert not mine.k[[2, 3, 5, 8]].any(), "a page of nobody was written"
    assert bool((step._masks == -1).all())
