"""Runs a fleet under load, injects faults, and checks the outcome of every request."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from cluster.bench.report import Result, checks_json, note
from cluster.bench.stats import percentile
from cluster.launch import LocalFleet
from tests.campaigns.chaos.answers import Answer
from tests.campaigns.chaos.client import Outcome
from tests.campaigns.chaos.faults import Fault, NotPossible, Saboteur
from tests.campaigns.chaos.fleet import FleetWatch, Look, serve_config
from tests.campaigns.chaos.kinds import KINDS, Part
from tests.campaigns.chaos.load import ChaosLoad, answers_of
from tests.campaigns.chaos.options import ChaosOptions
from tests.campaigns.chaos.planned_requests import PlannedRequest, list_requests
from tests.campaigns.chaos.processes import Memory, memory
from tests.campaigns.chaos.schedule import schedule
from tests.campaigns.chaos.tally import all_pauses, rows_by_kind, tally
from tests.campaigns.chaos.verdict import judge, memory_growth

_NOT_HERE = {"kill-redis": "the fleet has no Redis", "kill-node": "the fleet is one node"}
_MAY_GROW = (Part.COMPILER, Part.GUARD)
"""Parts that may have more processes at the end: compilers start on demand, and a guard stays alive
for the HAProxy that its successor adopted."""
_EMPTY_S = 30.0
"""Time limit in seconds for a fleet without load to become empty."""
_MAX_EXAMPLES = 20


@dataclass(kw_only=True, slots=True)
class Run:
    """Record of a run."""

    calm: list[Outcome] = field(default_factory=list)
    """Outcomes of a second pass without faults."""
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    """Kinds of fault that were not injected, with the reason."""
    left_over: dict[str, float] = field(default_factory=dict)
    num_moved: float = 0.0
    before: Mapping[Part, Memory] = field(default_factory=dict)
    after: Mapping[Part, Memory] = field(default_factory=dict)
    extra_processes: int = 0
    load_average: list[float] = field(default_factory=list)
    """Load average of the machine at each fault."""
    end: float = 0.0


def run_faults(options: ChaosOptions) -> Result:
    """Starts a fleet and injects faults until the duration is over."""
    config = serve_config(options)
    requests = list_requests(options.output_len, diffusion=bool(options.diffusion_model))
    with LocalFleet(config, report=note) as fleet:
        right = reference(fleet.base_url, requests, options.num_streams)
        run = Run(calm=answers_of(fleet.base_url, requests, options.num_streams))
        note(f"{len(requests)} requests have their expected answers")
        watch = FleetWatch(fleet.base_url, config)
        run.before = memory(watch.processes())
        moved_before = _moved(watch)
        clients = ChaosLoad(fleet.base_url, itertools.cycle(requests), options.num_streams)
        with clients as load:
            sabotage(run, watch, load, options)
            run.outcomes = load.stop()
        run.end = time.monotonic()
        run.num_moved = _moved(watch) - moved_before
        wait_empty(run, watch)
    return result_of(run, right, options)


def reference(
    base_url: str, requests: Sequence[PlannedRequest], num_clients: int
) -> dict[int, Answer]:
    """Expected answers by request index, from a pass without faults.

    Raises:
        RuntimeError: a request failed although no fault was injected.
    """
    outcomes = answers_of(base_url, requests, num_clients)
    for outcome in outcomes:
        if outcome.end != "whole":
            raise RuntimeError(f"{outcome.request.kind} failed without a fault: {outcome.error}")
    return {outcome.request.index: outcome.answer for outcome in outcomes}


def sabotage(run: Run, watch: FleetWatch, load: ChaosLoad, options: ChaosOptions) -> None:
    """Injects faults one after another, each once the fleet has recovered, and records them."""
    kinds = list(options.faults or KINDS)
    run.not_run |= _NOT_HERE
    began = time.monotonic()
    shift = 0.0
    """Delay of the schedule in seconds, because recovery can take longer than a period."""
    misses = 0
    """Number of consecutive faults that could not be injected."""
    saboteur = Saboteur(watch.directory, load, options, watch.port)
    try:
        for planned in schedule(kinds, options.period_s, options.seed):
            due = began + planned.at_s + shift
            if due - began > options.duration_s or misses == len(kinds):
                break
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                fault = saboteur.strike(planned)
            except NotPossible as problem:
                run.not_run[planned.kind] = str(problem)
                shift -= options.period_s
                misses += 1
                continue
            misses = 0
            run.faults.append(fault)
            run.load_average.append(os.getloadavg()[0])
            _overcome(fault, saboteur, watch, options)
            if fault.problem is not None:
                note(f"{planned.kind} did not recover: {fault.problem}")
                break
            note(f"{planned.kind}: recovered after {fault.recovery_s:.1f} s")
            shift = max(shift, time.monotonic() - began - planned.at_s - options.period_s + 2.0)
    finally:
        saboteur.close()
    for kind in kinds:
        run.not_run.setdefault(kind, "not enough time")
    for fault in run.faults:
        run.not_run.pop(fault.kind, None)


def _overcome(fault: Fault, saboteur: Saboteur, watch: FleetWatch, options: ChaosOptions) -> None:
    """Waits until the fault is over and the fleet has recovered."""

    def on_look(look: Look) -> None:
        lost = look.metrics is not None and any(
            look.metrics.ready.get(key, 0) < watch.expected.ready[key[0]]
            for key in look.metrics.ready
        )
        if lost and fault.noticed_s is None:
            fault.noticed_s = time.monotonic() - fault.begin

    deadline = fault.begin + options.recovery_s
    while True:
        problem = watch.wait_whole(max(0.0, deadline - time.monotonic()), on_look)
        if problem is None and saboteur.is_over:
            fault.recovered = time.monotonic()
            return
        if time.monotonic() > deadline:
            fault.problem = problem or "processes are still stopped"
            return


def _moved(watch: FleetWatch) -> float:
    watch.look()
    return sum(watch.resubmissions.values())


def wait_empty(run: Run, watch: FleetWatch) -> None:
    """Records load that remains in the fleet when no client sends requests."""
    deadline = time.monotonic() + _EMPTY_S
    while True:
        look = watch.look()
        run.left_over = {"no_answer": 1.0} if look.metrics is None else look.metrics.left_over
        extra = Counter(look.parts)
        extra.subtract(watch.expected.parts)
        for part in _MAY_GROW:
            extra.pop(part, None)
        run.extra_processes = sum(number for number in extra.values() if number > 0)
        if (not run.left_over and not run.extra_processes) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    run.after = memory(watch.processes())


def result_of(run: Run, right: Mapping[int, Answer], options: ChaosOptions) -> Result:
    """Report of a run."""
    counts = tally(run.outcomes, run.faults, right)
    pauses = all_pauses(run.outcomes, run.faults, run.end, options.step_timeout_s)
    calm = tally(run.calm, (), right)
    calm_pauses = [max((p.length_s for p in o.pauses), default=0.0) for o in run.calm]
    growth = memory_growth(run.before, run.after)
    checks = judge(counts, run.faults, pauses, run.left_over, growth, run.extra_processes)
    return {
        "faults": len(run.faults),
        "sent": counts.sent,
        "completed": counts.completed,
        "moved": run.num_moved,
        "failed": len(counts.failed),
        "wrong": len(counts.wrong),
        "cut_with_their_gateway": counts.cut,
        "left_by_clients": counts.left,
        "retried": dict(counts.retried),
        "errors": dict(counts.errors.most_common(_MAX_EXAMPLES)),
        "calm_wrong": len(calm.wrong) + len(calm.failed),
        "calm_pause_p99_s": percentile(calm_pauses, 99.0),
        "pause_p50_s": percentile(pauses.lengths, 50.0),
        "pause_p99_s": percentile(pauses.lengths, 99.0),
        "load_average_p50": percentile(run.load_average, 50.0),
        "by_kind": {"rows": rows_by_kind(run.outcomes, run.faults, counts, run.end)},
        "not_run": run.not_run,
        "left_over": run.left_over,
        "memory_before": {part.value: asdict(value) for part, value in run.before.items()},
        "memory_after": {part.value: asdict(value) for part, value in run.after.items()},
        "first_failures": list(counts.examples.values())[:_MAX_EXAMPLES],
        "first_wrong": counts.wrong[:_MAX_EXAMPLES],
        "first_calm_wrong": (calm.wrong + calm.failed)[:_MAX_EXAMPLES],
        "problems": [
            f"{fault.kind}: {fault.problem}" for fault in run.faults if fault.problem is not None
        ],
        "broken": [check.name for check in checks if not check.holds],
        "checks": checks_json(checks),
    }
