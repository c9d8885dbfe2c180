"""Rendezvous: addresses at which the ranks of one group meet when they are on several nodes.

Within a node they meet in a directory. Across nodes the coordinator listens at its node's address:
at one port for ranks, which present a token first and are then sent the Plans; at the other for
torch's store, by which a process group is made.

HAZARD: neither the store nor the connections of the collectives check a token. The network between
the nodes must be private.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec
import psutil

from worker.plan.sockets import listen_on

_FILE = "rendezvous"


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and token with which a rank joins its group."""

    host: str
    """Address of the coordinator's node."""
    port: int
    """Port at which the coordinator awaits ranks."""
    store_port: int
    """Port of torch's store."""
    token: str
    """Secret that a rank sends to the coordinator as its first frame."""
    store_fd: int = -1
    """Descriptor of the socket that listens at `store_port`, in rank 0's process, whose store takes
    it over; -1 elsewhere."""


class RendezvousHost:
    """The coordinator's end: both listening sockets.

    Args:
        host: address of this node that the other nodes reach.
        num_ranks: number of ranks that are to connect.
    """

    def __init__(self, host: str, num_ranks: int) -> None:
        self.listener = listen_on(host, num_ranks)
        """Listening socket for the ranks."""
        self._store = listen_on(host, num_ranks)
        self.rendezvous = Rendezvous(
            host=host,
            port=self.listener.getsockname()[1],
            store_port=self._store.getsockname()[1],
            token=secrets.token_hex(32),
        )

    def publish(self, directory: str) -> None:
        """Writes the rendezvous to the group's private directory on this node, for `published`."""
        path = Path(directory, _FILE)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self.rendezvous))
        draft.replace(path)

    def for_rank_0(self) -> Rendezvous:
        """The rendezvous with the store's socket, which is the caller's from now on."""
        assert self._store.fileno() >= 0, "the socket has been taken"
        return msgspec.structs.replace(self.rendezvous, store_fd=self._store.detach())

    def close(self) -> None:
        """Closes the store's socket unless it was taken. The channel closes the listener."""
        self._store.close()


def published(directory: str, store_fd: int = -1) -> Rendezvous | None:
    """The rendezvous that `RendezvousHost.publish` has written; None before."""
    try:
        rendezvous = msgspec.json.decode(Path(directory, _FILE).read_bytes(), type=Rendezvous)
    except FileNotFoundError:
        return None
    return msgspec.structs.replace(rendezvous, store_fd=store_fd)


def interface_towards(host: str) -> str | None:
    """The network interface that leads to `host`; None where its name is not known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: nothing is sent
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == mine for own in addresses):
            return name
    return None
