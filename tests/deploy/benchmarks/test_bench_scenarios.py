"""Scenarios: traffic, figures, goals, and whole comparisons on an endpoint with known answers."""

from __future__ import annotations

import argparse
import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cluster.bench.arrivals import phased_arrival_times
from cluster.bench.client import Record
from cluster.bench.jobs.scenario_options import SCENARIOS, ScenarioRun
from cluster.bench.jobs.traffic import Planned, make_traffic, phases
from deploy.benchmarks.cli import add_commands
from deploy.benchmarks.scenarios.figures import by_priority, compared, figures
from deploy.benchmarks.scenarios.flags import scenario_run
from deploy.benchmarks.scenarios.fleets import DRAFTS, FIFO, OURS, serve_config
from deploy.benchmarks.scenarios.goals import scenario_checks
from deploy.benchmarks.scenarios.live import LiveTable
from deploy.benchmarks.scenarios.run import Effort, ScenarioBench
from deploy.benchmarks.scenarios.turn import Target, Turn, run_turn
from deploy.benchmarks.scenarios.watch import Moment, read_moment
from tests.support.cluster.openai_backend import Backend
from tests.support.worker.played_engine import INFO
from worker.config import SpeculativeConfig
from worker.metrics.collector import WorkerView, worker_metrics
from worker.metrics.latency import WorkerLatency
from worker.protocol.exposition import TEXT, render
from worker.protocol.messages import LoadSnapshot

EFFORT = Effort(warm_up=4, alone=5, per_place=3)
VOCABULARY = np.arange(10, 500)


def parsed(*argv: str) -> ScenarioRun:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="bench"))
    return scenario_run(parser.parse_args(["scenarios", *argv]))


def test_equal_seeds_give_equal_traffic() -> None:
    first = make_traffic("burst", 40.0, 5.0, VOCABULARY, seed=3)
    assert first == make_traffic("burst", 40.0, 5.0, VOCABULARY, seed=3)
    assert first != make_traffic("burst", 40.0, 5.0, VOCABULARY, seed=4)


def test_a_burst_rises_fortyfold_and_comes_down_again() -> None:
    assert phases("burst", 200.0, 20.0) == [(8.0, 5.0), (4.0, 200.0), (8.0, 5.0)]
    times = [one.arrival_s for one in make_traffic("burst", 200.0, 20.0, VOCABULARY, seed=0)]
    assert times == sorted(times)
    assert len(times) == 880
    assert sum(8.0 <= time <= 12.0 for time in times) >= 800


def test_phases_have_as_many_arrivals_as_their_rates_say() -> None:
    times = phased_arrival_times([(2.0, 50.0), (1.0, 0.0), (2.0, 10.0)], seed=1)
    assert sum(time <= 2.0 for time in times) == 100
    assert sum(time > 3.0 for time in times) == 20
    with pytest.raises(ValueError, match="phase"):
        phased_arrival_times([(0.0, 1.0)], seed=0)


def test_traffic_is_mixed_where_the_scenario_or_the_caller_says_so() -> None:
    steady = make_traffic("steady", 100.0, 10.0, VOCABULARY, seed=0)
    mixed = make_traffic("mixed_priority", 100.0, 10.0, VOCABULARY, seed=0)
    assert {one.priority for one in steady} == {4}
    assert {one.priority for one in mixed} == {1, 4, 7, 9}
    assert mixed == make_traffic("steady", 100.0, 10.0, VOCABULARY, seed=0, mixed=True)
    reworded = make_traffic("mixed_priority", 100.0, 10.0, VOCABULARY, seed=0, words=1)
    assert reworded != mixed
    assert [(len(one.prompt), one.priority) for one in reworded] == [
        (len(one.prompt), one.priority) for one in mixed
    ]
    assert [one.prompt for one in steady] == [one.prompt for one in mixed]
    lengths = np.log([len(one.prompt) for one in steady])
    assert lengths.std() > 0.5
    heads = [tuple(one.prompt[:64]) for one in steady]
    assert len(set(heads)) < 0.6 * len(heads), "most begin like others"


def test_long_prompts_stand_between_short_ones() -> None:
    lengths = [
        len(one.prompt) for one in make_traffic("long_short", 50.0, 10.0, VOCABULARY, seed=0)
    ]
    assert 20 <= sum(length >= 512 for length in lengths) <= 150
    assert max(lengths) <= 2048


def test_a_moment_is_read_from_one_fleets_series() -> None:
    loads = {
        ("fifo", "a"): LoadSnapshot(num_running=9, num_preemptions=7),
        ("rayfleet", "b"): LoadSnapshot(num_running=3, num_waiting=5, num_preemptions=2),
        ("rayfleet", "c"): LoadSnapshot(num_preemptions=1),
    }
    views = [WorkerView(*names, 1, INFO, load, WorkerLatency()) for names, load in loads.items()]
    text = "".join(render(worker_metrics(view), TEXT).decode() for view in views)
    assert read_moment(text, "rayfleet", 1.5) == Moment(
        at_s=1.5, num_waiting=5, num_running=3, num_busy_workers=1, num_workers=2, num_preemptions=3
    )


