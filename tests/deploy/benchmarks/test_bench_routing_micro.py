from __future__ import annotations

import json

import pytest

from deploy.benchmarks.cli import main

FIGURES = {"decision_us_1k", "decision_us_128k", "decision_us_128k_session"}


def test_micro_reports_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workers", "4", "--blocks", "2048", "--decisions", "5", "--no-growth"]
    assert main(["router", "--micro", "--json", *small]) == 0
    result = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in result["checks"]}
    assert set(checks) == FIGURES | {"index_bytes_per_block"}
    for name in FIGURES:
        assert checks[name]["value"] == result[name] > 0.0
    assert 12.0 <= result["index_bytes_per_block"] < 75.0


def test_micro_grows_to_the_requested_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--workers", "4", "--max-workers", "8", "--blocks", "2048", "--max-blocks", "20480"]
    assert main(["router", "--micro", "--json", "--decisions", "2", *sizes]) == 0
    rows = json.loads(capsys.readouterr().out)["growth"]
    assert [(row["workers"], row["blocks"]) for row in rows] == [(4, 2048), (8, 2048), (4, 20480)]


def test_micro_refuses_an_index_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--micro", "--workers", "64", "--blocks", "100"]) == 2
    assert "--blocks" in capsys.readouterr().err
