"""`make check-scale`: one gateway's routing code with ten thousand simulated workers.

Its index has 10^8 blocks, 1 % of the workers fail per minute, and the autoscaler runs. Ten thousand
full caches would not fit into memory, so blocks of earlier traffic have random hashes and are never
hit. The result has the times of decisions and worker reports, and the resource of a single gateway
that saturates first.
"""

from __future__ import annotations

import resource
import sys
import time

import psutil

from cluster.bench.report import Result, at_least, at_most, checks_json, note
from cluster.bench.stats import percentile
from deploy.benchmarks.routing.figures import figures
from deploy.benchmarks.routing.simulated import Clock, SimulatedRouter
from deploy.benchmarks.routing.simulation import Outcome, Simulation
from tests.campaigns.checks import check_main
from tests.campaigns.scale.capacity import Needs, breaks_first
from tests.campaigns.scale.gateway import TimedGateway
from tests.campaigns.scale.options import ScaleOptions
from tests.campaigns.scale.stopwatch import Stopwatch
from tests.campaigns.scale.traffic import scale_workload

_GOAL_MS = 2.0
_GOAL_MINUTES = 20.0
_GOAL_WORKERS = 10_000
_GOAL_BLOCKS = 100_000_000


def run_scale(options: ScaleOptions) -> Result:
    """Measures decisions, reports and memory of one gateway, and hit rates and latencies of the
    simulated requests."""
    began = time.perf_counter()
    note("generating the traffic")
    workload = scale_workload(options)
    gateways: list[TimedGateway] = []

    def create(clock: Clock) -> SimulatedRouter:
        gateways.append(TimedGateway(options, clock))
        return gateways[0]

    simulation = Simulation(workload, create)
    [gateway] = gateways
    gateway.scaler.suffer = simulation.suffer
    outcomes = simulation.run()
    wall_minutes = (time.perf_counter() - began) / 60.0
    index = gateway.fleet.index
    needs = _needs(options, gateway, len(workload.incidents))
    result: Result = {
        "policy": options.routing_policy,
        "num_workers": options.workers,
        "num_blocks": gateway.num_blocks,
        "num_requests": len(outcomes),
        "duration_s": options.duration_s,
        "wall_minutes": wall_minutes,
        "fill_minutes": gateway.fill_s / 60.0,
        "index_gib": index.num_bytes / 2**30,
        "index_bytes_per_block": index.num_bytes / max(len(index), 1),
        "process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **_timing("decision", gateway.decisions),
        **_timing("report", gateway.reports),
        **_timing("lose", gateway.losses),
        **_timing("join", gateway.joins),
        **_timing("autoscale", gateway.scaler.watch),
        "autoscale_most_wanted": gateway.scaler.max_target,
        "autoscale_targets": gateway.scaler.targets,
        "decisions_per_s_and_core": _rate(needs.decision_s),
        "reports_per_s_and_core": _rate(needs.report_s),
        **_served(outcomes, len(workload.incidents)),
        "cores_needed": needs.cores,
        "breaks_first": breaks_first(needs),
    }
    result["checks"] = checks_json(
        [
            at_most("decision_p99_ms", result["decision_p99_ms"], "ms", _GOAL_MS),
            at_least("num_blocks", gateway.num_blocks, "blocks", _GOAL_BLOCKS),
            at_least("num_workers", options.workers, "workers", _GOAL_WORKERS),
            at_most("wall_minutes", wall_minutes, "min", _GOAL_MINUTES),
        ]
    )
    note(f"saturates first: {result['breaks_first']}")
    return result


def _needs(options: ScaleOptions, gateway: TimedGateway, deaths: int) -> Needs:
    return Needs(
        workers=options.workers,
        decisions_per_s=gateway.num_decided / options.duration_s,
        decision_s=gateway.decisions.mean_cpu_s,
        reports_per_s=len(gateway.reports.cpu) / options.duration_s,
        report_s=gateway.reports.mean_cpu_s,
        failures_per_s=deaths / options.duration_s,
        failure_s=gateway.losses.mean_cpu_s + gateway.joins.mean_cpu_s,
        index_bytes=gateway.fleet.index.num_bytes,
        memory_bytes=psutil.virtual_memory().total,
    )


def _served(outcomes: list[Outcome], deaths: int) -> Result:
    summary = figures(outcomes)
    moved = [outcome for outcome in outcomes if outcome.attempt]
    return {
        "hit_rate": summary.hit_rate,
        "mean_ttft_s": summary.mean_ttft,
        "p50_ttft_s": summary.p50_ttft,
        "p99_ttft_s": summary.p99_ttft,
        "workers_failed": deaths,
        "requests_moved": len(moved),
        "p50_ttft_s_of_moved": percentile([outcome.first_token_s for outcome in moved], 50.0),
        "requests_failed": sum(outcome.first_token_s < 0.0 for outcome in outcomes),
    }


def _timing(name: str, watch: Stopwatch) -> Result:
    wall = [seconds * 1e3 for seconds in watch.wall]
    return {
        f"{name}_p50_ms": percentile(wall, 50.0),
        f"{name}_p99_ms": percentile(wall, 99.0),
        f"{name}_max_ms": max(wall, default=0.0),
        f"{name}_cpu_p99_ms": percentile([seconds * 1e3 for seconds in watch.cpu], 99.0),
    }


def _rate(seconds: float) -> float:
    return 1.0 / seconds if seconds else 0.0


if __name__ == "__main__":
    sys.exit(check_main(run_scale, ScaleOptions))
