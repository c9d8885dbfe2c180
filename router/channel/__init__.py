"""Channels to workers: per worker, a stream of its reports and tokens, and batched submits."""

from router.channel.channel import WorkerChannel
from router.channel.link import WorkerLink
from router.channel.protocols import (
    ChannelListener,
    Receiver,
    SubmitRejected,
    WorkerTransport,
    WorkerUnreachable,
)

__all__ = [
    "ChannelListener",
    "Receiver",
    "SubmitRejected",
    "WorkerChannel",
    "WorkerLink",
    "WorkerTransport",
    "WorkerUnreachable",
]
