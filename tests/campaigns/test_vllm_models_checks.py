"""Checks of `make check-vllm-models`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.campaigns.vllm_models.main import _is_comparable, largest_gap, report
from tests.campaigns.vllm_models.variants import LEFT_OUT, REASONS, VARIANTS
from tests.support.checkpoints.families import SPECIMENS

OWN = [{3: -0.5, 4: -1.5, 5: -2.0}, {3: -3.0, 4: -0.25, 5: -1.0}]
"""Log-probabilities at two positions; the best tokens are 3 and 4."""


def other(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Output of the other engine."""
    return {"tokens": tokens, "logprobs": logprobs}


@pytest.mark.parametrize(
    ("tokens", "logprobs", "gap"),
    [
        pytest.param([3, 4], [-0.5, -0.25], 0.0, id="equal"),
        pytest.param([3, 4], [-0.625, -0.5], 0.25, id="largest position"),
        pytest.param([4, 9], [-1.5, -7.0], 1.0, id="other token"),
        pytest.param([3, 5], [-0.5, -1.0], 0.75, id="other token later"),
        pytest.param([4, 9], [-4.5, -7.0], 3.0, id="other token, other value"),
        pytest.param([3, 4], [-0.5, math.nan], math.inf, id="nan"),
    ],
)
def test_the_gap_is_the_largest_until_the_engines_choose_other_tokens(
    tokens: list[int], logprobs: list[float], gap: float
) -> None:
    assert largest_gap(OWN, other(tokens, logprobs)) == gap


def test_a_shorter_output_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        largest_gap(OWN, other([3], [-0.5]))


def test_each_kind_of_difference_has_its_check() -> None:
    known, other_known = list(REASONS)[:2]

    def failing(gaps: dict[str, float], *, is_whole: bool = False) -> set[str]:
        result = report(gaps, {}, is_whole=is_whole)
        return {check["name"] for check in result["checks"] if not check["holds"]}

    assert failing({"llama": 1e-5, known: 0.5}) == set()
    assert failing({"llama": 1.0, known: 0.5}) == {"unexplained_differences"}
    assert failing({"llama": math.inf}) == {"unexplained_differences"}
    assert failing({known: 1e-5, other_known: 0.5}) == {"reasons_without_a_difference"}
    assert failing({"llama": 1e-5, known: 0.5}, is_whole=True) == {"agreeing"}
    assert failing(dict.fromkeys(map(str, range(99)), 0.0), is_whole=True) == set()


def test_the_report_counts_families_and_gives_reasons() -> None:
    known = next(iter(REASONS))
    gaps = {"llama": 1e-5, "qwen2": 2e-5, known: 0.5, "phi": 0.25}
    result = report(gaps, {"falcon": "ValueError: no"}, is_whole=False)
    assert (result["agreeing"], result["largest_gap"]) == (2, 2e-5)
    assert result["different"] == {
        known: f"5.0e-01: {REASONS[known]}",
        "phi": "2.5e-01: unexplained",
    }
    assert result["no_path_in_vllm"] == {"falcon": "ValueError: no"}


def test_names_are_those_of_text_models() -> None:
    assert {*VARIANTS, *REASONS} <= {name for name in SPECIMENS if _is_comparable(name)}
    assert set(LEFT_OUT) <= SPECIMENS.keys()
