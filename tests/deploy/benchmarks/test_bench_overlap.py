"""The overlap benchmark on the real engine with a tiny model, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench.turns import Turns
from deploy.benchmarks.ab.options import OverlapOptions
from deploy.benchmarks.ab.overlap import summarise
from deploy.benchmarks.cli import main
from deploy.benchmarks.engine import DecodeTurn
from deploy.benchmarks.idle import idle_checks
from tests.support.engines.forked_rank import forking_ranks
from worker.config import EngineConfig

PHASES = ("schedule", "broadcast", "prepare", "forward", "sample", "collect", "process", "bubble")


def test_figures_checks_and_picture(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "4096")
    load = ("--running", "1,8", "--pairs", "2", "--steps", "8")
    plot = tmp_path / "timelines.png"
    argv = ("overlap", "--model", str(tiny_chat_model), *engine, *load, "--json")
    with forking_ranks():
        assert main([*argv, "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == ["ratio_1", "hidden_8", "ratio_8"]
    for running in (1, 8):
        for depth in (0, 1):
            figures = result[f"depth_{depth}_{running}"]
            assert all(figures[f"{phase}_us"] >= 0.0 for phase in PHASES)
            assert figures["tokens_per_second"] * figures["wall_us"] == pytest.approx(running * 1e6)
        assert result[f"spread_{running}"]["ratio"]["count"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")


def turn(wall: float, prepare: float, compute: float) -> DecodeTurn:
    bubble = wall - prepare - compute
    phases = {"prepare": prepare, "forward": compute - 1.0, "sample": 1.0, "bubble": bubble}
    return DecodeTurn(wall_us=wall, phases_us=phases, records=())


def test_hidden_is_the_part_of_the_host_time_that_no_longer_shows() -> None:
    serial = [turn(100.0, 10.0, 70.0)] * 3
    overlapped = [turn(85.0, 10.0, 70.0), turn(80.0, 10.0, 70.0), turn(100.0, 10.0, 70.0)]
    figures = summarise(8, Turns({"0": serial, "1": overlapped}))
    assert figures["hidden_8"] == pytest.approx(0.75)
    assert figures["hidden_with_prepare_8"] == pytest.approx(0.5)
    assert figures["ratio_8"] == pytest.approx(100 / 85)
    assert figures["spread_8"]["hidden"]["low"] == pytest.approx(0.0)
    assert figures["spread_8"]["hidden"]["high"] == pytest.approx(1.0)
    assert figures["depth_0_8"]["host_us"] == pytest.approx(20.0)


def test_a_device_idles_from_a_draw_to_the_next_forward_pass() -> None:
    overlapped = [turn(1000.0, 5.0, 975.0), turn(1000.0, 5.0, 980.0), turn(2000.0, 6.0, 1900.0)]
    serial = [turn(1200.0, 10.0, 975.0)] * 3
    figures = summarise(8, Turns({"0": serial, "1": overlapped}))
    assert figures["idle_gap_us_8"] == pytest.approx(25.0)
    assert figures["idle_share_8"] == pytest.approx(0.025)
    found = [(check.name, check.holds) for check in idle_checks([(25.0, 0.025), (90.0, 0.04)])]
    assert found == [("idle_gap_us", True), ("idle_share", False)]


def test_options_are_checked() -> None:
    engine = EngineConfig.of(model="m")
    with pytest.raises(ValueError, match="--pairs"):
        OverlapOptions(engine=engine, pairs=0)
    with pytest.raises(ValueError, match="--running"):
        OverlapOptions(engine=engine, running=(0,))
