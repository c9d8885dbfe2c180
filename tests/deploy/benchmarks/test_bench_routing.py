"""The simulation of routing: deterministic, complete, with correct figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cluster.bench.traces import TraceFile
from deploy.benchmarks.cli import main
from deploy.benchmarks.routing.figures import pooled_hit_rate, ratio_to_best
from deploy.benchmarks.routing.result_cache import routing_digest, simulation_digest
from deploy.benchmarks.routing.routers import find_routers
from deploy.benchmarks.routing.simulated import Clock, GatewayRouter, Placement
from deploy.benchmarks.routing.simulation import Outcome, Simulation
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival, FleetShape, Workload
from deploy.benchmarks.routing.workloads import trace_workload, workloads
from router import config
from router.config import RoutingConfig
from router.fleet import PromptBlocks
from tests.support.effort import IS_LONG
from worker.protocol.blocks import block_hash_array
from worker.protocol.messages import StepReport

NAMES = sorted(workloads(0.02, None))


def simulate(workload: Workload, name: str = "adaptive") -> list[Outcome]:
    [entry], _ = find_routers((name,))
    return Simulation(workload, lambda clock: entry.create({}, 1, clock)).run()


@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_served_and_a_second_run_is_the_same(name: str) -> None:
    workload = workloads(0.015, None)[name](3)
    first, second = simulate(workload), simulate(workload)
    assert len(first) == len(workload.arrivals)
    for a, b in zip(first, second, strict=True):
        assert (a.arrival, a.placement) == (b.arrival, b.placement)
        assert a.first_token_s == b.first_token_s > 0.0
        assert 0 <= a.cached_tokens < a.arrival.num_tokens


def test_eight_gateways_route_cold_bursts_about_as_well_as_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "router --gateways 8 --workload sibling-burst --seeds 1 --scale 0.06 --json"
    main(command.split())
    result = json.loads(capsys.readouterr().out)
    ratio = result["workloads"]["sibling-burst"]["mean_ttft_ratio"]
    assert ratio < 1.5, "with prompts that gateways do not share it is over 3"
    assert [row["gateways"] for row in result["rows"]] == [1, 8]


def test_a_lone_request_takes_as_long_as_its_steps() -> None:
    shape = FleetShape(slowness=(2.0,))
    tokens = np.arange(3000, dtype="<i4").tobytes()
    arrival = Arrival(request_id="r", at=1.0, tokens=tokens, output_len=4)
    [outcome] = simulate(Workload(name="one", arrivals=(arrival,), fleet=shape))
    costs = shape.costs
    expected = 2.0 * (2 * costs.constant + costs.prefill(3000))
    assert outcome.first_token_s == pytest.approx(expected, rel=1e-3)


def test_what_is_predicted_comes_true_once_the_fleet_is_known() -> None:
    workload = workloads(0.15, None)["no-sharing"](1)
    outcomes = simulate(workload)[75:]
    errors = [abs(o.placement.predicted_s / o.first_token_s - 1.0) for o in outcomes]
    assert np.median(errors) < 0.25


@pytest.mark.randomized  # with more requests
def test_no_hit_is_expected_that_an_eviction_or_a_broken_stream_has_taken() -> None:
    workload = workloads(0.3 if IS_LONG else 0.06, None)["churn"](1)
    outcomes = simulate(workload)
    wrong = [o for o in outcomes if o.placement.hit_tokens > o.cached_tokens and not o.attempt]
    # Only predicted blocks may be missing: those of a request that is still being computed.
    assert len(wrong) <= 0.02 * len(outcomes)


def test_a_prefix_that_suddenly_all_ask_for_is_soon_with_every_worker() -> None:
    """As after the warm-up of `router --real`: all earlier requests had another prefix."""
    random = np.random.default_rng(1)

    def asked(name: str, count: int, start: float) -> list[Arrival]:
        prefix = random.integers(0, 10**5, 3000)
        prompts = [np.concatenate([prefix, random.integers(0, 10**5, 200)]) for _ in range(count)]
        return [
            Arrival(
                request_id=f"{name}{n}",
                at=start + n / 16,
                tokens=prompt.astype("<i4").tobytes(),
                output_len=12,
            )
            for n, prompt in enumerate(prompts)
        ]

    arrivals = (*asked("before", 30, 0.0), *asked("hot", 40, 4.0))
    shape = FleetShape(slowness=(2.0,) * 4, max_num_batched_tokens=512)
    outcomes = simulate(Workload(name="hot", arrivals=arrivals, fleet=shape))[30:]
    first = outcomes[0].first_token_s
    computed = [n for n, outcome in enumerate(outcomes) if outcome.cached_tokens < 3000 - 16]
    assert len(computed) == 4
    assert computed[-1] < 20, "the last copy begins in the time that the first one takes"
    assert max(outcome.first_token_s for outcome in outcomes) < 1.2 * first


class BreakingStreams(GatewayRouter):
    """Loses one report in a hundred with its stream, and compares its index with the caches."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(RoutingConfig(), clock)
        self._random = np.random.default_rng(5)
        self._members: dict[str, SimWorker] = {}
        self.num_breaks = self.num_hits = self.num_wrong = 0

    def joined(self, worker: SimWorker) -> None:
        self._members[worker.worker_id] = worker
        super().joined(worker)

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        if self._random.random() < 0.01:
            self.num_breaks += 1
            self.lost(worker)
            self.joined(worker)
            report = msgspec.structs.replace(report, block_events=[], load=worker.load)
        super().reported(worker, report)

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        for arrival in arrivals:
            prompt = PromptBlocks(arrival.tokens)
            view = self.fleet.view(prompt)
            cached = view.hit_tokens - (0 if view.coming_tokens is None else view.coming_tokens)
            for row in np.flatnonzero(view.eligible):
                worker = self._members[self.fleet.table.ids[row]]
                chains = worker.snapshot().blocks
                held = {value for chain in chains for value in chain.block_hashes}
                hashes = prompt.hashes(self.fleet.block_keys()[0]).tolist()
                true = next((n for n, h in enumerate(hashes) if h not in held), len(hashes))
                expected = min(true * view.page_size, view.num_tokens - 1)
                self.num_hits += bool(expected)
                self.num_wrong += int(cached[row]) != expected
        return super().place(arrivals)


