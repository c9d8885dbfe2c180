"""Projected steps match current launches; none takes longer than a peer's."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from tests.support.cuda import goals
from tests.support.cuda.projection import STEPS_PROJECTED, project, table
from tests.support.paths import ROOT

pytestmark = pytest.mark.long


def test_no_step_is_projected_to_take_longer_than_a_peers() -> None:
    for step in STEPS_PROJECTED:
        projected = project(step)
        assert projected.ms <= projected.peer_ms, projected


def test_the_page_has_the_figures() -> None:
    """`python -m tests.support.cuda.projection` prints them."""
    assert table() in (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")


def test_goals_hold_by_projection() -> None:
    """`python -m tests.support.cuda.goals` prints the page's table."""
    assert [one for one in goals.goals() if not one.holds] == []
    assert goals.table() in (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
