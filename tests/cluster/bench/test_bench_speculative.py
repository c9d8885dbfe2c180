"""`rayfleet bench speculative`, held-out prompts with a draft model."""

from __future__ import annotations

import argparse

import pytest

from cluster.bench.speculative import SpeculativeOptions, run_speculative, summarise
from cluster.bench.speculative_engine import Turn
from cluster.bench.speculative_flags import add_speculative_flags, speculative_options
from tests.support.paths import MODELS
from worker.config import EngineConfig


def test_both_engines_take_turns() -> None:
    engine = EngineConfig(
        model=str(MODELS / "demo"),
        device="cpu",
        kv_cache_tokens=4096,
        cpu_threads=1,
        speculative_method="ngram",
    )
    options = SpeculativeOptions(
        engine=engine,
        questions=str(MODELS / "demo_heldout.jsonl"),
        running=(1,),
        kinds=("heldout",),
        pairs=1,
        draft_model=str(MODELS / "demo-draft"),
        per_stream=2,
        turn_s=0.0,
    )
    result = run_speculative(options)
    assert result["heldout_1"]["method"] == "draft"
    assert result["ratio_heldout_1"] > 0.0
    assert result["heldout_1"]["num_draft_tokens"] > 0
    named = {check["name"] for check in result["checks"]}
    assert {"interval_heldout_1", "ratio_heldout_1", "min_ratio"} <= named


def test_each_kind_has_the_method_that_suits_it_unless_one_is_given() -> None:
    def options(*given: str) -> SpeculativeOptions:
        parser = argparse.ArgumentParser()
        add_speculative_flags(parser)
        return speculative_options(parser.parse_args(["--model", str(MODELS / "demo"), *given]))

    best = options()
    assert best.engine.speculative_method == "ngram"
    assert best.draft_model == str(MODELS / "demo-draft")
    assert options("--speculative-method", "ngram").draft_model == ""


def test_what_is_expected_leaves_the_time_outside_of_the_rank_as_it_is() -> None:
    def turn(elapsed_s: float, busy_s: float, num_rows: int) -> Turn:
        return Turn(
            num_tokens=1000,
            elapsed_s=elapsed_s,
            num_steps=num_rows,
            busy_s=busy_s,
            num_rows=num_rows,
            num_draft_tokens=0,
            num_accepted_tokens=0,
        )

    figures = summarise([turn(0.6, 0.4, 300)], [turn(1.0, 0.8, 1000)])
    assert figures["ratio"] == pytest.approx(1.0 / 0.6)
    assert figures["expected_ratio"] == pytest.approx(1.0 / 0.6), "0.2 s are not the rank's"
