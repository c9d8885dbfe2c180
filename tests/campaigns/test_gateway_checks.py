"""Options and metrics of the check of CPU time per token."""

from __future__ import annotations

import pytest

from tests.campaigns.gateway.main import cell_of
from tests.campaigns.gateway.options import GatewayOptions


@pytest.mark.parametrize(
    "wrong", [{"output_len": 1}, {"streams": (0, 8)}, {"step_ms": 0.0}, {"rounds": 0}]
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GatewayOptions(**wrong)  # type: ignore[arg-type]


def test_cpu_time_is_counted_per_token_and_rays_own_apart() -> None:
    served = {"total_output_tokens": 2000, "errors": {}} | dict.fromkeys(
        ("completed", "failed", "duration", "output_throughput"), 1
    )
    served |= dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"), 1.0)
    cell = cell_of(served, {"proxy": 0.1, "gateway": 0.2, "ray_system": 1.0})
    assert cell["cpu_ms_per_token"] == pytest.approx(0.15)
    assert cell["cpu_ms_per_token_parts"] == pytest.approx({"proxy": 0.05, "gateway": 0.1})
    assert cell["ray_system_cpu_ms_per_token"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no token"):
        cell_of({**served, "total_output_tokens": 0}, {"ray_system": 1.0})