def test_streams_that_break_cost_no_wrong_hit() -> None:
    workload = workloads(0.06, None)["churn"](1)
    made: list[BreakingStreams] = []
    Simulation(workload, lambda clock: made.append(BreakingStreams(clock)) or made[0]).run()
    [router] = made
    assert router.num_breaks > 20
    assert router.num_hits > 300
    assert router.num_wrong == 0


def test_routing_by_adapters_halves_the_time_to_first_token() -> None:
    workload = workloads(1.0 if IS_LONG else 0.15, None)["adapters"](1)

    def slowest(*, knows_adapters: bool) -> float:
        def router(clock: Clock) -> GatewayRouter:
            return GatewayRouter(RoutingConfig(), clock, knows_adapters=knows_adapters)

        outcomes = Simulation(workload, router).run()
        measured = [o.first_token_s for o in outcomes if o.arrival.measured]
        return float(np.percentile(measured, 99))

    assert slowest(knows_adapters=True) <= 0.6 * slowest(knows_adapters=False)


def test_the_prefix_router_of_ray_follows_prefixes() -> None:
    workload = workloads(0.05, None)["sibling-burst"](1)
    outcomes = simulate(workload, "ray-prefix")
    by_burst: dict[str, set[str]] = {}
    for outcome in outcomes:
        burst = outcome.arrival.request_id.split(".")[0]
        by_burst.setdefault(burst, set()).add(outcome.placement.worker_id)
    assert all(len(workers) == 1 for workers in by_burst.values())
    assert len({next(iter(workers)) for workers in by_burst.values()}) > 1


