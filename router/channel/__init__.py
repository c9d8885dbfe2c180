"""Channels to workers: each has an attach stream coming in and batched submits going out."""

from router.channel.channel import WorkerChannel
from router.channel.link import WorkerLink
from router.channel.protocols import (
    ChannelListener,
    Receiver,
    Refused,
    WorkerTransport,
    WorkerUnreachable,
)

__all__ = [
    "ChannelListener",
    "Receiver",
    "Refused",
    "WorkerChannel",
    "WorkerLink",
    "WorkerTransport",
    "WorkerUnreachable",
]
