"""Blocks on CUDA: graphs over (blocks x positions) and steps ahead give the results of eager
passes."""

from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints.sdar import SdarCheckpoint, write_sdar
from tests.support.engines.block_engine import BlockEngine
from tests.support.engines.block_requests import prompts, sampling
from worker.llm import LLM
from worker.rank.graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = 8
OPTIONS = {
    "device": "cuda",
    "dtype": "float32",
    "batch_invariant": True,
    "kv_cache_tokens": 4096,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SdarCheckpoint:
    return write_sdar(tmp_path_factory.mktemp("sdar"), SIZE)


def test_graphs_come_to_the_same_tokens_and_rounds(checkpoint: SdarCheckpoint) -> None:
    found = []
    for enforce_eager in (True, False):
        options = {**OPTIONS, "enforce_eager": enforce_eager}
        with BlockEngine(checkpoint.folder, **options) as engine:
            assert isinstance(engine.runner._graphs, StepGraphs) != enforce_eager
            found.append(engine.serve(prompts(), sampling()))
    assert found[0] == found[1]


def test_steps_ahead_in_a_separate_process(checkpoint: SdarCheckpoint) -> None:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    found = []
    for depth in (0, 1):
        with LLM(checkpoint.folder, **OPTIONS, overlap_depth=depth) as llm:
            outputs = llm.generate(inputs, sampling(), detokenize=False)
            found.append([one.outputs[0].token_ids for one in outputs])
    assert found[0] == found[1]
