"""`bench compare`: finds what is there, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.bench.cli import main
from cluster.bench.compare import CompareOptions, run_compare


def result(seed: int, *, slower: float = 1.0, count: int = 400) -> dict[str, Any]:
    """Of `bench serve --save-detailed`."""
    random = np.random.default_rng(seed)
    ttft = random.gamma(20.0, 0.01 * slower, count)
    tokens = random.integers(8, 32, count)
    e2el = ttft + 0.02 * random.gamma(50.0, 0.02, count) * (tokens - 1)
    return {
        "ttfts": ttft.tolist(),
        "e2els": e2el.tolist(),
        "output_lens": tokens.tolist(),
        "output_throughput": 1000.0 / slower + seed,
    }


def save(path: Path, data: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    return str(path)


def verdicts(a: str, b: str) -> dict[str, str]:
    rows = run_compare(CompareOptions(a=a, b=b))["rows"]
    return {row["figure"]: row["verdict"] for row in rows}


def test_a_slower_first_token_is_a_regression_and_the_rest_is_not(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", result(1))
    b = save(tmp_path / "b.json", result(2, slower=1.5))
    found = verdicts(a, b)
    assert found["mean_ttft_ms"] == found["p99_ttft_ms"] == "regression"
    assert found["mean_tpot_ms"] in ("within tolerance", "not shown")
    assert verdicts(b, a)["mean_ttft_ms"] == "improvement"


def test_equals_are_not_told_apart_and_the_interval_holds_the_ratio(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", result(1))
    b = save(tmp_path / "b.json", result(2))
    compared = run_compare(CompareOptions(a=a, b=b))
    assert not compared["failed"]
    for row in compared["rows"]:
        assert row["low"] <= row["b_over_a"] <= row["high"]
        assert row["low"] <= 1.0 <= row["high"]


def test_several_runs_also_compare_throughput(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / "a" / f"{number}.json", result(number))
        save(tmp_path / "b" / f"{number}.json", result(10 + number, slower=1.3))
    found = verdicts(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found["output_throughput"] == "regression"


def test_vllm_files_are_read_and_stages_are_matched_by_name(tmp_path: Path) -> None:
    ours = result(1)
    theirs = {
        "ttfts": [*ours["ttfts"], 0.0],  # a request that failed
        "itls": [
            *(
                [(end - first) / (count - 1)] * (count - 1)
                for first, end, count in zip(
                    ours["ttfts"], ours["e2els"], ours["output_lens"], strict=True
                )
            ),
            [],
        ],
        "output_lens": [*ours["output_lens"], 0],
    }
    a = save(tmp_path / "a.json", {"stages": [{"label": "x", **ours}, {"label": "y", **ours}]})
    b = save(tmp_path / "b.json", {"stages": [{"label": "y", **theirs}]})
    rows = run_compare(CompareOptions(a=a, b=b))["rows"]
    assert {row["stage"] for row in rows} == {"y"}
    assert all(row["b_over_a"] == pytest.approx(1.0) for row in rows)
    # A file of vLLM's is one run, whatever its --label says; it says null without one.
    whole = save(tmp_path / "whole.json", ours)
    for label in (None, "of a run"):
        vllm = save(tmp_path / "vllm.json", {"label": label, **theirs})
        rows = run_compare(CompareOptions(a=whole, b=vllm))["rows"]
        assert all(row["b_over_a"] == pytest.approx(1.0) for row in rows)


def test_a_regression_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = save(tmp_path / "a.json", result(1))
    b = save(tmp_path / "b.json", result(2, slower=2.0))
    assert main(["compare", a, b, "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["checks"][0]["holds"]
    assert main(["compare", a, a, "--json"]) == 0


def test_files_without_samples_are_refused_with_a_remedy(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", {"mean_ttft_ms": 1.0})
    with pytest.raises(ValueError, match="--save-detailed"):
        run_compare(CompareOptions(a=a, b=a))
