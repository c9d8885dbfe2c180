"""Load generators on the nodes of a Ray cluster, all started at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from cluster.bench.client import Record
from cluster.bench.load import Load, LoadResult, join_parts, run_part, split_load
from cluster.local_ray import join_ray

_CPUS = 0.5
"""CPUs reserved per generator, enough for about 10,000 tokens per second."""
_PLACEMENT_TIMEOUT_S = 300.0
"""Timeout in seconds for placing all generators, as the cluster may have to add nodes."""
_LEAD_S = 0.5
"""Seconds between the calls and the start of the load, in which all calls must arrive."""


class Generators:
    """Ray actors that each send a part of a load. Clocks of the nodes must be synchronized.

    Args:
        count: number of actors to spread over the nodes.

    Raises:
        ValueError: there is no Ray cluster, or not enough CPUs for the actors.
    """

    def __init__(self, count: int) -> None:
        if not ray.is_initialized():
            _join()
        options: dict[str, Any] = {"num_cpus": _CPUS, "scheduling_strategy": "SPREAD"}
        self._actors = [_Generator.options(**options).remote() for _ in range(count)]  # type: ignore[attr-defined]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=_PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(
                f"not enough CPUs for {count} load generators with {_CPUS} CPUs each: lower "
                "--load-tasks, or add CPUs to the cluster"
            ) from error

    def run(self, load: Load) -> LoadResult:
        """Runs a load to completion, split by `split_load`."""
        count = min(len(self._actors), len(load.requests), load.max_concurrency or 10**9)
        parts = split_load(load, max(count, 1))
        start_at = time.time() + _LEAD_S
        calls = [
            actor.run.remote(part, start_at)
            for actor, part in zip(self._actors, parts, strict=False)
        ]
        found: Sequence[tuple[list[Record], float]] = ray.get(calls)
        return join_parts(found, 0.0)

    def close(self) -> None:
        """Kills the actors."""
        for actor in self._actors:
            ray.kill(actor)


def _join() -> None:
    try:
        join_ray("auto")
    except ConnectionError as error:
        raise ValueError(
            "no Ray cluster found for --load-tasks: submit this as a Ray job, set RAY_ADDRESS, or "
            "remove --load-tasks"
        ) from error


@ray.remote
class _Generator:
    def ready(self) -> bool:
        return True

    def run(self, load: Load, start_at: float) -> tuple[list[Record], float]:
        """Runs a part of a load, starting at the Unix time `start_at`; start times in its records
        are relative to that time."""
        start = time.perf_counter() + start_at - time.time()
        records, cpu_s = run_part(load, start)
        for record in records:
            record.start -= start
        return records, cpu_s
