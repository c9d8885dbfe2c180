"""Metrics of a rank: the memory of its device, which is not visible to other processes.

A rank has no event loop, so a thread with a separate loop serves them. The thread sleeps between
scrapes, and holds the GIL for less than a millisecond per scrape.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from worker.metrics.node import NodeMetrics
from worker.protocol.analyzed import analyzed
from worker.protocol.exposition import render

VARIABLE: Final = "RAYFLEET_RANK_OF"
"""Environment variable that contains a RankOwner as JSON. Child processes, which may run a rank's
steps, inherit it."""
DeviceMemory = Callable[[], tuple[int, int]]
"""Function that returns the free and total memory of the device, in bytes."""


class RankOwner(NamedTuple):
    """Model and worker to which a rank belongs."""

    model_name: str
    worker_id: str
    directory: str
    """Folder shared by the processes of the node (see NodeMetrics)."""


def belong_to(owner: RankOwner) -> None:
    """Sets the owner of this process and its children, for `answer_scrapes`."""
    os.environ[VARIABLE] = msgspec.json.encode(owner).decode()


def answer_scrapes(rank: int, memory: DeviceMemory) -> None:
    """Serves this rank's metrics until the process exits. Does nothing if no owner is set."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        owner = msgspec.json.decode(text, type=analyzed(RankOwner))
        threading.Thread(
            target=lambda: asyncio.run(_serve(rank, owner, memory)), name="metrics", daemon=True
        ).start()


async def _serve(rank: int, owner: RankOwner, memory: DeviceMemory) -> None:
    metrics = NodeMetrics(
        f"rank {rank} of worker {owner.worker_id}",
        lambda content_type: render(device_metrics(rank, owner, memory), content_type),
        owner.directory,
        watch_loop=False,
    )
    await metrics.open()
    await asyncio.Event().wait()


def device_metrics(rank: int, owner: RankOwner, memory: DeviceMemory) -> Iterator[Metric]:
    """Memory metrics of a rank's device, in bytes: used (by any process) and total."""
    free, total = memory()
    for name, text, value in (
        ("used", "Used memory of the rank's GPU in bytes, by any process.", total - free),
        ("total", "Total memory of the rank's GPU in bytes.", total),
    ):
        gauge = GaugeMetricFamily(
            f"rayfleet_gpu_memory_{name}_bytes", text, labels=["model_name", "worker_id", "rank"]
        )
        gauge.add_metric([owner.model_name, owner.worker_id, str(rank)], value)
        yield gauge
