"""Rounds of blocks are launched before the outcomes of the previous ones are known: the host does
not wait between them, and tokens are those of steps on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.sdar import write_sdar
from tests.support.cuda.serving import on_cpu, on_cuda
from tests.support.engines.block_engine import AheadEngine, BlockEngine
from worker.protocol.diffusion import DiffusionParams, DllmAlgorithm
from worker.protocol.sampling import SamplingParams
from worker.rank.diffusion.ahead import RoundAhead
from worker.rank.diffusion.decoder import BlockDecoder

GIVEN = [[5], list(range(10, 21)), [7, 3, 50] * 5]
ALGORITHMS: list[DllmAlgorithm] = ["LowConfidence", "EntropyBounded", "JointThreshold"]
ASKED = [
    SamplingParams(
        temperature=0.5 * index,
        top_k=20,
        seed=index,
        max_tokens=(6, 14, 9)[index],
        ignore_eos=True,
        stop_token_ids=(61,) if index == 1 else (),
        diffusion=DiffusionParams(
            algorithm=name, threshold=0.3, entropy_bound=3.0, max_post_edit_steps=2
        ),
    )
    for index, name in enumerate(ALGORITHMS)
]


@pytest.mark.long  # ranks as threads
def test_two_ranks_place_the_same_rounds(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_sdar(tmp_path, 4).folder
    given, asked = [GIVEN[0], GIVEN[2]], [ASKED[0], ASKED[2]]
    options: dict[str, Any] = {"kv_cache_tokens": 512, "cudagraph_capture_sizes": (4,)}
    served = on_cuda(folder, given, asked, kind=AheadEngine, num_ranks=2, **options)
    assert served.findings == []
    assert served.tokens == on_cpu(folder, given, asked, kind=BlockEngine, kv_cache_tokens=512)


def test_the_host_does_not_wait_between_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    folder = write_sdar(tmp_path, 4).folder
    called: list[str] = []
    for kind, name in ((RoundAhead, "run"), (BlockDecoder, "_run_rounds")):
        method: Callable[..., object] = getattr(kind, name)

        def noted(
            *arguments: object, method: Callable[..., object] = method, name: str = name
        ) -> object:
            called.append(name)
            return method(*arguments)

        monkeypatch.setattr(kind, name, noted)
    scarce: dict[str, Any] = {"kv_cache_tokens": 48, "cudagraph_capture_sizes": (1, 4)}
    served = on_cuda(folder, GIVEN, ASKED, kind=AheadEngine, **scarce)
    # Steps with prompts run on the host, and are the only ones to wait. As pages are scarce, there
    # are such steps after rounds ahead, too: the host has the blocks again.
    assert "_run_rounds" in called[called.index("run") :]
    assert called.count("run") > 10
    assert {wait.rpartition(" at ")[2].partition(":")[0] for wait in served.waits} == {
        "proposal.py"
    }
    assert served.findings == []
    assert served.tokens == on_cpu(folder, GIVEN, ASKED, kind=BlockEngine, kv_cache_tokens=512)
