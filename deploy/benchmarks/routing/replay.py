"""Benchmark `router --replay`: simulates a gateway's recorded traffic with other policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.bench.report import Result, note
from cluster.bench.stats import percentile
from deploy.benchmarks.routing.compare import simulate
from deploy.benchmarks.routing.figures import Figures, figures, pooled_hit_rate
from deploy.benchmarks.routing.routers import OWN, ROUTERS, find_routers
from deploy.benchmarks.routing.workload import DEFAULT_COSTS, Arrival, FleetShape, Workload
from router.explain import DecisionLine, FleetSpeed, LogLine, WorkerSeen, read_decisions
from worker.protocol.blocks import TOKEN_BYTES

_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """Options of `router --replay`."""

    replay: str = ""
    """Decision log, or folder of decision logs, written by `serve` with `decision_log` in
    --routing-config. The recorded requests are replayed on the same number of simulated workers,
    with the same limits and speeds."""
    policies: tuple[str, ...] = ()
    """Routing policies; default: all."""


def run_replay(options: ReplayOptions) -> Result:
    """Measures times to first token and hit rates, as recorded and as simulated with each
    policy."""
    lines = list(read_decisions(options.replay))
    workload = recorded_workload(lines)
    entries, notes = find_routers(options.policies or ROUTERS)
    for text in notes:
        note(text)
    rows = [{"policy": "as it was", **_row(_recorded(lines))}]
    bound = 0.0
    for entry in entries:
        outcomes = simulate(workload, entry, {}, _SEED)
        rows.append({"policy": entry.name, **_row(figures(outcomes))})
        if entry.name == OWN or not bound:
            shape = workload.fleet
            bound = pooled_hit_rate(outcomes, shape.page_size, shape.pooled_pages)
    return {
        "requests": len(workload.arrivals),
        "workers": len(workload.fleet.slowness),
        "pooled_hit_rate": bound,
        "notes": notes,
        "rows": rows,
    }


def recorded_workload(lines: Iterable[LogLine]) -> Workload:
    """Workload with the times, lengths and shared blocks of recorded requests, on workers with the
    limits and speeds of the recorded ones.

    Raises:
        ValueError: the log has no request or no worker.
    """
    lines = list(lines)
    decided = sorted((line for line in lines if isinstance(line, DecisionLine)), key=lambda d: d.at)
    seen = {line.worker_id: line for line in lines if isinstance(line, WorkerSeen)}
    speeds = [line for line in lines if isinstance(line, FleetSpeed)]
    if not decided or not seen:
        raise ValueError("the decision log has no requests or no workers yet: record more traffic")
    factors: dict[str, float] = {}
    for speed in speeds:
        factors.update(speed.factors)
    first = next(iter(seen.values()))
    page_size = decided[0].page_size
    pages = max(-(-max(d.num_tokens + d.num_output for d in decided) // page_size), first.num_pages)
    shape = FleetShape(
        slowness=tuple(factors.get(worker_id, 1.0) for worker_id in seen),
        costs=speeds[-1].costs if speeds else DEFAULT_COSTS,
        page_size=page_size,
        num_pages=pages,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=first.max_num_batched_tokens or FleetShape().max_num_batched_tokens,
    )
    return Workload(name="replay", arrivals=tuple(_arrivals(decided)), fleet=shape)


def _arrivals(decided: Sequence[DecisionLine]) -> Iterable[Arrival]:
    began = decided[0].at
    for number, line in enumerate(decided):
        yield Arrival(
            request_id=f"{number}.{line.request_id}",
            at=line.at - began,
            tokens=_tokens(line, number),
            output_len=max(line.num_output, 1),
            session=line.session,
        )


def _tokens(line: DecisionLine, number: int) -> bytes:
    """Token ids of a prompt. Equal recorded hashes give equal blocks; tokens after the last full
    block are unique to the request."""
    hashes = np.frombuffer(line.hashes, "<u8")
    places = np.arange(line.page_size, dtype=np.uint64)
    mixed = hashes[:, None] + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    tokens = np.full(line.num_tokens, number, np.int32)
    whole = (mixed >> np.uint64(44)).astype(np.int32).reshape(-1)
    tokens[: len(whole)] = whole
    data = tokens.astype("<i4").tobytes()
    assert len(data) == line.num_tokens * TOKEN_BYTES
    return data


def _recorded(lines: Iterable[LogLine]) -> Figures:
    """Metrics as recorded. Raises ValueError if no request received a token."""
    decided = [d for d in lines if isinstance(d, DecisionLine) and d.first_token_s >= 0.0]
    if not decided:
        raise ValueError("no request in the decision log received a token: record more traffic")
    times = np.array([line.first_token_s for line in decided])
    return Figures(
        mean_ttft=float(times.mean()),
        p50_ttft=percentile(times, 50.0),
        p99_ttft=percentile(times, 99.0),
        hit_rate=sum(d.cached_tokens for d in decided) / sum(d.num_tokens for d in decided),
    )


def _row(one: Figures) -> dict[str, Any]:
    return {
        "mean_ttft_s": one.mean_ttft,
        "p50_ttft_s": one.p50_ttft,
        "p99_ttft_s": one.p99_ttft,
        "hit_rate": one.hit_rate,
    }
