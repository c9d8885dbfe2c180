"""Workloads for simulations. Each stresses a known weakness of some routing policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cluster.bench.traces import TRACE_BLOCK, TraceFile
from deploy.benchmarks.routing.workload import Arrival, FleetShape, Incident, Workload

Tokens: TypeAlias = NDArray[np.int32]
Maker: TypeAlias = Callable[[int], Workload]
"""Function that creates a workload from a seed."""

_VOCAB = 100_000
_ANSWER = 7
"""Token id that simulated workers generate (`deploy.benchmarks.routing.worker.TOKEN`)."""
_OUTPUT = 50
_TRACE_PAGES = 3000
_TRACE_REQUESTS = 1500
_TRACE_WARM = 500
"""Number of trace requests that only warm up the caches."""
_SHORTER = 4
"""Divisor for the trace's output lengths: only prompts matter for routing, and decode steps take
most of the simulation's run time."""


def workloads(scale: float, folder: str | None) -> Mapping[str, Maker]:
    """Functions that create workloads, keyed by name.

    Args:
        scale: factor for the number of requests; published results use 1.
        folder: folder with Mooncake's traces; None skips these workloads.
    """
    makers: dict[str, Maker] = {
        "shared-prompts": partial(shared_prompts, scale=scale),
        "multi-turn": partial(multi_turn, scale=scale),
        "agent-tree": partial(agent_tree, scale=scale),
        "rag-zipf": partial(rag_zipf, scale=scale),
        "hot-prefix": partial(hot_prefix, scale=scale),
        "sibling-burst": partial(sibling_burst, scale=scale),
        "no-sharing": partial(no_sharing, scale=scale),
        "churn": partial(churn, scale=scale),
        "speeds": partial(speeds, scale=scale),
        "adapters": partial(adapters, scale=scale),
    }
    if folder is not None:
        for name in ("conversation", "synthetic"):
            trace = TraceFile(f"{folder}/{name}_trace.jsonl")
            for speed in (1.0, 1.4):
                makers[f"{name}-x{speed}"] = partial(
                    trace_workload, trace=trace, speed=speed, scale=scale
                )
    return makers


def shared_prompts(seed: int, scale: float = 1.0, rate: float = 45.0) -> Workload:
    """Requests that share 60 system prompts of 3,000 tokens."""
    draw = _Draw(seed)
    prompts = [draw.tokens(3000) for _ in range(60)]
    arrivals = [
        draw.arrival(f"r{n}", at, np.concatenate([prompts[draw.below(60)], draw.tokens(400)]))
        for n, at in draw.times(rate, int(1600 * scale), _WARM)
    ]
    return Workload(name="shared-prompts", arrivals=tuple(arrivals), fleet=FleetShape())


def multi_turn(seed: int, scale: float = 1.0, rate: float = 9.0) -> Workload:
    """Conversations of six turns, with pauses between turns."""
    draw = _Draw(seed)
    system = draw.tokens(500)
    arrivals: list[Arrival] = []
    for n, at in draw.times(rate, int(270 * scale)):
        prompt = np.concatenate([system, draw.tokens(draw.between(500, 3000))])
        last = ""
        for turn in range(6):
            name = f"c{n}.{turn}"
            arrivals.append(
                draw.arrival(
                    name,
                    2.0 + draw.exponential(5.0) if last else at,
                    prompt,
                    session=f"c{n}",
                    after=last,
                )
            )
            prompt = np.concatenate([prompt, _output(), draw.tokens(draw.between(50, 500))])
            last = name
    return Workload(name="multi-turn", arrivals=tuple(arrivals), fleet=FleetShape())


def agent_tree(seed: int, scale: float = 1.0, rate: float = 1.6) -> Workload:
    """Trees of agent calls, three levels deep: on each level, one call starts 1 to 16 new calls
    with its context when it ends."""
    draw = _Draw(seed)
    system = draw.tokens(2000)
    arrivals: list[Arrival] = []
    for n, at in draw.times(rate, int(60 * scale)):
        root = np.concatenate([system, draw.tokens(1500)])
        arrivals.append(draw.arrival(f"a{n}", at, root, session=f"a{n}"))
        nodes = [(f"a{n}", root)]
        for _depth in range(3):
            parent, context = nodes[draw.below(len(nodes))]
            grown = np.concatenate([context, _output(), draw.tokens(draw.between(200, 1200))])
            nodes = []
            for child in range(2 ** draw.below(5)):
                name = f"{parent}.{child}"
                prompt = np.concatenate([grown, draw.tokens(draw.between(50, 400))])
                arrivals.append(draw.arrival(name, 0.2, prompt, session=f"a{n}", after=parent))
                nodes.append((name, prompt))
    return Workload(name="agent-tree", arrivals=tuple(arrivals), fleet=FleetShape())


