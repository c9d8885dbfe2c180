from __future__ import annotations

import pytest

from cluster.bench.alternate import alternate, compare
from cluster.bench.stats import bootstrap_interval, mean, percentile, ratios, spread, std


def test_percentiles_interpolate_and_empty_is_zero() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert percentile([], 99) == mean([]) == std([]) == 0.0
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], 101)


def test_ratios_need_pairs() -> None:
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="pairs"):
        ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="denominator"):
        ratios([1.0], [0.0])


def test_bootstrap_is_seeded_and_lies_within_the_values() -> None:
    values = [1.0, 1.1, 0.9, 1.05, 0.95, 1.2, 0.8]
    low, high = bootstrap_interval(values, seed=3)
    assert (low, high) == bootstrap_interval(values, seed=3)
    assert 0.8 <= low <= 1.0 <= high <= 1.2
    assert bootstrap_interval([2.0] * 4) == (2.0, 2.0)


def test_spread_holds_median_and_range() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)


def test_alternate_turns_the_order_round() -> None:
    calls: list[tuple[str, int]] = []

    def arm(name: str):
        return lambda number: calls.append((name, number)) or number

    results = alternate({"a": arm("a"), "b": arm("b")}, 3)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert results == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_compare_pairs_rounds_and_names_the_lost_ones() -> None:
    values = {"base": [10.0, 20.0, 10.0], "new": [12.0, 18.0, 15.0]}
    (found,) = compare(values, "base")
    assert found.arm == "new"
    assert found.ratios == (1.2, 0.9, 1.5)
    assert found.ratio.median == 1.2
    assert found.losing_rounds == (1,)
