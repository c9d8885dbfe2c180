"""MTP and EAGLE-3 heads on fake devices: tokens equal plain decoding, no races, and the host never
waits for drafts, with and without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.checkpoints.eagle import LATENT, write_predicting
from tests.support.checkpoints.mtp import write_chain, write_with_head
from tests.support.cuda.serving import Served, on_cpu, on_cuda
from worker.plan.plan import Plan
from worker.protocol.sampling import SamplingParams
from worker.rank.runner import ModelRunner
from worker.rank.speculation.heads import HeadProposer
from worker.rank.steps import ForwardStep

DRAFTS: dict[str, Any] = {
    "speculative_adaptive": False,
    "speculative_max_utilization": 2.0,
    "num_speculative_tokens": 2,
    "cudagraph_capture_sizes": (4, 32),
    "max_model_len": 128,
}


def write_model(method: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Writes a model with a head; returns its folder and the options that draft with the head."""
    if method == "two mtp heads":
        return str(write_chain(folder, 2)), {"speculative_method": "mtp", **DRAFTS}
    if method == "mtp":
        return str(write_with_head("mimo", folder)), {"speculative_method": method, **DRAFTS}
    model, head = write_predicting(folder, LATENT if method == "eagle3 with latents" else {})
    return str(model), {"speculative_method": "eagle3", "speculative_model": str(head), **DRAFTS}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("mtp", marks=pytest.mark.long),
        "two mtp heads",
        pytest.param("eagle3", marks=pytest.mark.long),
        "eagle3 with latents",
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"enforce_eager": True}, marks=pytest.mark.long),
        pytest.param({"num_ranks": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_heads_draft_without_waits_and_races(
    tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    folder, drafts = write_model(method, tmp_path)
    generator = torch.Generator().manual_seed(5)
    given = [torch.randint(8, 97, (n,), generator=generator).tolist() for n in (5, 30, 17, 90)]
    asked = [
        SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=10, ignore_eos=True)
        for i in range(len(given))
    ]
    counts = {"graphs": 0, "steps": 0}

    def note(runner: ModelRunner) -> None:
        heads, forward = runner._heads, runner.forward
        assert isinstance(heads, HeadProposer)
        counts["graphs"] = len(heads._passes) + len(heads._follows)

        def counting(plan: Plan) -> ForwardStep:
            counts["steps"] += 1
            return forward(plan)

        runner.forward = counting  # type: ignore[method-assign]

    served: Served = on_cuda(folder, given, asked, meddle=note, **drafts, **options)
    assert served.tokens == on_cpu(folder, given, asked, max_model_len=128)
    assert served.findings == []
    assert served.waits == []
    assert (counts["graphs"] > 0) == ("enforce_eager" not in options)
    assert counts["steps"] < 12, "no draft was accepted: a request has 10 tokens after 3 chunks"