def test_pooled_bound_counts_whole_blocks_and_evicts_the_oldest() -> None:
    def outcome(first: int, length: int = 64) -> Outcome:
        tokens = np.arange(first, first + length, dtype="<i4").tobytes()
        arrival = Arrival(request_id=str(first), at=0.0, tokens=tokens, output_len=1)
        return Outcome(arrival=arrival, arrived_at=0.0, placement=None)  # type: ignore[arg-type]

    a, b = outcome(0), outcome(1000)
    assert pooled_hit_rate([a, b, a], 16, 8) == pytest.approx(63 / 192)
    assert pooled_hit_rate([a, b, a], 16, 4) == 0.0
    assert pooled_hit_rate([a, outcome(0, 40)], 16, 8) == pytest.approx(32 / 104)


def test_trace_blocks_are_equal_where_their_ids_are(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [5, 6, 7]},
        {"timestamp": 1400, "input_length": 1100, "output_length": 9, "hash_ids": [5, 8, 9]},
    ]
    path = tmp_path / "conversation_trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = trace_workload(1, trace=TraceFile(str(path)), speed=1.4)
    a, b = workload.arrivals
    assert b.at - a.at == pytest.approx(1.0)
    assert (a.num_tokens, b.num_tokens) == (1500, 1100)
    first, second = (block_hash_array(x.tokens, 512, 1) for x in (a, b))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_ratio_is_to_the_best_other_and_paired_by_seed() -> None:
    values = {"adaptive": [1.0, 3.0], "a": [2.0, 6.0], "b": [9.0, 9.0]}
    assert ratio_to_best(values, "adaptive") == (0.5, 0.0, "a")


def test_command_reports_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "ratios.png"
    arguments = "router --json --scale 0.015 --seeds 2 --workload no-sharing --no-sweep"
    routers = "--policy adaptive --policy round-robin"
    assert main([*arguments.split(), *routers.split(), "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in result["rows"]] == ["adaptive", "round-robin"]
    ratio = result["rows"][0]["mean_ttft_s"] / result["rows"][1]["mean_ttft_s"]
    assert result["worst_mean_ttft_ratio"] == pytest.approx(ratio)
    assert "skipping trace workloads" in result["notes"][0]
    assert plot.stat().st_size > 1000


def test_a_stopped_comparison_is_resumed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    arguments = "router --json --scale 0.01 --seeds 2 --workload no-sharing"
    routers = "--policy adaptive --policy prefix-score"
    command = [*arguments.split(), *routers.split(), "--resume", str(path)]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    lines = path.read_text().splitlines()
    # Ours twice, the other's grid, the other twice at its defaults and twice at its best.
    assert len(lines) == 2 + 10 + 2 + 2
    changed = [json.loads(line) for line in lines[:-3]]
    changed[0]["figures"][0] *= 3.0
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert main(command) == 0
    second = json.loads(capsys.readouterr().out)
    assert len(path.read_text().splitlines()) == len(lines)
    assert second["rows"][0]["mean_ttft_s"] > 1.5 * first["rows"][0]["mean_ttft_s"]
    assert second["rows"][1:] == first["rows"][1:]
    path.write_text("else\n")
    assert main(command) == 2
    assert "is not a file of simulation results" in capsys.readouterr().err


def test_other_settings_are_another_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = routing_digest(), simulation_digest()
    changed = tmp_path / "config.py"
    changed.write_text(Path(str(config.__file__)).read_text() + "# changed\n")
    monkeypatch.setattr(config, "__file__", str(changed))
    assert routing_digest() != digests[0]
    assert simulation_digest() == digests[1]


def test_unknown_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--workload", "nonsense"]) == 2
    assert "hot-prefix" in capsys.readouterr().err


def test_a_router_leaves_nothing_behind() -> None:
    fleets: list[GatewayRouter] = []

    def create(clock: object) -> GatewayRouter:
        fleets.append(GatewayRouter(RoutingConfig(), clock))  # type: ignore[arg-type]
        return fleets[-1]

    Simulation(workloads(0.04, None)["churn"](1), create).run()
    fleet = fleets[0].fleet
    assert len(fleet.in_flight) == 0
    assert not any(worker.reservations for worker in fleet.workers)
