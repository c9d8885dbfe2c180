"""Benchmark `scenarios`: fleets under the same traffic over HTTP, in turn.

The fleets are models of one endpoint, each with its own workers. Only one fleet has load at a time.
In each round, all fleets get the same traffic, and ratios are computed per round.

    sustainable   requests per second that the baseline completes while all its slots are taken
    base          p99 time to the first token with one request at a time; SLOs are multiples of it
    unloaded      p99 time to the first token of a round's urgent requests, one at a time, with
                  new prompts of the same lengths
    step          median time between tokens under load, which is about the time of a decode step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cluster.bench.jobs.scenario_options import LEAST_ROUNDS, ScenarioName, ScenarioRun
from cluster.bench.jobs.traffic import URGENT, Planned, make_traffic, offered
from cluster.bench.prompts import PromptSpace
from cluster.bench.report import Result, checks_json, count_errors, note
from cluster.bench.stats import percentile
from cluster.bench.turns import take_turns
from cluster.launch import LocalFleet
from deploy.benchmarks.scenarios.figures import by_priority, compared, figures, medians
from deploy.benchmarks.scenarios.fleets import DRAFTS, FIFO, OURS, serve_config
from deploy.benchmarks.scenarios.goals import prefix, scenario_checks
from deploy.benchmarks.scenarios.live import LiveTable
from deploy.benchmarks.scenarios.turn import Target, Turn, run_turn

_MIDDLE = (0.2, 0.8)
"""Range of completed requests, as fractions, in which the rate is measured: while the fleet is
full."""
_WARM_SEED = 1_000_003
_IDLE = "idle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """Numbers of requests sent outside the compared runs."""

    warm_up: int = 300
    """Warm-up requests per fleet."""
    alone: int = 100
    """Requests, sent one at a time, that measure the latency of an idle fleet."""
    per_place: int = 4
    """Requests per slot of the fleet for measuring the sustainable rate."""


def run_scenarios(run: ScenarioRun) -> Result:
    """Starts the fleets, measures all selected scenarios, and stops the fleets.

    Raises:
        ValueError: too many requests failed.
        LaunchError: the fleets did not start.
    """
    config = serve_config(run)
    with LocalFleet(config, report=note) as endpoint:
        targets = {
            model.name: Target(
                base_url=endpoint.base_url, name=model.name, sends_urgency=model.name != FIFO
            )
            for model in config.models
        }
        with LiveTable(tuple(targets)) as live:
            return ScenarioBench(run, targets, live).run()


class ScenarioBench:
    """Measurements on running fleets."""

    def __init__(
        self,
        run: ScenarioRun,
        targets: dict[str, Target],
        live: LiveTable,
        effort: Effort | None = None,
    ) -> None:
        self._effort = effort or Effort()
        self._options = run.options
        self._engine = run.engine
        self._targets = targets
        self._live = live
        self._vocabulary = PromptSpace.load(run.engine.model).vocabulary
        self._baseline = FIFO if FIFO in targets else OURS
        self._errors: Counter[str] = Counter()

    def run(self) -> Result:
        """Measures all scenarios. The result has the metrics of each, and the checks of goals."""
        options = self._options
        self._warm_up()
        base_s = self._alone(self._traffic(self._effort.alone, _WARM_SEED + 1 + options.seed))
        sustainable = 0.0 if options.rps else self._sustainable()
        result: Result = {
            "model": self._engine.model,
            "workers": options.workers,
            "rounds": options.rounds,
            "sustainable_rps": sustainable,
            "base_ttft_ms": 1e3 * base_s,
        }
        values: dict[str, float] = {}
        for scenario in options.scenarios:
            rps = options.rps or offered(scenario, sustainable)
            result[scenario], found = self._scenario(scenario, rps, base_s)
            values |= {prefix(scenario) + name: value for name, value in found.items()}
        enough = options.rounds >= LEAST_ROUNDS
        checks = scenario_checks(values) if enough else []
        if self._errors:
            result["errors"] = count_errors([{"errors": self._errors}])
        failed = self._errors.total()
        return {**result, **values, "failed": failed, "checks": checks_json(checks)}

    def _scenario(
        self, scenario: ScenarioName, rps: float, base_s: float
    ) -> tuple[Result, dict[str, float]]:
        """Measures one scenario on all fleets; returns its part of the result, and values for
        checks."""
        options = self._options
        kept: dict[str, list[Turn]] = {name: [] for name in self._targets}
        variants: dict[str, Callable[[int], Result]] = {
            name: partial(self._turn, scenario, rps, base_s, kept, name) for name in self._targets
        }
        if scenario == "mixed_priority":
            variants[_IDLE] = lambda number: {"p99_ms": 1e3 * self._unloaded(rps, number)}
        turns = dict(take_turns(variants, options.rounds).by_variant)
        idle = turns.pop(_IDLE, [])
        if options.plot:
            self._draw(scenario, {name: found[-1] for name, found in kept.items()})
        rows = [{"fleet": name, **medians(found)} for name, found in turns.items()]
        result: Result = {"rps": rps, "rows": rows}
        values = _urgent_values(turns[OURS], idle) if idle else {}
        if FIFO in turns:
            result["over_fifo"] = compared(turns[OURS], turns[FIFO])
            values |= {name: found["median"] for name, found in result["over_fifo"].items()}
        if DRAFTS in turns:
            result["drafts_over_plain"] = compared(turns[DRAFTS], turns[OURS])
            result["by_priority"] = by_priority(kept[DRAFTS], kept[OURS])
            ratios = [found["ratio"] for found in result["by_priority"].values()]
            values["spec_ttft_p99_ratio"] = max(ratios)
        return result, values

    def _turn(
        self,
        scenario: ScenarioName,
        rps: float,
        base_s: float,
        kept: dict[str, list[Turn]],
        name: str,
        number: int,
    ) -> Result:
        options = self._options
        self._live.begin(f"{scenario}, round {number}, {rps:.1f} requests/s")
        traffic = make_traffic(
            scenario,
            rps,
            options.duration,
            self._vocabulary,
            seed=self._round_seed(number),
            mixed=options.speculative_compare,
        )
        turn = run_turn(
            self._targets[name],
            traffic,
            base_s,
            on_record=self._live.record,
            on_moment=partial(self._live.moment, name),
        )
        kept[name].append(turn)
        self._errors.update(record.error for record in turn.records if record.error)
        result = figures(turn)
        self._live.end(name, result)
        return result

    def _warm_up(self) -> None:
        """Sends warm-up requests, which fill caches with shared texts and fit step-time models."""
        for name, target in self._targets.items():
            traffic = self._traffic(self._effort.warm_up, _WARM_SEED)
            turn = run_turn(target, traffic, 0.0, concurrency=16)
            if all(record.error for record in turn.records):
                raise ValueError(f"every request to {name} failed: {turn.records[0].error}")

    def _unloaded(self, rps: float, number: int) -> float:
        """p99 time to the first token of a round's urgent requests on an idle fleet, in seconds."""
        options = self._options
        traffic = make_traffic(
            *("mixed_priority", rps, options.duration, self._vocabulary),
            seed=self._round_seed(number),
            words=_WARM_SEED + 2 + self._round_seed(number),
        )
        return self._alone([one for one in traffic if one.priority >= URGENT])

    def _alone(self, traffic: Sequence[Planned]) -> float:
        """p99 time to the first token of requests sent one at a time, in seconds; 0 if there are
        none."""
        urgent = [replace(one, priority=URGENT, arrival_s=0.0) for one in traffic]
        if not urgent:
            return 0.0
        turn = run_turn(self._targets[OURS], urgent, 0.0, concurrency=1)
        return percentile([record.ttft for record in turn.records], 99)

    def _round_seed(self, number: int) -> int:
        return self._options.seed + 1000 * (number + 1)

    def _sustainable(self) -> float:
        """Requests per second that the baseline completes while all its slots are taken."""
        places = self._engine.scheduling.max_num_seqs * self._options.workers
        traffic = self._traffic(self._effort.per_place * places, _WARM_SEED - 1)
        at_once = [replace(one, arrival_s=0.0) for one in traffic]
        turn = run_turn(self._targets[self._baseline], at_once, 0.0, concurrency=places)
        ends = sorted(r.start + r.latency for r in turn.records if not r.error)
        if len(ends) < places:
            raise ValueError(f"most requests failed: {turn.records[0].error}")
        first, last = (int(part * (len(ends) - 1)) for part in _MIDDLE)
        rate = (last - first) / (ends[last] - ends[first])
        note(f"sustainable: {rate:.1f} requests/s")
        return rate

    def _traffic(self, count: int, seed: int) -> list[Planned]:
        return make_traffic("steady", float(count), 1.0, self._vocabulary, seed=seed)

    def _draw(self, scenario: ScenarioName, turns: dict[str, Turn]) -> None:
        from deploy.benchmarks.scenarios.plots import draw_turns

        folder = Path(self._options.plot)
        folder.mkdir(parents=True, exist_ok=True)
        draw_turns(scenario, turns, str(folder / f"{scenario}.png"))


def _urgent_values(loaded: Sequence[Result], idle: Sequence[Result]) -> dict[str, float]:
    """Values of urgent requests: the median fraction of missed SLOs, and the median difference
    between the p99 TTFT under load and on an idle fleet, in decode steps."""
    excess = [
        (turn["urgent_ttft_p99_ms"] - alone["p99_ms"]) / turn["itl_p50_ms"]
        for turn, alone in zip(loaded, idle, strict=True)
        if "urgent_ttft_p99_ms" in turn
    ]
    if not excess:
        return {}  # too little traffic to contain an urgent request
    return {
        "urgent_ttft_p99_excess_steps": percentile(excess, 50),
        "urgent_slo_miss": percentile(
            [turn["urgent_slo_miss"] for turn in loaded if "urgent_slo_miss" in turn], 50
        ),
    }
