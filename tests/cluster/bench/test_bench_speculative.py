"""`rayfleet bench speculative` with a draft model."""

from __future__ import annotations

from pathlib import Path

from cluster.bench.speculative import SpeculativeOptions, run_speculative
from worker.engine.config import EngineConfig

MODELS = Path(__file__).parents[3] / "deploy" / "models"


def test_both_engines_take_turns() -> None:
    engine = EngineConfig(
        model=str(MODELS / "demo"),
        device="cpu",
        kv_cache_tokens=4096,
        cpu_threads=1,
        speculative_method="draft",
        speculative_model=str(MODELS / "demo-draft"),
    )
    options = SpeculativeOptions(
        engine=engine,
        questions=str(MODELS / "demo_heldout.jsonl"),
        running=(1,),
        kinds=("heldout",),
        pairs=1,
        per_stream=1,
    )
    result = run_speculative(options)
    assert result["method"] == "draft"
    assert result["ratio_heldout_1"] > 0.0
    assert result["heldout_1"]["num_draft_tokens"] > 0
    assert {"interval_heldout_1", "ratio_heldout_1"} <= {c["name"] for c in result["checks"]}
