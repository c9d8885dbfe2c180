"""Benchmark `router --gateways N`: the default policy with N gateways and with one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.bench.report import Result, at_most, checks_json, note
from cluster.bench.stats import estimate, mean, percentile
from cluster.bench.traces import find_traces
from deploy.benchmarks.routing.agents.closed_loop import ClosedLoop, fleet_shape
from deploy.benchmarks.routing.agents.load import AgentLoad
from deploy.benchmarks.routing.figures import Figures, figures
from deploy.benchmarks.routing.simulated import (
    Clock,
    GatewayRouter,
    Placement,
    SimulatedRouter,
)
from deploy.benchmarks.routing.simulation import Simulation
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival
from deploy.benchmarks.routing.workloads import workloads
from router.config import RoutingConfig
from worker.frontend.attachment import Attachment
from worker.frontend.in_flight_submits import InFlightSubmits
from worker.frontend.prompts_in_flight import PromptsInFlight
from worker.frontend.server import HEARTBEAT_S
from worker.protocol.messages import StepReport, Submit, TokenDelta, WorkerUpdate

_MEAN_GOAL = 1.05
_AGENTS = "agents"
"""Workload of coding agents in a closed loop, in addition to those of the simulation."""
_AGENT_WORKERS, _AGENT_SESSIONS = 4, 8
_AGENT_S, _AGENT_WARM = 900.0, 1 / 3
"""Simulated seconds of agents, and the fraction that is not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayOptions:
    """Options of the comparison of several gateways with a single one."""

    gateways: int = 1
    """Number of gateways, all with the default policy, to compare with a single one."""
    workloads: tuple[str, ...] = field(default=(), metadata={"flag": "--workload"})
    """Workloads as in SimOptions, or agents (coding agents in a closed loop). Default: all."""
    seeds: int = 5
    """Number of simulations, each with its own seed."""
    first_seed: int = 1
    """Seed of the first simulation; later ones have consecutive seeds."""
    scale: float = 1.0
    """Factor for the number of requests."""
    traces: str = ""
    """Folder with Mooncake's traces, as in SimOptions."""

    def __post_init__(self) -> None:
        if self.gateways < 1:
            raise ValueError(f"--gateways must be at least 1, got {self.gateways}")


class _Frontend:
    """A worker's frontend, which has an attach stream to each gateway."""

    def __init__(self, worker: SimWorker, gateways: Sequence[GatewayRouter], now: float) -> None:
        self._worker = worker
        self._load = worker.load
        self._reserved = InFlightSubmits()
        self._prompts = PromptsInFlight()
        self._beat_at = now
        self._streams = {id(gateway): (gateway, Attachment(_nothing)) for gateway in gateways}

    def submitted(self, submit: Submit, ordinal: int, owner: GatewayRouter) -> None:
        """Sends the load and the prompt of a submitted request to all gateways except the one that
        submitted it."""
        self._reserved.add([submit], ordinal)
        prompts = self._prompts.add([submit], ordinal)
        self._load = self._reserved.added_to(self._load)
        for gateway, stream in self._streams.values():
            if gateway is not owner:
                stream.put_prompts(self._worker.epoch, prompts, self._load)
        self._deliver()

    def reported(self, report: StepReport, owners: Mapping[str, GatewayRouter]) -> None:
        """Sends a step report to all gateways."""
        self._prompts.apply(report.deltas)
        self._load = self._reserved.added_to(report.load)
        computed = self._prompts.take_computed()
        deltas: dict[int, list[TokenDelta]] = {}
        for changes in report.deltas.values():
            for delta in changes:
                deltas.setdefault(id(owners[delta.request_id]), []).append(delta)
        for number, (_, stream) in self._streams.items():
            stream.put_step(
                self._worker.epoch,
                deltas.get(number, []),
                report.block_events,
                self._load,
                computed,
            )
        self._deliver()

    def beat(self, now: float) -> None:
        """Sends a heartbeat if one is due."""
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat_at = now
            for _, stream in self._streams.values():
                stream.beat(self._worker.epoch, self._load)
            self._deliver()

    def _deliver(self) -> None:
        for gateway, stream in self._streams.values():
            while (item := stream.take_item()) is not None:
                assert isinstance(item, WorkerUpdate), "snapshots are taken from the worker"
                gateway.fleet.update(self._worker.worker_id, item)
                for delta in item.deltas:
                    if delta.num_cached_tokens >= 0:
                        gateway.ended(self._worker.worker_id, delta.request_id)


def _nothing() -> None:
    return


