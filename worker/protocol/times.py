"""Latencies of requests and phases of steps."""

from __future__ import annotations

import msgspec


class FirstTokenTimes(msgspec.Struct, array_like=True, frozen=True):
    """Parts of a request's time to first token at its worker, in seconds."""

    queue_s: float
    """Time in the queue until the request was first admitted."""
    prefill_s: float
    """Time from admission to the first token, including interruptions."""


class StepTimes(msgspec.Struct, array_like=True):
    """Total time of a worker's steps since the epoch began, by phase, in seconds.

    Phases of the coordinator: schedule, broadcast, collect, process, deliver. Phases of rank 0 (on
    CUDA, of its device): prepare, forward, sample, bubble. Each of the two groups adds up to the
    worker's busy time.
    """

    num_steps: int = 0
    schedule: float = 0.0
    """Scheduling: deciding the Plan."""
    broadcast: float = 0.0
    """Encoding and sending the Plan to the ranks; on CUDA, also launching it on rank 0's device."""
    prepare: float = 0.0
    """Updating tables and staging input tensors."""
    forward: float = 0.0
    """Forward pass of the model."""
    sample: float = 0.0
    """Computing logits, sampling, and copying tokens to the host, including the wait for grammar
    masks."""
    collect: float = 0.0
    """Waiting for results."""
    process: float = 0.0
    """Applying results and creating reports."""
    deliver: float = 0.0
    """Sending reports and receiving requests between steps."""
    bubble: float = 0.0
    """Idle time of rank 0 between steps while there was work."""
