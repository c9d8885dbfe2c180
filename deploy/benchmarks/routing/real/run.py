"""Benchmark `router --real`: runs each router in every round; compares rayfleet with the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop

from cluster.bench.command import run_measurement
from cluster.bench.report import Check, Result, at_least, at_most, checks_json, exactly, note
from cluster.bench.stats import percentile
from cluster.bench.turns import take_turns
from cluster.config import find_demo_model
from deploy.benchmarks.routing.paced import Vocabulary, load
from deploy.benchmarks.routing.real.drive import Sent, send_all
from deploy.benchmarks.routing.real.options import OWN, PEERS, WORKLOADS, RealOptions
from deploy.benchmarks.routing.real.routers import missing, start
from deploy.benchmarks.routing.real.traffic import workloads

_WARM_SEED = 0
_WARM_SCALE = 0.1
_START_S = 300.0
"""Time limit in seconds to start and stop a router and its workers."""
_TURN_S = 300.0
"""Time limit in seconds of a run at scale and pace 1; a run takes about 1/5 of it."""

_PANELS = {
    "hit_rate": ("prompt tokens found in the cache", False),
    "p50_ttft_ms": ("TTFT p50, ms", True),
    "p99_ttft_ms": ("TTFT p99, ms", True),
}


class Figures(NamedTuple):
    """Metrics of one router under one workload. Times are in milliseconds."""

    hit_rate: float
    """Fraction of the prompt tokens that were cached, as counted by the workers."""
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    num_requests: int


def run_router_real(options: RealOptions) -> Result:
    """Measures hit rates and times to first token by workload and router, and checks rayfleet's
    ratios to the other routers.

    Raises:
        ValueError: no other router can be measured on this machine, or one of rayfleet's runs
            failed.
    """
    options = replace(options, model=options.model or find_demo_model())
    if options.variant:
        return _turn(options)
    notes = [text for peer in options.peers or PEERS if (text := missing(options, peer))]
    peers = [peer for peer in options.peers or PEERS if not missing(options, peer)]
    for text in notes:
        note(text)
    if not peers:
        raise ValueError("no router to compare with: see above for what is missing")
    turns = take_turns(
        {variant: partial(turn_of, options, variant) for variant in (OWN, *peers)}, options.rounds
    )
    result = compared(turns.by_variant, peers)
    result |= {"rounds": options.rounds, "num_workers": options.num_workers, "notes": notes}
    if options.plot:
        from deploy.benchmarks.scenarios.plots import draw_bars

        draw_bars(result["rows"], "router", _PANELS, options.plot)
    return result


def compared(turns: Mapping[str, Sequence[Sequence[Sent]]], peers: Sequence[str]) -> Result:
    """Metrics by workload and router over all rounds, and checks of rayfleet against each peer.

    Percentiles are computed over all rounds together, because a single round has few requests.
    Rounds in which a peer's run failed are excluded from its comparison.

    Args:
        turns: request outcomes of each run, keyed by router; empty for a failed run.
        peers: routers that rayfleet is compared with.
    """
    lost = {variant: sum(not turn for turn in rounds) for variant, rounds in turns.items()}
    variants = [variant for variant in (OWN, *peers) if lost[variant] < len(turns[variant])]
    everything = {variant: [one for turn in turns[variant] for one in turn] for variant in variants}
    names = [name for name in WORKLOADS if any(one.workload == name for one in everything[OWN])]
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for name in names:
        found = {variant: figures(name, sent) for variant, sent in everything.items()}
        for variant, one in found.items():
            by_round = [figures(name, turn) for turn in turns[variant] if turn]
            rows.append(
                {
                    "workload": name,
                    "router": variant,
                    **one._asdict(),
                    "hit_rate_rounds": " ".join(f"{each.hit_rate:.3f}" for each in by_round),
                    "p50_rounds": " ".join(f"{each.p50_ttft_ms:.0f}" for each in by_round),
                    "p99_rounds": " ".join(f"{each.p99_ttft_ms:.0f}" for each in by_round),
                }
            )
        for peer in variants[1:]:
            rounds = zip(turns[OWN], turns[peer], strict=True)
            own = [one for mine, theirs in rounds if theirs for one in mine]
            checks += _checks(name, peer, figures(name, own), found[peer])
    failed = [one.error for sent in everything.values() for one in sent if one.error]
    for text in sorted(set(failed))[:5]:
        note(f"failed: {text}")
    checks.append(exactly("failed_requests", len(failed), "requests", 0))
    return {
        "checks": checks_json(checks),
        "failed": len(failed),
        "failed_turns": {variant: count for variant, count in lost.items() if count},
        "rows": rows,
    }


def figures(workload: str, sent: Sequence[Sent]) -> Figures:
    """Metrics of a workload's measured requests that succeeded. Raises ValueError if there are
    none."""
    one = [s for s in sent if s.workload == workload and s.measured and not s.error]
    if not one:
        errors = [s.error for s in sent if s.workload == workload and s.error]
        raise ValueError(f"all requests of {workload} failed: {'; '.join(errors[:3])}")
    times = 1e3 * np.array([s.ttft_s for s in one])
    return Figures(
        hit_rate=sum(s.num_cached for s in one) / sum(s.num_prompt for s in one),
        mean_ttft_ms=float(times.mean()),
        p50_ttft_ms=percentile(times, 50.0),
        p99_ttft_ms=percentile(times, 99.0),
        num_requests=len(one),
    )


def _checks(workload: str, peer: str, own: Figures, other: Figures) -> list[Check]:
    start = f"real_{workload}_{peer}".replace("-", "_")
    return [
        at_least(f"{start}_hit_difference", own.hit_rate - other.hit_rate, "of tokens", 0.0),
        at_most(f"{start}_ttft_p50_ratio", own.p50_ttft_ms / other.p50_ttft_ms, "x", 1.0),
        at_most(f"{start}_ttft_p99_ratio", own.p99_ttft_ms / other.p99_ttft_ms, "x", 1.0),
    ]


def _turn(options: RealOptions) -> Result:
    """Measures one router under all workloads in sequence, starting with empty caches."""
    vocabulary = Vocabulary(load(options.model))
    makers = workloads(vocabulary, options.num_workers, options.pace, options.scale)
    warm = workloads(vocabulary, options.num_workers, options.pace, _WARM_SCALE)["hot-prefix"](
        _WARM_SEED
    )
    sent: list[Sent] = []
    with start(options) as base_url:
        uvloop.run(send_all(base_url, "warm-up", warm))
        for name in options.workloads or WORKLOADS:
            sent += uvloop.run(send_all(base_url, name, makers[name](options.first_seed)))
    return {"arm": options.variant, "sent": [msgspec.structs.asdict(one) for one in sent]}


def turn_of(options: RealOptions, variant: str, number: int) -> list[Sent]:
    """Outcomes of one run, in a separate process; empty if a peer's run failed."""
    names = options.workloads or WORKLOADS
    try:
        sent = _in_process(options, variant, number)
        found = {name: figures(name, sent) for name in names}
    except ValueError as error:
        if variant == OWN:
            raise
        note(f"skipping {variant}, round {number}: {error}")
        return []
    for name, one in found.items():
        note(
            f"{variant}, round {number}, {name}: hit {one.hit_rate:.3f}, "
            f"TTFT p50 {one.p50_ttft_ms:.0f} ms, p99 {one.p99_ttft_ms:.0f} ms"
        )
    return sent


def _in_process(options: RealOptions, variant: str, number: int) -> list[Sent]:
    of_variant = replace(options, variant=variant, first_seed=options.first_seed + number, plot="")
    command = [sys.executable, "-m", "deploy.benchmarks", "router", "--real", "--json"]
    command += _flags(of_variant)
    timeout_s = _START_S + _TURN_S * options.scale * options.pace
    result = run_measurement(command, f"the turn of {variant}", timeout_s)
    return msgspec.convert(result["sent"], list[Sent])


def _flags(options: RealOptions) -> list[str]:
    flags = []
    for name, value in asdict(options).items():
        if name == "workloads":
            flags += [word for workload in value for word in ("--workload", workload)]
        elif name not in ("peers", "plot", "rounds"):
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags
