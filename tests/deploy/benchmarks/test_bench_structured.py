"""The benchmark of constrained decoding on the demo model, with a tiny workload."""

from __future__ import annotations

import json

import pytest

from deploy.benchmarks.ab.structured import GRAMMARS
from deploy.benchmarks.cli import main
from tests.support.engines.forked_rank import forking_ranks


def test_every_kind_of_grammar_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "4096")
    load = ("--pairs", "1", "--streams", "2", "--max-tokens", "8", "--input-len", "4")
    with forking_ranks():
        assert main(["structured", *engine, *load, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == [f"ratio_{kind}" for kind in GRAMMARS]
    for kind in GRAMMARS:
        assert 0 < result[kind]["tokens"] <= 2 * 8
        assert result[kind]["constrained_tokens_per_second"] > 0.0
        assert result[kind]["spread"]["count"] == 1
