"""Channels to workers: an attach stream from each, and batched submits to it."""

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