def rag_zipf(seed: int, scale: float = 1.0, rate: float = 24.0) -> Workload:
    """Questions, each about two of 600 documents, whose popularity is Zipf-distributed (exponent
    0.9)."""
    draw = _Draw(seed)
    system = draw.tokens(200)
    documents = [draw.tokens(draw.between(800, 2400)) for _ in range(600)]
    shares = np.arange(1, 601, dtype=np.float64) ** -0.9
    arrivals = []
    for n, at in draw.times(rate, int(1200 * scale), _WARM):
        first, second = draw.choice(shares, 2)
        parts = [system, documents[first], documents[second], draw.tokens(100)]
        arrivals.append(draw.arrival(f"r{n}", at, np.concatenate(parts)))
    return Workload(name="rag-zipf", arrivals=tuple(arrivals), fleet=FleetShape())


def hot_prefix(seed: int, scale: float = 1.0, rate: float = 50.0) -> Workload:
    """Requests that all share a prefix of 6,000 tokens. No worker has cached it at the start."""
    draw = _Draw(seed)
    prompt = draw.tokens(6000)
    arrivals = [
        draw.arrival(f"r{n}", at, np.concatenate([prompt, draw.tokens(300)]))
        for n, at in draw.times(rate, int(1200 * scale))
    ]
    return Workload(name="hot-prefix", arrivals=tuple(arrivals), fleet=FleetShape())


def sibling_burst(seed: int, scale: float = 1.0, rate: float = 1.6) -> Workload:
    """Bursts of 16 requests at once that share a new prefix of 6,000 tokens."""
    draw = _Draw(seed)
    arrivals = []
    for n, at in draw.times(rate, int(60 * scale)):
        prompt = draw.tokens(6000)
        for child in range(16):
            tokens = np.concatenate([prompt, draw.tokens(100)])
            arrivals.append(draw.arrival(f"b{n}.{child}", at, tokens, session=f"b{n}"))
    return Workload(name="sibling-burst", arrivals=tuple(arrivals), fleet=FleetShape())


def no_sharing(seed: int, scale: float = 1.0, rate: float = 18.0) -> Workload:
    """Prompts of log-normal lengths without shared prefixes."""
    draw = _Draw(seed)
    arrivals = [
        draw.arrival(f"r{n}", at, draw.tokens(draw.lognormal(7.3, 0.7)))
        for n, at in draw.times(rate, int(1000 * scale), _WARM)
    ]
    return Workload(name="no-sharing", arrivals=tuple(arrivals), fleet=FleetShape())


def churn(seed: int, scale: float = 1.0) -> Workload:
    """Conversations during which workers fail, drain and join, and attach streams break."""
    base = multi_turn(seed, scale, rate=6.0)
    draw = _Draw(seed + 10**6)
    end = base.arrivals[-6].at
    incidents = [
        Incident(at=end * 0.15, kind="kill", worker=1),
        Incident(at=end * 0.3, kind="join", worker=6),
        Incident(at=end * 0.4, kind="leave", worker=2),
        Incident(at=end * 0.5, kind="kill", worker=4),
        Incident(at=end * 0.6, kind="join", worker=7),
        Incident(at=end * 0.8, kind="kill", worker=0),
    ]
    for _ in range(int(40 * scale)):
        at = end * draw.uniform()
        incidents.append(Incident(at=at, kind="break", worker=draw.below(8)))
    fleet = FleetShape(slowness=(1.0,) * 6)
    return Workload(name="churn", arrivals=base.arrivals, fleet=fleet, incidents=tuple(incidents))


