"""Every family on CUDA generates the tokens of transformers or of an independent reference:
captured and eager steps, chunks, prefix hits, scarce pages, and two ranks on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.families import SPECIMENS, specimens, write_specimen
from tests.support.engines.engine_driver import Engine
from tests.support.engines.family_checks import (
    GREEDY,
    NUM_SCARCE,
    Checkpoint,
    greedy,
    make_prompts,
    scarce_pages,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=SPECIMENS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = Path(tmp_path_factory.mktemp(request.param))
    return Checkpoint(request.param, folder, write_specimen(request.param, folder))


def open_engine(checkpoint: Checkpoint, **options: object) -> Engine:
    options = {"kv_cache_tokens": 4096, "max_num_seqs": 8, **options}
    return Engine(str(checkpoint.folder), device="cuda", dtype="float32", **options)


def test_batched_then_hitting_prefixes(checkpoint: Checkpoint) -> None:
    prompts = make_prompts()
    with open_engine(checkpoint) as engine:
        checkpoint.check(prompts, engine.generate(prompts, GREEDY))
        checkpoint.check(prompts, engine.generate(prompts, GREEDY))


def test_chunks_and_scarce_pages(checkpoint: Checkpoint) -> None:
    prompts = make_prompts()
    with open_engine(checkpoint, **scarce_pages(str(checkpoint.folder))) as engine:
        outputs = engine.generate(prompts, greedy(NUM_SCARCE))
        assert engine.num_preemptions > 0, "pages were not scarce"
    checkpoint.check(prompts, outputs, NUM_SCARCE)


@pytest.mark.parametrize(
    "checkpoint", specimens(lambda specimen: "shards" in specimen.covers), indirect=True
)
def test_two_ranks_on_one_device(checkpoint: Checkpoint) -> None:
    prompts = make_prompts()
    with open_engine(checkpoint, tensor_parallel_size=2) as engine:
        checkpoint.check(prompts, engine.generate(prompts, GREEDY))
