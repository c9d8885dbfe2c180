"""Running blocks with all ops on Triton give the oracle's tokens and rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.attention import CapturableBackend
from tests.support.checkpoints.sdar import EOS, MASK, write_sdar
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_oracle import Terms, answer
from tests.support.engines.decode_plans import noting_replays
from worker.protocol.sampling import SamplingParams
from worker.rank.graphs import StepGraphs


@pytest.mark.checks(
    "triton", of="SDARForCausalLM", against="independent reference and uncached decoding"
)
@pytest.mark.parametrize(
    "is_static",
    [pytest.param(False, id="eager", marks=pytest.mark.long), pytest.param(True, id="static")],
)
def test_tokens_and_rounds(tmp_path: Path, is_static: bool) -> None:
    """Also on padded static buffers: like a graph, without the capture."""
    replayed: list[int] = []

    checkpoint = write_sdar(tmp_path, 4)
    prompts = [list(range(5, 14)), [9, 4, MASK]]
    with BlockEngine(
        checkpoint.folder,
        cpu_backend="torch",
        kv_cache_tokens=512,
        max_num_seqs=2,
        max_num_batched_tokens=12,
        dllm_threshold=0.3,
        dllm_disable=("early_exit",),
    ) as engine:
        runner = engine.runner
        if is_static:
            steps = (runner.run_model, runner.compute_logits, runner._tables)
            assert isinstance(runner._attention, CapturableBackend)
            runner._graphs = StepGraphs(
                *steps, (1, 4), noting_replays(replayed), show_progress=False
            )
        found = engine.serve(prompts, SamplingParams(temperature=0.0, max_tokens=6))
    for prompt, output in zip(prompts, found, strict=True):
        expected = answer(
            checkpoint.logits,
            prompt,
            block_size=4,
            mask=MASK,
            max_tokens=6,
            terms=Terms(threshold=0.3),
            ends=EOS,
        )
        assert (output.token_ids, output.rounds) == (expected.token_ids, expected.rounds)
    assert set(replayed) == ({1, 4} if is_static else set())