def speeds(seed: int, scale: float = 1.0) -> Workload:
    """Requests with and without shared prompts, on workers with slowness factors 1, 2 and 4."""
    shared = shared_prompts(seed, 0.6 * scale, rate=13.0)
    own = no_sharing(seed + 10**6, 0.6 * scale, rate=5.0)
    arrivals = [
        *shared.arrivals,
        *(replace(a, request_id=f"own.{a.request_id}") for a in own.arrivals),
    ]
    arrivals.sort(key=lambda arrival: arrival.at)
    fleet = FleetShape(slowness=(4.0, 4.0, 4.0, 2.0, 2.0, 2.0, 1.0, 1.0))
    return Workload(name="speeds", arrivals=tuple(arrivals), fleet=fleet)


def adapters(seed: int, scale: float = 1.0, rate: float = 30.0) -> Workload:
    """Requests for 200 LoRA adapters, whose popularity is Zipf-distributed (exponent 1), on workers
    with 16 slots each."""
    draw = _Draw(seed)
    shares = np.arange(1, 201, dtype=np.float64) ** -1.0
    arrivals = []
    for n, at in draw.times(rate, int(1600 * scale), _WARM):
        (number,) = draw.choice(shares, 1)
        arrival = draw.arrival(f"r{n}", at, draw.tokens(draw.between(100, 600)))
        arrivals.append(replace(arrival, adapter=f"a{number}", output_len=16))
    fleet = FleetShape(max_loras=16, max_cpu_loras=32)
    return Workload(name="adapters", arrivals=tuple(arrivals), fleet=fleet)


def trace_workload(seed: int, *, trace: TraceFile, speed: float, scale: float = 1.0) -> Workload:
    """Consecutive requests of a trace, starting at a random one, replayed `speed` times as fast."""
    lines = trace.lines()
    shape = FleetShape(page_size=TRACE_BLOCK, num_pages=_TRACE_PAGES, max_num_seqs=128)
    count = min(max(int(_TRACE_REQUESTS * scale), 1), len(lines))
    first = int(np.random.default_rng(seed).integers(len(lines) - count + 1))
    lines = lines[first : first + count]
    began = lines[0].timestamp
    arrivals = tuple(
        Arrival(
            request_id=f"t{number}",
            at=(line.timestamp - began) / 1000.0 / speed,
            tokens=line.tokens(number).astype("<i4").tobytes(),
            output_len=max(line.output_length // _SHORTER, 1),
            measured=number >= int(_TRACE_WARM * scale),
        )
        for number, line in enumerate(lines)
    )
    name = os.path.basename(trace.path).removesuffix("_trace.jsonl")
    return Workload(name=f"{name}-x{speed}", arrivals=arrivals, fleet=shape)


_WARM = 0.25
"""Fraction of a workload's requests that only warm up the caches."""


class _Draw:
    """Random generator for workloads."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._warm_until = 0.0

    def times(self, rate: float, count: int, warm: float = 0.0) -> Iterator[tuple[int, float]]:
        """Indices and times of Poisson arrivals; the first fraction `warm` is not measured."""
        gaps = self._random.exponential(1.0 / rate, max(count, 1))
        times = np.cumsum(gaps).tolist()
        self._warm_until = times[int(warm * len(times))] if warm else 0.0
        yield from enumerate(times)

    def arrival(
        self, name: str, at: float, tokens: Tokens, *, session: str = "", after: str = ""
    ) -> Arrival:
        """A request; measured unless it arrives during the warm-up."""
        return Arrival(
            request_id=name,
            at=at,
            tokens=tokens.astype("<i4").tobytes(),
            output_len=_OUTPUT,
            session=session,
            after=after,
            measured=bool(after) or at >= self._warm_until,
        )

    def tokens(self, count: int) -> Tokens:
        """Random token ids."""
        return self._random.integers(0, _VOCAB, count, dtype=np.int32)

    def below(self, limit: int) -> int:
        return int(self._random.integers(limit))

    def between(self, low: int, high: int) -> int:
        return int(self._random.integers(low, high))

    def uniform(self) -> float:
        return float(self._random.random())

    def exponential(self, mean: float) -> float:
        return float(self._random.exponential(mean))

    def lognormal(self, mean: float, sigma: float) -> int:
        return 16 + min(int(self._random.lognormal(mean, sigma)), 20_000)

    def choice(self, shares: NDArray[np.float64], count: int) -> list[int]:
        """Distinct indices, sampled in proportion to their shares."""
        chosen = self._random.choice(len(shares), count, replace=False, p=shares / shares.sum())
        return [int(place) for place in chosen]


def _output() -> Tokens:
    return np.full(_OUTPUT, _ANSWER, np.int32)
