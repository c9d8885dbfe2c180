"""Locations of LoRA adapters, and the time until a worker has one on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from router.fleet.constants import ADAPTER_HOST_COPY, ADAPTER_READ_S, ADAPTER_REPORT_S
from router.fleet.state import WorkerState
from router.fleet.workers import Floats
from worker.protocol.adapters import AdapterRef


def adapter_load_s(
    adapter: AdapterRef, workers: Iterable[WorkerState], num_rows: int, now: float
) -> Floats:
    """Seconds until each worker has an adapter on the device, one per row of the WorkerTable.

    0 if the adapter is on the device, or is being loaded for an earlier request of this gateway.
    Otherwise, the time to load it from disk, after the adapters that the worker must load first. An
    adapter in host memory takes a fraction of the time of one load from disk. Workers that have not
    loaded any adapter yet are assumed to take the mean time of the other workers.
    """
    seconds = np.zeros(num_rows)
    unmeasured: list[int] = []
    measured: list[float] = []
    for worker in workers:
        totals = worker.load.adapters
        if totals is None:
            continue
        if totals.read_s:
            measured.append(totals.read_s)
        sent_at = worker.adapters_sent.get(adapter.version, -np.inf)
        if adapter.version in totals.on_device or now - sent_at < ADAPTER_REPORT_S:
            continue
        if adapter.version in totals.on_host:
            seconds[worker.row] = ADAPTER_HOST_COPY * totals.read_s
            continue
        if not totals.read_s:
            unmeasured.append(worker.row)
        seconds[worker.row] = totals.read_s * (1 + _num_coming(worker, now))
    if unmeasured:
        seconds[unmeasured] = sum(measured) / len(measured) if measured else ADAPTER_READ_S
    return seconds


def _num_coming(worker: WorkerState, now: float) -> int:
    """Number of adapters that a worker still has to load, one after another, for this gateway's
    requests."""
    totals = worker.load.adapters
    assert totals is not None
    return sum(
        now - sent_at < ADAPTER_REPORT_S
        and version not in totals.on_device
        and version not in totals.on_host
        for version, sent_at in worker.adapters_sent.items()
    )


def note_adapter(adapter: AdapterRef, worker: WorkerState, now: float) -> None:
    """Records that a request for an adapter was sent to a worker, which will load the adapter."""
    sent = worker.adapters_sent
    for version in [v for v, sent_at in sent.items() if now - sent_at >= ADAPTER_REPORT_S]:
        del sent[version]
    sent[adapter.version] = now
