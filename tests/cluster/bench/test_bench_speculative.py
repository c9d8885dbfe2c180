"""`rayfleet bench speculative` with either method, on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.bench.speculative import SpeculativeOptions, run_speculative
from worker.engine.config import EngineConfig

MODELS = Path(__file__).parents[3] / "deploy" / "models"


@pytest.mark.parametrize(
    "speculation",
    [
        {"speculative_method": "ngram"},
        {"speculative_method": "draft", "speculative_model": str(MODELS / "demo-draft")},
    ],
    ids=lambda options: str(options["speculative_method"]),
)
def test_both_engines_take_turns(speculation: dict[str, Any]) -> None:
    engine = EngineConfig(
        model=str(MODELS / "demo"), device="cpu", kv_cache_tokens=4096, cpu_threads=1, **speculation
    )
    options = SpeculativeOptions(
        engine=engine,
        questions=str(MODELS / "demo_heldout.jsonl"),
        running=(1,),
        kinds=("copy",),
        pairs=1,
        per_stream=1,
    )
    result = run_speculative(options)
    assert result["method"] == speculation["speculative_method"]
    assert result["ratio_copy_1"] > 0.0
    assert {"interval_copy_1", "ratio_copy_1"} <= {check["name"] for check in result["checks"]}
