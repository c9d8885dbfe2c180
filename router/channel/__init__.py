"""One channel per worker: an attach stream coming in, coalesced submits going out."""

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