def turn(*ttft_ms: float, priority: int = 4) -> Turn:
    """Requests of 10 tokens each, one every 2 ms, of which an SLO allows 15 times 10 ms."""
    planned = [
        Planned(
            index=index,
            arrival_s=0.0,
            prompt=[1] * 20,
            output_len=10,
            priority=priority,
            slo_factor=15.0,
        )
        for index in range(len(ttft_ms))
    ]
    records = [
        Record(
            index=index,
            prompt_len=20,
            requested_len=10,
            ttft=ms / 1e3,
            latency=ms / 1e3 + 0.018,
            itl=[0.002] * 9,
            output_len=10,
            cached_tokens=5,
        )
        for index, ms in enumerate(ttft_ms)
    ]
    moments = [
        Moment(
            at_s=at,
            num_waiting=4,
            num_running=2,
            num_busy_workers=1,
            num_workers=2,
            num_preemptions=count,
        )
        for at, count in ((0.0, 3), (0.5, 7))
    ]
    return Turn(planned=planned, records=records, moments=moments, base_s=0.01)


def test_figures_of_a_turn() -> None:
    found = figures(turn(10.0, 20.0, 30.0, 182.0))
    assert found["ttft_p50_ms"] == pytest.approx(25.0)
    assert found["itl_p50_ms"] == pytest.approx(2.0)
    assert found["tokens_per_second"] == pytest.approx(40 / 0.2)
    assert found["slo_miss"] == pytest.approx(0.25)
    assert found["hit_rate"] == pytest.approx(0.25)
    assert (found["preemptions"], found["queue_depth"], found["workers_busy"]) == (4, 4.0, 0.5)
    assert "urgent_slo_miss" not in found
    assert figures(turn(10.0, 200.0, priority=7))["urgent_slo_miss"] == pytest.approx(0.5)


def test_a_failed_request_misses_its_slo_and_has_no_times() -> None:
    broken = turn(10.0, 20.0)
    broken.records[1].error = "gone"
    found = figures(broken)
    assert (found["failed"], found["completed"]) == (1, 1)
    assert found["slo_miss"] == pytest.approx(0.5)
    assert found["ttft_p99_ms"] == pytest.approx(10.0)


def test_ratios_are_those_of_the_rounds() -> None:
    ours = [figures(turn(10.0)), figures(turn(20.0)), figures(turn(30.0))]
    other = [figures(turn(20.0)), figures(turn(20.0)), figures(turn(15.0))]
    found = compared(ours, other)
    assert found["ttft_p50_ratio"]["median"] == pytest.approx(1.0)
    assert found["ttft_p50_ratio"]["losing_rounds"] == [2]
    assert found["throughput_ratio"]["losing_rounds"] == [2]
    assert found["slo_miss_difference"]["median"] == 0.0


def test_what_cannot_be_measured_has_no_ratio_and_no_goal_is_met_by_it() -> None:
    """A busy machine may read a whole response at once, which must not break the report."""
    rounds = [figures(turn(10.0)) for _ in range(3)]
    at_once = [*rounds[:2], {**rounds[2], "itl_p99_ms": 0.0}]
    for pair in ((rounds, at_once), (at_once, rounds)):
        found = compared(*pair)
        assert math.isnan(found["itl_p99_ratio"]["median"])
        assert found["ttft_p50_ratio"]["median"] == pytest.approx(1.0)
        values = {"steady_itl_p99_ratio": found["itl_p99_ratio"]["median"]}
        assert [check.holds for check in scenario_checks(values)] == [False]


def test_priorities_are_compared_over_all_rounds() -> None:
    ours = [turn(10.0, 20.0), turn(30.0, 40.0), turn(7.0, priority=9)]
    other = [turn(10.0, 20.0), turn(80.0, 40.0), turn(7.0, priority=9)]
    found = by_priority(ours, other)
    assert set(found) == {"4", "9"}
    assert found["4"]["ratio"] == pytest.approx(39.7 / 78.8)
    assert found["4"]["interval_low"] <= found["4"]["ratio"] <= found["4"]["interval_high"]
    assert found["4"]["count"] == 4
    assert found["9"]["ratio"] == found["9"]["interval_high"] == pytest.approx(1.0)


def test_goals() -> None:
    low = {
        "steady_ttft_p99_ratio": 1.02,
        "burst_ttft_p99_ratio": 0.87,
        "burst_slo_miss_difference": 0.0,
        "burst_spec_ttft_p99_ratio": 1.03,
        "mixed_ttft_p50_ratio": 0.75,
        "mixed_urgent_ttft_p99_excess_steps": 3.0,
        "mixed_urgent_slo_miss": 0.01,
    }
    high = {
        "steady_throughput_ratio": 0.98,
        "burst_throughput_ratio": 1.0,
        "mixed_throughput_ratio": 0.97,
    }
    held = scenario_checks(low | high)
    assert sorted(check.name for check in held) == sorted(low | high)
    assert all(check.holds for check in held)
    missed = {n: v + 0.001 for n, v in low.items()} | {n: v - 0.001 for n, v in high.items()}
    assert not any(check.holds for check in scenario_checks(missed))


