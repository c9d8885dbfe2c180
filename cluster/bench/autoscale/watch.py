"""How many workers there are, looked at while a load runs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import aiohttp

from cluster.bench.report import note

_READY = re.compile(r'^rayfleet_workers{[^}]*state="ready"[^}]*} (\S+)$', re.MULTILINE)
_INTERVAL_S = 0.5


class Count(NamedTuple):
    """So many workers could take requests."""

    at_s: float
    """Since the load began."""
    workers: int


class WorkerWatch:
    """Counts workers until it is cancelled."""

    def __init__(self, base_url: str) -> None:
        self.counts: list[Count] = []
        self._url = f"{base_url}/metrics"

    async def run(self, start: float) -> None:
        """Looks on; `start` on `time.perf_counter`'s clock."""
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(self._url) as response:
                    text = await response.text()
                at_s = time.perf_counter() - start
                # Each gateway tells of all: those count that none has still to find.
                workers = int(min(map(float, _READY.findall(text)), default=0.0))
                if not self.counts or self.counts[-1].workers != workers:
                    note(f"{at_s:6.1f} s  {workers} worker(s)")
                self.counts.append(Count(at_s, workers))
                await asyncio.sleep(_INTERVAL_S)


def levels(counts: Sequence[Count]) -> list[int]:
    """The numbers of workers that there were, one after the other."""
    return [workers for workers, _ in groupby(count.workers for count in counts)]


def num_turns(counts: Sequence[Count]) -> int:
    """How often the number changed in the other direction than before."""
    rises = [later > earlier for earlier, later in pairwise(levels(counts))]
    return sum(a != b for a, b in pairwise(rises))
