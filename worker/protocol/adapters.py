"""LoRA adapters in messages: an adapter's version, and where a worker has copies of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker.protocol.exports import AsCounter, AsGauge


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """One version of a LoRA adapter."""

    name: str
    """Name of the adapter, which requests specify as their model."""
    folder: str
    """Folder of the adapter on the workers' nodes."""
    version: str
    """Digest of the content (see `worker.models.config.adapter_version`). Different weights or a
    different configuration give a different version, regardless of the name."""


class AdapterCheck(msgspec.Struct, array_like=True, frozen=True):
    """Result of a worker's check of an adapter's folder."""

    version: str = ""
    """Digest of the content; empty if there is a problem, or while the worker is loading."""
    problem: str = ""
    """Reason why the adapter cannot be served; empty if it can, or while the worker is loading."""


class AdapterTotals(msgspec.Struct, array_like=True):
    """LoRA adapters in a worker's memory, and totals of loading them since the epoch began."""

    on_device: list[str] = []
    """Versions of adapters on the device."""
    on_host: list[str] = []
    """Versions of adapters in host memory, including those that are also on the device."""
    num_waiting: Annotated[
        int, AsGauge("num_requests_waiting_for_lora", "Requests waiting for their LoRA adapter.")
    ] = 0
    read_s: float = 0.0
    """Moving average of the time to read an adapter into host memory, in seconds; 0 before the
    first read."""
    num_loads: Annotated[
        int, AsCounter("lora_loads", "LoRA adapters copied from host memory to the device.")
    ] = 0
    num_reads: Annotated[int, AsCounter("lora_reads", "LoRA adapters read into host memory.")] = 0
    num_failures: Annotated[
        int, AsCounter("lora_read_failures", "LoRA adapters that could not be read.")
    ] = 0
    read_time_s: Annotated[
        float,
        AsCounter(
            "lora_read_time_seconds",
            "Total time spent reading LoRA adapters into host memory, in seconds.",
        ),
    ] = 0.0
