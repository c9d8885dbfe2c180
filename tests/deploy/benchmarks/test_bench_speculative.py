"""`python -m deploy.benchmarks speculative`, held-out prompts with a draft model."""

from __future__ import annotations

import pytest

from cluster.bench.turns import Turns
from cluster.cli.options import given_options
from cluster.cli.parser import CommandParser
from deploy.benchmarks.ab.options import SpeculativeOptions
from deploy.benchmarks.ab.speculative import plain_config, run, summarise
from deploy.benchmarks.cli import add_commands
from deploy.benchmarks.engine import Answer, Turn
from tests.support.engines.forked_rank import forking_ranks
from tests.support.paths import MODELS
from worker.config import EngineConfig, SpeculativeConfig
from worker.protocol.messages import LoadSnapshot
from worker.protocol.speculation import SpeculationTotals
from worker.protocol.times import StepTimes


def test_both_engines_take_turns() -> None:
    engine = EngineConfig.of(
        model=str(MODELS / "demo"),
        device="cpu",
        kv_cache_tokens=4096,
        cpu_threads=1,
        speculative_method="ngram",
        # On a busy machine the gate, which measures step times, might disable drafts.
        speculative_adaptive=False,
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
    with forking_ranks():
        result = run(options)
    assert result["heldout_1"]["method"] == "draft"
    assert result["ratio_heldout_1"] > 0.0
    assert result["heldout_1"]["num_draft_tokens"] > 0
    named = {check["name"] for check in result["checks"]}
    assert {"interval_heldout_1", "ratio_heldout_1", "min_ratio"} <= named


def test_each_kind_has_the_method_that_suits_it_unless_one_is_given() -> None:
    demo = {"model": str(MODELS / "demo")}
    best = SpeculativeOptions.from_flags(demo, {})
    assert best.engine.speculative == SpeculativeConfig(method="ngram")
    assert best.draft_model == str(MODELS / "demo-draft")
    assert best.questions == str(MODELS / "demo_heldout.jsonl")
    given = SpeculativeOptions.from_flags({**demo, "speculative_method": "ngram"}, {"pairs": 3})
    assert (given.draft_model, given.pairs) == ("", 3)


@pytest.mark.parametrize(
    ("config", "method", "plain_backend"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 2}', "mtp", "auto"),
        ('{"method": "eagle3", "model": "head", "speculative_revision": "v2"}', "eagle3", "torch"),
    ],
)
def test_heads_are_given_by_a_config_and_compared_on_their_backend(
    config: str, method: str, plain_backend: str
) -> None:
    parser = CommandParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["speculative", "--speculative-config", config])
    demo = {"model": str(MODELS / "demo")}
    options = SpeculativeOptions.from_flags(given_options(args, EngineConfig) | demo, {})
    assert options.draft_model == "", "the head drafts for all kinds of prompts"
    drafting = options.engine
    assert drafting.speculative is not None
    assert drafting.speculative.method == method
    plain = plain_config(drafting)
    assert plain.speculative is None
    assert plain.execution.cpu_backend == plain_backend


def test_what_is_expected_leaves_the_time_outside_of_the_rank_as_it_is() -> None:
    def turn(elapsed_s: float, busy_s: float, num_rows: int) -> Turn:
        totals = SpeculationTotals()
        return Turn(
            answers=[Answer(num_prompt=1, token_ids=[0] * 1000, num_rows=num_rows)],
            elapsed_s=elapsed_s,
            before=LoadSnapshot(speculation=totals),
            after=LoadSnapshot(speculation=totals, step_times=StepTimes(forward=busy_s)),
        )

    figures = summarise(Turns({"on": [turn(0.6, 0.4, 300)], "off": [turn(1.0, 0.8, 1000)]}))
    assert figures["ratio"] == pytest.approx(1.0 / 0.6)
    assert figures["expected_ratio"] == pytest.approx(1.0 / 0.6), "0.2 s are not the rank's"
    assert figures["tokens_per_step"] == pytest.approx(1000 / 300)
