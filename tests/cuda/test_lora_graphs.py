"""LoRA on simulated devices: steps replay graphs with or without adapters; nothing races."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.adapters import TARGETS, write_adapter
from tests.support.checkpoints.dense import FEW_HEADS, write_checkpoint
from tests.support.cuda.serving import on_cpu, on_cuda, prompts
from tests.support.engines.adapter_engine import adapter_of, engine_with
from worker.protocol.sampling import SamplingParams
from worker.rank import adapters as adapters_module
from worker.rank.batch import Batch
from worker.rank.graphs import StepGraphs


class InCaller(ThreadPoolExecutor):
    """Runs work in the calling thread: other threads have no simulated device."""

    def submit(self, work: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_result(work(*arguments))
        return future


SIZES = (2, 64)


@pytest.mark.parametrize("of_vocabulary", [pytest.param(False, marks=pytest.mark.long), True])
def test_steps_replay_graphs_with_and_without_adapters(
    of_vocabulary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of the LM head are part of captured sampling."""
    torch.set_num_threads(1)
    base = tmp_path / "base"
    write_checkpoint("qwen3", base, **FEW_HEADS, tie_word_embeddings=False)
    targets = (*TARGETS, *(("embed_tokens", "lm_head") if of_vocabulary else ()))
    adapters = [
        write_adapter(base, tmp_path / str(number), rank, targets=targets, seed=number)
        for number, rank in enumerate((4, 24), 1)
    ]
    replayed = list[bool]()
    forward = StepGraphs.forward

    def noted(graphs: StepGraphs, batch: Batch) -> torch.Tensor:
        replayed.append(batch.has_adapters)
        return forward(graphs, batch)

    monkeypatch.setattr(StepGraphs, "forward", noted)
    monkeypatch.setattr(adapters_module, "ThreadPoolExecutor", InCaller)
    kind = engine_with(adapters)
    given = prompts(6)
    used = [adapter_of(prompt, 2) for prompt in given]
    assert set(used) == {0, 1, 2}
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 if adapter else 12, ignore_eos=True)
        for adapter in used
    ]
    options = {"enable_lora_embeddings": of_vocabulary}
    graphs = {"cudagraph_capture_sizes": SIZES}
    served = on_cuda(str(base), given, params, kind=kind, **graphs, **options)
    assert served.findings == []
    assert set(replayed) == {False, True}
    expected = on_cpu(str(base), given, params, kind=kind, **options)
    assert served.tokens == expected
