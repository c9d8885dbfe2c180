"""Projected steps match current launches and binaries; none takes longer than a peer's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernels import linear, pack_quantized_linear_weight, registry
from kernels.linear import WeightCode
from kernels.linear.packed_codes import TILE_COLUMNS, TILE_DEPTH
from tests.support.cuda import goals
from tests.support.cuda.projection import STEPS_PROJECTED, project, table
from tests.support.kernels.aot import Binary, compiling_for
from tests.support.kernels.experts import make_codes
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


@pytest.mark.parametrize(("name", "code"), [("int4", "uint4b8"), ("fp8", "e4m3")])
def test_decoding_takes_as_many_instructions_as_projected(
    name: str, code: WeightCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By four warps, with groups of 128 input features, in a matmul of one row."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    codes, scaling = make_codes(64, 256, code=code, block=128, offset=0)
    compiled: list[Binary]
    with compiling_for(90) as compiled, registry.using("triton"):
        weight = pack_quantized_linear_weight(codes, scaling, dtype=torch.bfloat16)
        linear(torch.zeros(1, 256, dtype=torch.bfloat16), weight)
    (binary,) = compiled
    counted = binary.loop_instructions() * 4 * 32 / (TILE_COLUMNS * TILE_DEPTH)
    assert round(counted, 1) == goals.DECODING[name]