class GatewaysRouter(SimulatedRouter):
    """Several gateways, each of which receives a random subset of the requests.

    Each gateway has its own Fleet and its own attach streams from the workers' frontends. Requests
    that arrive at the same time are placed gateway by gateway.

    Args:
        number: number of gateways.
        seed: seed of the choice of gateway.
        clock: clock of the simulation.
    """

    def __init__(self, number: int, seed: int, clock: Clock) -> None:
        self._gateways = [GatewayRouter(RoutingConfig(), clock) for _ in range(number)]
        for gateway in self._gateways:
            gateway.fleet.has_other_gateways = number > 1
        self._clock = clock
        self._random = random.Random(seed)
        self._owners: dict[str, GatewayRouter] = {}
        """Gateway of each request, keyed by request id."""
        self._frontends: dict[str, _Frontend] = {}

    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""
        frontend = _Frontend(worker, self._gateways, self._clock())
        self._frontends[worker.worker_id] = frontend
        for gateway in self._gateways:
            gateway.joined(worker)

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that died or left, or whose attach stream broke."""
        for gateway in self._gateways:
            gateway.lost(worker)

    def draining(self, worker: SimWorker) -> None:
        """Stops placing requests on a draining worker."""
        for gateway in self._gateways:
            gateway.draining(worker)

    def split(self, arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
        """Groups requests by gateway."""
        for frontend in self._frontends.values():
            frontend.beat(self._clock())
        groups: dict[int, list[Arrival]] = {}
        for arrival in arrivals:
            number = self._random.randrange(len(self._gateways))
            self._owners[arrival.request_id] = self._gateways[number]
            groups.setdefault(number, []).append(arrival)
        return list(groups.values())

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at one gateway at the same time."""
        return self._owners[arrivals[0].request_id].place(arrivals)

    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Records that a request was sent to its worker as that worker's request number
        `ordinal`."""
        owner = self._owners[submit.request_id]
        owner.submitted(worker, submit, ordinal)
        self._frontends[worker.worker_id].submitted(submit, ordinal, owner)

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Handles the report of a worker's step."""
        frontend = self._frontends[worker.worker_id]
        frontend.reported(report, self._owners)
        frontend.beat(self._clock())

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request or its worker has ended."""
        self._owners[request_id].ended(worker_id, request_id)


def run_gateways(options: GatewayOptions) -> Result:
    """Measures times to first token and hit rates with one gateway and with several, and their
    ratios.

    Raises:
        ValueError: a workload is unknown.
    """
    folder = find_traces(options.traces) if options.traces else None
    makers = workloads(options.scale, folder)
    known = (*makers, _AGENTS)
    names = options.workloads or known
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"--workloads: unknown workloads {', '.join(unknown)}: choose from {', '.join(known)}"
        )
    number = options.gateways
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Any] = {}
    for name in names:
        runs = {
            count: [
                _agents(options, count, seed)
                if name == _AGENTS
                else figures(Simulation(makers[name](seed), _router(count, seed)).run())
                for seed in seeds
            ]
            for count in (1, number)
        }
        rows += [_row(name, count, run) for count, run in runs.items()]
        pairs = zip(runs[number], runs[1], strict=True)
        ratio = estimate([many.mean_ttft / one.mean_ttft for many, one in pairs])
        ratios[name] = {
            "mean_ttft_ratio": rows[-1]["mean_ttft_s"] / rows[-2]["mean_ttft_s"],
            "mean_ttft_ratio_ci": ratio.half,
        }
        note(
            f"{name}: mean TTFT with {number} gateways is "
            f"{ratios[name]['mean_ttft_ratio']:.3f} times that with one"
        )
    worst = max(one["mean_ttft_ratio"] for one in ratios.values())
    checks = [at_most("worst_gateways_ttft_ratio", worst, "x", _MEAN_GOAL)]
    return {
        "gateways": number,
        "seeds": options.seeds,
        "scale": options.scale,
        "workloads": ratios,
        "rows": rows,
        "checks": checks_json(checks),
    }


def _router(number: int, seed: int) -> Callable[[Clock], SimulatedRouter]:
    return partial(GatewaysRouter, number, seed)


def _agents(options: GatewayOptions, number: int, seed: int) -> Figures:
    """Metrics of unattended agents whose contexts fit the caches, in a closed loop without a
    gate."""
    shape = fleet_shape(_AGENT_WORKERS, 0.0)
    load = AgentLoad("unattended", seed)
    loop = ClosedLoop(load, _AGENT_SESSIONS, shape, _router(number, seed), 0.0)
    horizon_s = _AGENT_S * options.scale
    loop.run(horizon_s)
    turns = [turn for turn in loop.ended if turn.ended_at >= _AGENT_WARM * horizon_s]
    times = [turn.first_token_s for turn in turns]
    hits = sum(turn.cached_tokens for turn in turns)
    return Figures(
        mean_ttft=mean(times),
        p50_ttft=percentile(times, 50.0),
        p99_ttft=percentile(times, 99.0),
        hit_rate=hits / sum(turn.prompt.num_tokens for turn in turns),
    )


def _row(workload: str, count: int, run: Sequence[Figures]) -> dict[str, Any]:
    return {
        "workload": workload,
        "gateways": count,
        "mean_ttft_s": mean([one.mean_ttft for one in run]),
        "p99_ttft_s": mean([one.p99_ttft for one in run]),
        "hit_rate": mean([one.hit_rate for one in run]),
    }
