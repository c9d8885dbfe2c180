"""Load generators on the nodes of a Ray cluster, with a common start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from cluster.bench.client import Record
from cluster.bench.load import Load, LoadResult, join_parts, run_part, split_load
from cluster.local_ray import join_ray

_CPUS = 0.5
"""CPUs that each generator reserves; some ten thousand tokens per second take less."""
_ROOM_S = 300.0
"""Seconds to wait for all generators, as a cluster may have to add nodes."""
_LEAD_S = 0.5
"""Seconds from the calls to the start of the load, in which all calls must arrive."""


class Generators:
    """Ray actors, each of which sends a part of a load. Clocks of the nodes must agree.

    Args:
        count: number of actors, which are spread over the nodes.

    Raises:
        ValueError: there is no Ray cluster, or no room for the actors.
    """

    def __init__(self, count: int) -> None:
        if not ray.is_initialized():
            _join()
        options: dict[str, Any] = {"num_cpus": _CPUS, "scheduling_strategy": "SPREAD"}
        self._actors = [_Generator.options(**options).remote() for _ in range(count)]  # type: ignore[attr-defined]
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=_ROOM_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(
                f"no room for {count} load generators of {_CPUS} CPUs: give --load-tasks a "
                "lower number, or the cluster more CPUs"
            ) from error

    def run(self, load: Load) -> LoadResult:
        """Runs a load to its end, in parts by `split_load`."""
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
            "there is no Ray cluster to spread the load over: submit this as a job, set "
            "RAY_ADDRESS, or leave --load-tasks out"
        ) from error


@ray.remote
class _Generator:
    def ready(self) -> bool:
        return True

    def run(self, load: Load, start_at: float) -> tuple[list[Record], float]:
        """Runs a part of a load from the Unix time `start_at`, which records count from."""
        start = time.perf_counter() + start_at - time.time()
        records, cpu_s = run_part(load, start)
        for record in records:
            record.start -= start
        return records, cpu_s
