"""The LoRA benchmark on a tiny model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.benchmarks.cli import main
from deploy.benchmarks.lora_options import LoraOptions
from tests.support.checkpoints.dense import write_checkpoint


def test_steps_with_and_without_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint("qwen3", tmp_path)
    load = ("--pairs", "2", "--num-adapters", "2", "--running", "3", "--input-len", "20")
    flags = ("--model", str(tmp_path), "--dtype", "float32", *load, "--json")
    assert main(["lora", *flags]) in (0, 1)  # a tiny model may miss the goals
    result = json.loads(capsys.readouterr().out)
    assert {check["name"] for check in result["checks"]} == {
        *("none_ratio", "mixed_ratio", "prompt_ratio")
    }
    for kind in ("none", "mixed", "prompt"):
        found = result[kind]
        assert 0.0 < found["low"] <= found["ratio"] <= found["high"]
        assert found["without_ms"] > 0.0


def test_counts_must_be_positive() -> None:
    with pytest.raises(ValueError, match="--num-adapters must be at least 1, got 0"):
        LoraOptions(num_adapters=0)
