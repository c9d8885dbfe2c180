"""Offline benchmark of the real engine with a tiny model; only counts are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench.cli import main
from cluster.bench.throughput import ThroughputOptions, run_throughput
from tests.support.engines.forked_rank import forking_ranks
from worker.config import EngineConfig


def test_counts_and_names(tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "1024")
    load = ("--input-len", "8", "--output-len", "3", "--num-prompts", "4", "--num-warmups", "1")
    model = str(tiny_chat_model)
    argv = ("throughput", "--model", model, *engine, "--max-num-seqs", "2", *load, "--json")
    with forking_ranks():
        assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_requests"] == 4
    assert result["total_num_tokens"] == 4 * (8 + 3)
    assert result["total_output_tokens"] == 12
    assert result["max_num_seqs"] == 2
    assert result["tokens_per_second"] * result["elapsed_time"] == pytest.approx(44)
    assert result["requests_per_second"] * result["elapsed_time"] == pytest.approx(4)
    assert [check["holds"] for check in result["checks"]] == [True]


def test_the_cost_of_a_mode_needs_pairs(tiny_chat_model: Path) -> None:
    engine = EngineConfig.of(model=str(tiny_chat_model))
    with pytest.raises(ValueError, match="--rounds of at least 5"):
        ThroughputOptions(engine=engine, batch_invariant_cost=True, rounds=4)
    with pytest.raises(ValueError, match="at least 1"):
        run_throughput(ThroughputOptions(engine=engine, num_prompts=0))
