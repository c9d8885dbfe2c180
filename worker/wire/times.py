"""How long the parts of requests and steps took."""

from __future__ import annotations

import msgspec


class FirstTokenTimes(msgspec.Struct, array_like=True, frozen=True):
    """Where a request's time at its worker went before its first token, in seconds."""

    queue_s: float
    """Until it was first admitted."""
    prefill_s: float
    """From then to the first token, what interrupted it included."""


class StepTimes(msgspec.Struct, array_like=True):
    """Where the time of a worker's steps went: seconds, summed up since the epoch began.

    Coordinator: schedule, broadcast, collect, process, deliver. Rank 0 (on CUDA its device):
    prepare, forward, sample, bubble. Each of the two adds up to the time the worker was busy.
    """

    num_steps: int = 0
    schedule: float = 0.0
    """Deciding the Plan."""
    broadcast: float = 0.0
    """Encoding it and sending it to the ranks; on CUDA also launching it on rank 0's device."""
    prepare: float = 0.0
    """Tables and input tensors."""
    forward: float = 0.0
    """The model."""
    sample: float = 0.0
    """Scoring, drawing, tokens to the host; with the wait for masks."""
    collect: float = 0.0
    """Waiting for results."""
    process: float = 0.0
    """Applying results and making reports."""
    deliver: float = 0.0
    """Sending reports and taking requests, between two steps of the engine."""
    bubble: float = 0.0
    """The rank idle between two steps while there was work."""
