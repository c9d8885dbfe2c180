from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy  # imports its parts when they are first used; statistics take a second

import cluster
from cluster.bench.stats import (
    bootstrap_interval,
    difference,
    estimate,
    mean,
    percentile,
    ratios,
    spread,
    spread_of_ratios,
    std,
)
from cluster.bench.turns import Turns, take_turns


def test_percentiles_interpolate_and_are_nan_without_values() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert all(math.isnan(value) for value in (percentile([], 99), mean([]), std([])))
    with pytest.raises(ValueError, match=r"\[0, 100\]"):
        percentile([1.0], 101)


def test_there_is_one_definition_of_a_percentile() -> None:
    """All reports use it: other definitions differ for few requests."""
    other = re.compile(
        r"(np|statistics)\.(nan)?(percentile|quantiles?|median|partition)\(|from statistics import"
    )
    folder = Path(cluster.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if other.search(path.read_text())}
    assert found == {"stats.py"}


@pytest.mark.parametrize("count", [3, 5, 11, 40])
def test_intervals_are_student_s_for_any_number_of_values(count: int) -> None:
    values = np.random.default_rng(count).gamma(3.0, 1.0, count).tolist()
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = estimate(values)
    assert found.value - found.half == pytest.approx(low)
    assert found.value + found.half == pytest.approx(high)
    assert (spread(values).interval_low, spread(values).interval_high) == pytest.approx((low, high))
    assert estimate(values).half == pytest.approx((high - low) / 2.0)
    above = scipy.stats.ttest_1samp(values, 2.0, alternative="greater").pvalue
    assert found.p_above(2.0) == pytest.approx(above)
    assert found.p_below(2.0) == pytest.approx(1.0 - above)


def test_unpaired_intervals_are_welch_s() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(1.0, 0.1, 4), random.normal(1.3, 0.5, 7)
    low, high = scipy.stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    found = difference(a, b)
    assert found.value - found.half == pytest.approx(low)
    assert found.value + found.half == pytest.approx(high)
    assert difference([1.0, 1.0], [1.0, 1.0]).half == 0.0


def test_a_single_value_has_no_interval() -> None:
    assert math.isnan(spread([2.0]).interval_low)
    assert math.isnan(estimate([2.0]).half)
    assert all(math.isnan(end) for end in bootstrap_interval(lambda picks: 1.0, 1))


def test_ratios_need_pairs() -> None:
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="pairs"):
        ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="baseline is 0"):
        ratios([1.0], [0.0])
    with pytest.raises(ValueError, match="requests failed"):
        ratios([1.0], [math.nan])


def test_bootstrap_is_deterministic() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2, 0.8]

    def middle(picks: object) -> float:
        return percentile([values[number] for number in picks], 50.0)  # type: ignore[attr-defined]

    low, high = bootstrap_interval(middle, len(values))
    assert (low, high) == bootstrap_interval(middle, len(values))
    assert 0.8 <= low <= 1.0 <= high <= 1.2


def test_intervals_of_ratios_are_those_of_the_logarithms() -> None:
    found = spread_of_ratios([0.1, 1.0, 2.0])
    assert 0.0 < found.interval_low < found.median == 1.0 < found.interval_high
    turned = spread_of_ratios([10.0, 1.0, 0.5])
    assert turned.interval_high == pytest.approx(1.0 / found.interval_low)
    assert math.isnan(spread_of_ratios([0.0, 1.0, 2.0]).interval_low)


def test_spread_has_median_and_range() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)


def test_the_order_of_the_variants_alternates() -> None:
    calls: list[tuple[str, int]] = []

    def variant(name: str):
        return lambda number: calls.append((name, number)) or number

    turns = take_turns({"a": variant("a"), "b": variant("b")}, 3, warmups=1)
    warm = [("b", 3), ("a", 3)]
    assert calls == [*warm, ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert turns.by_variant == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert turns.pairs("b", "a") == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        take_turns({"a": float}, 0)


def test_rounds_are_compared_in_pairs_with_lost_rounds() -> None:
    turns = Turns({"base": [10.0, 20.0, 10.0], "new": [12.0, 18.0, 15.0]})
    found = turns.comparison("new", "base", float)
    assert (found["arm"], found["baseline"]) == ("new", "base")
    assert found["ratios"] == [1.2, 0.9, 1.5]
    assert found["ratio"]["median"] == turns.ratio("new", "base", float).median == 1.2
    assert found["losing_rounds"] == [1]
    assert turns.median("base", float) == 10.0
