"""Rounds of canvases replay graphs by number of canvases, with the tokens of steps on CPU; the host
only waits for the end of each round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.canvases import LENGTH, write_canvases
from tests.support.cuda.clocks import Graph
from tests.support.cuda.serving import on_cpu, on_cuda
from tests.support.engines.block_engine import BlockEngine
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import SamplingParams

GIVEN = [[5], list(range(10, 21)), [7, 3, 50] * 5]
ASKED = [
    SamplingParams(
        temperature=1.0,
        seed=steps,
        max_tokens=LENGTH,
        ignore_eos=True,
        diffusion=DiffusionParams(steps=steps),
    )
    for steps in (2, 3, 5)
]


def test_rounds_replay_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    write_canvases(tmp_path)
    replays: list[Graph] = []
    replay = Graph.replay

    def replayed(graph: Graph) -> None:
        replays.append(graph)
        replay(graph)

    monkeypatch.setattr(Graph, "replay", replayed)
    served = on_cuda(str(tmp_path), GIVEN, ASKED, kind=BlockEngine, cudagraph_capture_sizes=(1, 2))
    assert served.findings == []
    assert {wait.rpartition(" at ")[2].partition(":")[0] for wait in served.waits} == {"canvas.py"}
    assert served.tokens == on_cpu(str(tmp_path), GIVEN, ASKED, kind=BlockEngine)
    # Two rounds of three canvases run eagerly, then one of two canvases, and two of one.
    assert [graph is replays[0] for graph in replays] == [True, False, False]
