"""A rank's own metrics: the memory of its device, which no other process knows.

A rank has no event loop: a thread answers, on one of its own. It sleeps between scrapes, and takes
the interpreter for less than a millisecond then.
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
from worker.wire.exposition import render

VARIABLE: Final = "RAYFLEET_RANK_OF"
"""Environment variable with a RankOwner as JSON: a rank's step may run in a child process."""
DeviceMemory = Callable[[], tuple[int, int]]
"""Bytes of the device that are free, and all of them."""


class RankOwner(NamedTuple):
    """Whose rank a process is."""

    model_name: str
    worker_id: str
    directory: str
    """What the processes of the node share, see NodeMetrics."""


def belong_to(owner: RankOwner) -> None:
    """This process and its children are ranks of that worker."""
    os.environ[VARIABLE] = msgspec.json.encode(owner).decode()


def answer_scrapes(rank: int, memory: DeviceMemory) -> None:
    """Answers for this rank from now on, to the end of the process; not where nobody owns it."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        owner = msgspec.json.decode(text, type=RankOwner)
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
    """The memory of one rank's device; other processes' use of it counts, too."""
    free, total = memory()
    for name, text, value in (
        ("used", "Bytes in use on the rank's GPU, whoever uses them.", total - free),
        ("total", "Bytes of the rank's GPU.", total),
    ):
        gauge = GaugeMetricFamily(
            f"rayfleet_gpu_memory_{name}_bytes", text, labels=["model_name", "worker_id", "rank"]
        )
        gauge.add_metric([owner.model_name, owner.worker_id, str(rank)], value)
        yield gauge
