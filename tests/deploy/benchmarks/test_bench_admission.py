"""The admission benchmark on the real engine with a tiny model, and its goals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.benchmarks.ab.presets import PRESETS
from deploy.benchmarks.cli import main
from tests.support.engines.forked_rank import forking_ranks

FIGURES = (
    "a_ttft_p99_ratio",
    "a_ttft_p50_ratio",
    "b_short_ttft_p99_ratio",
    "b_short_ttft_p50_ratio",
    "b_ttft_p99_ratio",
    "tpot_p50_ratio",
    "throughput_ratio",
)


def test_both_settings_are_compared(
    tiny_chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "16384")
    load = ("--pairs", "1", "--num-prompts", "12", "--output-len", "3", "--budget", "64")
    argv = ["admission", "--model", str(tiny_chat_model), *engine, *load, "--json"]
    with forking_ranks():
        assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == list(FIGURES)
    assert all(result[name] > 0.0 for name in FIGURES)
    for part, name in (("a", "ttft_p50_ms"), ("b", "short_ttft_p99_ms")):
        assert all(result[part][policy][name] > 0.0 for policy in ("pack", "fifo"))


def test_goals() -> None:
    held = dict.fromkeys(FIGURES, 0.3) | {"throughput_ratio": 1.0}
    assert all(check.holds for check in PRESETS["admission"].checks(held))
    missed = {
        "a_ttft_p99_ratio": 0.71,
        "a_ttft_p50_ratio": 0.41,
        "b_short_ttft_p99_ratio": 0.41,
        "b_short_ttft_p50_ratio": 0.36,
        "b_ttft_p99_ratio": 1.11,
        "tpot_p50_ratio": 1.04,
        "throughput_ratio": 0.98,
    }
    assert not any(check.holds for check in PRESETS["admission"].checks(missed))
