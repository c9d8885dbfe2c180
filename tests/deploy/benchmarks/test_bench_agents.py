"""Closed loops of agents: complete, deterministic, with correct figures."""

from __future__ import annotations

import json
from functools import partial

import pytest

from deploy.benchmarks.cli import main
from deploy.benchmarks.routing.agents.closed_loop import ClosedLoop, fleet_shape
from deploy.benchmarks.routing.agents.load import AgentLoad, Pace
from deploy.benchmarks.routing.agents.run import AgentOptions, simulate_agents
from deploy.benchmarks.routing.simulated import GatewayRouter
from router.config import RoutingConfig


def loop(pace: Pace, *, max_wait_s: float, host_share: float = 0.0, seed: int = 1) -> ClosedLoop:
    shape = fleet_shape(2, host_share)
    router = partial(GatewayRouter, RoutingConfig())
    made = ClosedLoop(AgentLoad(pace, seed), 5, shape, router, max_wait_s)
    made.run(100.0)
    return made


@pytest.mark.parametrize(("pace", "max_wait_s"), [("unattended", 600.0), ("people", 0.0)])
def test_turns_follow_each_other_and_a_second_run_is_the_same(
    pace: Pace, max_wait_s: float
) -> None:
    first, second = (loop(pace, max_wait_s=max_wait_s) for _ in range(2))
    assert [t.ended_at for t in first.ended] == [t.ended_at for t in second.ended]
    assert len(first.ended) > 5
    for turn in first.ended:
        assert turn.ended_at > turn.at + turn.first_token_s > turn.at
        assert 0 <= turn.cached_tokens < turn.prompt.num_tokens
        assert turn.wait_s == 0.0, "five sessions fit"
    assert any(not turn.is_first and turn.cached_tokens for turn in first.ended)


def test_recorded_gaps_belong_to_whole_sessions() -> None:
    session = AgentLoad("people", 1).session()
    gaps = [next(session.gaps) for _ in range(400)]
    assert 0.0 <= min(gaps) <= max(gaps) <= 300.0


def test_workers_have_the_host_tier_that_is_set() -> None:
    made = loop("unattended", max_wait_s=0.0, host_share=0.1)
    loads = [worker.load for worker in made._workers.values()]
    assert all(load.host_cache is not None for load in loads)
    assert all(
        worker.load.host_cache is None
        for worker in loop("people", max_wait_s=0.0)._workers.values()
    )


def test_the_command_reports_each_case_and_the_part_of_the_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--agents", "--gaps", "unattended", "--sessions", "2", "--seeds", "1"]
    main(["router", *flags, "--minutes", "1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["variant"] for row in result["rows"]] == ["gate", "no gate"]
    assert [check["name"] for check in result["checks"]] == ["unattended_turns_of_peak"]


def test_other_routers_serve_the_same_sessions() -> None:
    options = AgentOptions(minutes=2.0)
    figures = simulate_agents(options, "unattended", 3, 1, "sglang-cache-aware")
    assert 0.5 < figures.hit_rate <= figures.unlimited_hit_rate
    assert figures.longest_wait == 0.0


def test_several_gateways_serve_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    command = "router --gateways 2 --workload agents --seeds 1 --scale 0.06 --json"
    main(command.split())
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["gateways"] for row in rows] == [1, 2]
    assert all(0.0 < row["hit_rate"] < 1.0 for row in rows)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="choose from unattended, people"):
        AgentOptions(gaps=("all",))
    with pytest.raises(ValueError, match="--sessions"):
        AgentOptions(sessions=(0,))


def test_the_hit_rate_is_near_that_of_an_unlimited_cache_while_all_contexts_fit() -> None:
    figures = simulate_agents(AgentOptions(minutes=3.0), "unattended", 3, 1)
    assert 0.0 < figures.hit_rate == pytest.approx(figures.unlimited_hit_rate, abs=0.05)
