"""`bench compare`: detects differences, and only those."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.bench.cli import main
from cluster.bench.compare import CompareOptions, run_compare
from tests.support.effort import IS_LONG

BETWEEN_RUNS = 0.1
"""Standard deviation between runs, as on a shared machine."""


def result(
    seed: int, *, slower: float = 1.0, count: int = 60, between: float = 0.0
) -> dict[str, Any]:
    """Result of `bench serve --save-detailed`, with a random factor per run."""
    random = np.random.default_rng(seed)
    waits, paces = np.exp(random.normal(0.0, between, 2))
    ttft = random.gamma(20.0, 0.01 * slower * waits, count)
    tokens = random.integers(8, 32, count)
    e2el = ttft + 0.02 * paces * random.gamma(50.0, 0.02, count) * (tokens - 1)
    return {
        "ttfts": ttft.tolist(),
        "e2els": e2el.tolist(),
        "output_lens": tokens.tolist(),
        "output_throughput": 1000.0 / slower / paces * math.exp(random.normal(0.0, 0.3 * between)),
    }


def save(path: Path, data: dict[str, Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
    return str(path)


def folders(path: Path, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> tuple[str, str]:
    """Files with the runs of both sides."""
    for side, runs in (("a", a), ("b", b)):
        for number, run in enumerate(runs):
            save(path / side / f"{number}.json", run)
    return str(path / "a"), str(path / "b")


def rows(a: str, b: str, tolerance: float = 0.02) -> dict[str, dict[str, Any]]:
    compared = run_compare(CompareOptions(a=a, b=b, tolerance=tolerance))
    return {row["figure"]: row for row in compared["rows"]}


def verdicts(a: str, b: str, tolerance: float = 0.02) -> dict[str, str]:
    return {name: row["verdict"] for name, row in rows(a, b, tolerance).items()}


@pytest.mark.parametrize("runs", [1, 2])
def test_fewer_than_three_runs_give_no_verdict(
    runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = folders(
        tmp_path,
        [result(seed, count=2000) for seed in range(runs)],
        [result(seed, count=2000, slower=1.1) for seed in range(10, 10 + runs)],
    )
    assert main(["compare", a, b, "--json"]) == 0
    output = capsys.readouterr()
    assert "At least 3 runs" in output.err
    compared = json.loads(output.out)
    assert {row["verdict"] for row in compared["rows"]} == {"not shown"}
    assert {row["low"] for row in compared["rows"]} == {None}
    found = {row["figure"]: row for row in compared["rows"]}
    assert found["mean_ttft_ms"]["b_over_a"] == pytest.approx(1.1, abs=0.02)


@pytest.mark.randomized  # with more draws
@pytest.mark.parametrize(
    ("runs", "seeded"),
    [
        (5, True),
        pytest.param(3, False, marks=pytest.mark.long),
        pytest.param(5, False, marks=pytest.mark.long),
    ],
)
def test_equal_systems_have_verdicts_in_about_one_of_twenty_comparisons(
    runs: int, seeded: bool, tmp_path: Path
) -> None:
    draws = 200 if IS_LONG else 100
    alarms, outside = 0, 0
    for draw in range(draws):
        sides = [
            [result(2000 * draw + 20 * side + i, between=BETWEEN_RUNS) for i in range(runs)]
            for side in (0, 1)
        ]
        if seeded:
            sides = [[{**run, "seed": i} for i, run in enumerate(side)] for side in sides]
        found = rows(*folders(tmp_path, *sides), tolerance=0.0)
        assert (found["mean_ttft_ms"]["runs"] == f"{runs} pairs") == seeded
        alarms += any(row["verdict"] in ("regression", "improvement") for row in found.values())
        outside += not found["mean_ttft_ms"]["low"] <= 1.0 <= found["mean_ttft_ms"]["high"]
    # Three standard deviations of a count around 5 % of them.
    assert alarms / draws <= 0.05 + 3.0 * math.sqrt(0.05 * 0.95 / draws)
    assert outside / draws <= 0.05 + 3.0 * math.sqrt(0.05 * 0.95 / draws)
    assert outside, "an interval that always holds 1 is too wide"


def test_five_runs_detect_a_slowdown_of_a_fifth(tmp_path: Path) -> None:
    found = 0
    for draw in range(40):
        a, b = folders(
            tmp_path,
            [result(100 * draw + i, between=0.05) for i in range(5)],
            [result(100 * draw + 50 + i, between=0.05, slower=1.2) for i in range(5)],
        )
        found += verdicts(a, b)["mean_ttft_ms"] == "regression"
        assert verdicts(b, a)["mean_ttft_ms"] != "regression"
    assert found >= 36


def test_runs_with_equal_seeds_are_paired_in_any_order(tmp_path: Path) -> None:
    """Durations may differ twofold between seeds."""
    seeds = range(4)
    a = [{**result(i, slower=1.0 + i), "seed": i} for i in seeds]
    b = [{**result(10 + i, slower=1.3 * (1.0 + i)), "seed": i} for i in reversed(seeds)]
    found = rows(*folders(tmp_path, a, b))
    assert found["mean_ttft_ms"]["runs"] == "4 pairs"
    assert found["mean_ttft_ms"]["verdict"] == "regression"
    unpaired = [{**run, "seed": 0} for run in b]
    found = rows(*folders(tmp_path, a, unpaired))
    assert found["mean_ttft_ms"]["runs"] == "4 and 4"
    assert found["mean_ttft_ms"]["verdict"] == "not shown"


def test_only_slower_metrics_are_regressions(tmp_path: Path) -> None:
    a, b = folders(
        tmp_path,
        [result(i, between=0.02) for i in range(4)],
        [result(10 + i, between=0.02, slower=1.5) for i in range(4)],
    )
    found = verdicts(a, b)
    assert found["mean_ttft_ms"] == found["p99_ttft_ms"] == "regression"
    assert found["output_throughput"] == "regression"
    assert found["mean_tpot_ms"] in ("within tolerance", "not shown")
    assert verdicts(b, a)["mean_ttft_ms"] == "improvement"
    assert set(verdicts(a, a, tolerance=0.2).values()) == {"within tolerance"}


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
        "output_throughput": ours["output_throughput"],
        "errors": [*[""] * len(ours["ttfts"]), "Bad Request"],
    }
    a = save(tmp_path / "a.json", {"stages": [{"label": "x", **ours}, {"label": "y", **ours}]})
    b = save(tmp_path / "b.json", {"stages": [{"label": "y", **theirs}]})
    found = run_compare(CompareOptions(a=a, b=b))["rows"]
    assert {row["stage"] for row in found} == {"y"}
    assert all(row["b_over_a"] == pytest.approx(1.0) for row in found)
    # A file of vLLM's is one run, whatever its --label says; it says null without one.
    whole = save(tmp_path / "whole.json", ours)
    for label in (None, "of a run"):
        vllm = save(tmp_path / "vllm.json", {"label": label, **theirs})
        found = run_compare(CompareOptions(a=whole, b=vllm))["rows"]
        assert all(row["b_over_a"] == pytest.approx(1.0) for row in found)


def test_a_regression_sets_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = folders(
        tmp_path, [result(i) for i in range(3)], [result(10 + i, slower=2.0) for i in range(3)]
    )
    assert main(["compare", a, b, "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["checks"][0]["holds"]
    assert main(["compare", a, a, "--json"]) == 0


def test_stages_that_fail_only_in_b_set_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty: dict[str, Any] = {"ttfts": [], "e2els": [], "output_lens": [], "output_throughput": 0.0}
    broken = {**empty, "errors": {"HTTP 503: no worker": 8}}
    stages = [{"label": "x", **result(1)}, {"label": "y", **result(2)}]
    a = save(tmp_path / "a.json", {"stages": stages})
    b = save(tmp_path / "b.json", {"stages": [stages[0], {"label": "y", **broken}]})
    assert main(["compare", a, b, "--json"]) == 1
    output = capsys.readouterr()
    assert "8 requests failed, all with: HTTP 503: no worker" in output.err
    assert {row["stage"] for row in json.loads(output.out)["rows"]} == {"x"}
    alone = save(tmp_path / "alone.json", broken)
    with pytest.raises(ValueError, match="HTTP 503"):
        run_compare(CompareOptions(a=a, b=alone))


def test_files_without_samples_are_rejected_with_a_remedy(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", {"mean_ttft_ms": 1.0})
    with pytest.raises(ValueError, match="--save-detailed"):
        run_compare(CompareOptions(a=a, b=a))