def test_fleets_differ_in_what_is_compared_alone() -> None:
    run = parsed("--model", "m", "--compare-fifo", "--workers", "1", "--max-num-seqs", "7")
    ours, fifo = serve_config(run).models
    assert (ours.name, fifo.name) == (OURS, FIFO)
    assert fifo.routing.routing_policy == "round-robin"
    rules, default = fifo.engine.scheduling, ours.engine.scheduling
    assert (rules.preempt_priority_gap, rules.admission.prefill_first_steps) == (0, 0)
    plain = fifo.engine.with_options(
        preempt_priority_gap=default.preempt_priority_gap,
        prefill_first_steps=default.admission.prefill_first_steps,
        max_prefill_share=default.admission.max_prefill_share,
    )
    assert plain == ours.engine
    assert default.max_num_seqs == 7
    plain_model, drafts = serve_config(parsed("--model", "m", "--speculative-compare")).models
    assert plain_model.engine.speculative is None
    assert drafts.engine.speculative == SpeculativeConfig(method="ngram")
    assert drafts.name == DRAFTS


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="mutually exclusive"):
        parsed("--model", "m", "--compare-fifo", "--speculative-compare")
    with pytest.raises(ValueError, match="--duration"):
        parsed("--model", "m", "--duration", "0")
    assert parsed("--model", "m").options.scenarios == SCENARIOS
    assert parsed("--model", "m", "--scenario", "burst", "steady").options.scenarios == (
        "burst",
        "steady",
    )


def test_only_rayfleet_receives_priorities(backend: Backend) -> None:
    traffic = make_traffic("mixed_priority", 20.0, 0.5, VOCABULARY, seed=0)
    for tells in (True, False):
        found = run_turn(
            Target(base_url=backend.url, name="toy", sends_urgency=tells), traffic, 0.01
        )
        assert not any(record.error for record in found.records)
    ours, other = backend.bodies[:10], backend.bodies[10:]
    assert sorted(body["priority"] for body in ours) == sorted(one.priority for one in traffic)
    assert all(body["slo"]["ttft_ms"] > 0.0 for body in ours)
    assert not any("priority" in body or "slo" in body for body in other)
    key = str
    assert sorted((body["prompt"] for body in ours), key=key) == sorted(
        (body["prompt"] for body in other), key=key
    )


def test_a_whole_comparison(backend: Backend, tiny_chat_model: Path, tmp_path: Path) -> None:
    backend.pace_s = 0.001
    run = parsed(
        *("--model", str(tiny_chat_model), "--compare-fifo", "--rounds", "3", "--duration", "0.4"),
        *("--scenario", "mixed_priority", "--workers", "1", "--max-num-seqs", "2"),
        *("--plot", str(tmp_path / "plots")),
    )
    targets = {
        name: Target(base_url=backend.url, name=name, sends_urgency=name == OURS)
        for name in (OURS, FIFO)
    }
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveTable((OURS, FIFO), screen) as live:
        result = ScenarioBench(run, targets, live, EFFORT).run()
        screen.print(live.table())
    assert result["failed"] == 0
    assert result["sustainable_rps"] > 0.0
    assert result["mixed_priority"]["rps"] == pytest.approx(1.3 * result["sustainable_rps"])
    assert [check["name"] for check in result["checks"]] == [
        "mixed_ttft_p50_ratio",
        "mixed_urgent_ttft_p99_excess_steps",
        "mixed_urgent_slo_miss",
        "mixed_throughput_ratio",
    ]
    for name in ("mixed_ttft_p50_ratio", "mixed_throughput_ratio"):
        assert result[name] == result["mixed_priority"]["over_fifo"][name[6:]]["median"] > 0.0
    assert (tmp_path / "plots" / "mixed_priority.png").read_bytes().startswith(b"\x89PNG")
    shown = screen.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    for row in ("tokens/s", "TTFT p99", "SLO violations", "KV hit rate", "preemptions", "queue"):
        assert row in shown


def test_drafts_are_compared_priority_by_priority(backend: Backend, tiny_chat_model: Path) -> None:
    backend.pace_s = 0.001
    run = parsed(
        *("--model", str(tiny_chat_model), "--speculative-compare", "--duration", "0.3"),
        *("--scenario", "burst", "--rps", "100"),
    )
    targets = {name: Target(base_url=backend.url, name=name) for name in (OURS, DRAFTS)}
    with LiveTable((OURS, DRAFTS)) as live:
        result = ScenarioBench(run, targets, live, EFFORT).run()
    assert [check["name"] for check in result["checks"]] == ["burst_spec_ttft_p99_ratio"]
    assert result["sustainable_rps"] == 0.0
