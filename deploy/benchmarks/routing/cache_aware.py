"""Simulated router with the algorithm of sglang-router's cache_aware policy, version 0.3.2.

It is implemented from the policy's description, not its code. The original matches characters, and
evicts a worker's oldest prompts beyond 64 Mi characters. This router matches pages and evicts
nothing, since simulations send less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile

from deploy.benchmarks.routing.simulated import Placement, SimulatedRouter
from deploy.benchmarks.routing.worker import SimWorker
from deploy.benchmarks.routing.workload import Arrival
from router.fleet import PromptBlocks
from router.fleet.blocks import BlockKey
from router.fleet.memo import HashMemo
from worker.protocol.messages import StepReport, Submit

_DEFAULTS = {"cache_threshold": 0.3, "balance_abs_threshold": 64, "balance_rel_threshold": 1.5}


class CacheAwareRouter(SimulatedRouter):
    """Chooses the worker that was sent the longest prefix of the prompt, regardless of load.

    The worker with the fewest open requests is chosen instead if no prefix is longer than
    `cache_threshold` of the prompt, or if the numbers of open requests differ by more than
    `balance_abs_threshold` and by more than a factor of `balance_rel_threshold`.

    Args:
        settings: thresholds that replace the defaults, keyed by name.
    """

    def __init__(self, settings: Mapping[str, float]) -> None:
        values = {**_DEFAULTS, **settings}
        self._cache_threshold = values["cache_threshold"]
        self._abs_threshold = values["balance_abs_threshold"]
        self._rel_threshold = values["balance_rel_threshold"]
        self._memo = HashMemo()
        self._sent: dict[str, set[int]] = {}
        """Block hashes of all prompts sent to a worker, keyed by worker id."""
        self._keys: dict[str, BlockKey] = {}
        self._open: dict[str, str] = {}
        """Workers of open requests, keyed by request id."""
        self._num_sent = Counter[str]()

    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""
        self._sent.setdefault(worker.worker_id, set())
        self._keys[worker.worker_id] = BlockKey.of(worker.info)

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that failed or left. Ignores broken attach streams, which this router
        does not use."""
        if not worker.up or worker.draining:
            self._sent.pop(worker.worker_id, None)

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time."""
        return [self._place(arrival) if self._sent else None for arrival in arrivals]

    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Does nothing: requests are counted when they are placed."""

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Does nothing, as this router receives no step reports."""

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request or its worker has ended."""
        self._open.pop(request_id, None)

    def _place(self, arrival: Arrival) -> Placement:
        prompt = PromptBlocks(arrival.tokens, memo=self._memo)
        hashes = {name: prompt.hashes(self._keys[name]).tolist() for name in self._sent}
        worker_id = self._choose(hashes)
        self._sent[worker_id].update(hashes[worker_id])
        self._open[arrival.request_id] = worker_id
        self._num_sent[worker_id] += 1
        return Placement(worker_id)

    def _choose(self, hashes: Mapping[str, Sequence[int]]) -> str:
        """Worker for a prompt, given the prompt's block hashes for each worker."""
        num_open = Counter(self._open.values())
        loads = {name: (num_open[name], self._num_sent[name]) for name in self._sent}
        least = min(loads, key=lambda name: loads[name])
        low, high = num_open[least], max(num_open[name] for name in self._sent)
        if high - low > self._abs_threshold and high > self._rel_threshold * low:
            return least
        rates = {
            name: len(list(takewhile(sent.__contains__, hashes[name]))) / max(len(hashes[name]), 1)
            for name, sent in self._sent.items()
        }
        best = max(rates, key=lambda name: rates[name])
        return best if rates[best] > self._cache_threshold else least
