"""Steps on graphs with FlashInfer attention: planned outside the graph, into its buffers.

FlashInfer and the capture are fakes: a replay calls the captured code.
"""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.attention.flashinfer_backend import FlashInferAttention
from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.decode_plans import (
    GRAPH_SIZES,
    OPTIONS,
    REPLAYS,
    assert_same,
    assert_same_state,
    noting_replays,
    run_plans,
)
from tests.support.engines.plan_driver import make_runner
from tests.support.kernels.flashinfer import FlashInfer
from worker.rank.graphs import StepGraphs


def test_each_replay_attends_to_what_its_step_planned(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_checkpoint("qwen3", tmp_path)
    own, captured = (make_runner(str(tmp_path), **OPTIONS) for _ in range(2))
    backend = FlashInferAttention(FlashInfer, torch.device("cpu"))
    captured._attention = backend
    replayed: list[int] = []

    with torch.inference_mode():
        captured._graphs = StepGraphs(
            *(captured.run_model, captured.model.compute_logits, captured._tables),
            *(GRAPH_SIZES, noting_replays(replayed, runs_first=True), backend),
            show_progress=False,
        )
    before = {size: step._wrapper.num_plans for size, step in backend._captured.items()}
    assert before == dict.fromkeys(GRAPH_SIZES, 1), "planned by the run before the capture"
    assert_same(run_plans(captured), run_plans(own))
    assert replayed == REPLAYS
    assert_same_state(captured, own)
    plans = sum(step._wrapper.num_plans for step in backend._captured.values()) - len(GRAPH_SIZES)
    assert plans == (len(REPLAYS) + 1) // 2, "one for each step on a graph"
