"""Console output of results: tables, or one JSON object."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from cluster.bench.console import NO_DATA, print_result, readable
from cluster.bench.report import at_most, checks_json, emit
from cluster.bench.stats import spread, spread_of_ratios
from deploy.benchmarks.scenarios.figures import compared


def printed(result: dict[str, Any]) -> list[str]:
    """Lines of the output to a pipe."""
    screen = io.StringIO()
    print_result(result, "bench it", Console(file=screen, width=200))
    return screen.getvalue().splitlines()


def cells(lines: list[str], name: str) -> list[list[str]]:
    """Cells of the rows with a cell `name`."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return [row for row in rows if name in row]


def turn(ttft_ms: float, tokens: float = 100.0) -> dict[str, float]:
    names = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    return {**dict.fromkeys(names, ttft_ms), "tokens_per_second": tokens, "slo_miss": 0.0}


def scenarios() -> dict[str, Any]:
    """Result of `scenarios --compare-fifo`."""
    result: dict[str, Any] = {"model": "demo", "rounds": 3}
    values = {}
    for scenario in ("steady", "burst", "mixed_priority", "long_short"):
        over = compared(
            [turn(10.0), turn(11.0), turn(30.0)], [turn(20.0, 50.0), turn(20.0), turn(20.0)]
        )
        rows = [
            {"fleet": name, **{f"figure_{number}": float(number) for number in range(14)}}
            for name in ("rayfleet", "fifo")
        ]
        result[scenario] = {"rps": 12.0, "rows": rows, "over_fifo": over}
        values |= {f"{scenario}_{name}": found["median"] for name, found in over.items()}
    checks = [at_most("steady_ttft_p50_ratio", values["steady_ttft_p50_ratio"], "", 1.02)]
    return {**result, **values, "failed": 0, "checks": checks_json(checks)}


def test_titles_of_narrow_tables_stay_on_one_line() -> None:
    lines = printed({"requests_by_worker": {"a": 20}})
    assert "requests_by_worker" in [line.strip() for line in lines]


def test_a_ratio_is_one_row_with_its_interval_and_the_rounds_lost() -> None:
    lines = printed(scenarios())
    rows = cells(lines, "ttft_p50_ratio")
    assert [row[0] for row in rows] == [
        "steady over_fifo",
        "burst over_fifo",
        "mixed_priority over_fifo",
        "long_short over_fifo",
    ]
    expected = spread_of_ratios([0.5, 0.55, 1.5])
    low, high = readable(expected.interval_low), readable(expected.interval_high)
    assert rows[0] == ["steady over_fifo", "ttft_p50_ratio", "0.55", f"{low} to {high}", "1 of 3"]


def test_a_summary_has_no_dotted_names_or_duplicates() -> None:
    lines = printed(scenarios())
    text = "\n".join(lines)
    assert ".interval" not in text
    assert ".median" not in text
    assert "over_fifo." not in text
    assert not cells(lines, "burst_ttft_p50_ratio"), "it has a row already"
    assert len(cells(lines, "steady_ttft_p50_ratio")) == 1, "among the checks"
    # A row per figure of each scenario, a column per fleet.
    assert cells(lines, "figure_7") == [["figure_7", "7", "7"]] * 4
    # The figures of five tables of ratios and four of fleets, with their frames.
    assert len(lines) < 140


def test_latencies_are_a_row_per_metric_and_no_data_is_a_dash() -> None:
    names = ("mean", "median", "p99")
    result = {f"{name}_{metric}_ms": math.nan for metric in ("ttft", "tpot") for name in names}
    lines = printed({**result, "completed": 0, "seed": 46218721})
    assert cells(lines, "ttft") == [["ttft", NO_DATA, NO_DATA, NO_DATA]]
    assert cells(lines, "seed") == [["seed", "46218721"]]


def test_siblings_and_half_widths_share_a_table() -> None:
    workloads = {
        name: {"mean_ttft_ratio": 0.9 + place / 10, "mean_ttft_ratio_ci": 0.05, "best_mean": "x"}
        for place, name in enumerate(("chat", "agents"))
    }
    lines = printed({"workloads": workloads, "spread_8": {"ratio": asdict(spread([1.0]))}})
    assert cells(lines, "chat") == [["chat", "0.9 ± 0.05", "x"]]
    assert cells(lines, "agents") == [["agents", "1 ± 0.05", "x"]]
    assert cells(lines, "spread_8") == [["spread_8", "ratio", "1", NO_DATA, NO_DATA]]


def test_numbers_are_short() -> None:
    values = (0.123456, 1234.56, 1234567.8, 0.00001234, 0.0, math.inf, None, True, 7)
    assert [readable(value) for value in values] == (
        ["0.1235", "1,235", "1,234,568", "1.234e-05", "0", NO_DATA, NO_DATA, "yes", "7"]
    )


def test_json_is_one_object_with_checks_and_null_for_no_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emit({"p99": math.nan, "rounds": [1.0, math.nan], "at": (1,)}, as_json=True, title="")
    assert json.loads(capsys.readouterr().out) == {
        "checks": [],
        "p99": None,
        "rounds": [1.0, None],
        "at": [1],
    }
    check = at_most("p99", math.nan, "ms", 1.0)
    assert not check.holds, "what was not measured keeps no goal"
    emit({"checks": checks_json([check])}, as_json=True, title="")
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert check == {"name": "p99", "value": None, "unit": "ms", "goal": "<= 1", "holds": False}
