"""Rendezvous: addresses at which the ranks of a group on several nodes connect.

On a single node, ranks use a directory instead. Across nodes, the coordinator listens at its node's
address on two ports: one for ranks, which must send a token before they receive Plans, and one for
torch's store, which creates the process group.

HAZARD: neither the store nor the connections of collectives check a token. The network between the
nodes must be private.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import msgspec
import psutil

from worker.plan.sockets import listen_on
from worker.protocol.analyzed import analyzed

_FILE = "rendezvous"


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and token with which a rank joins its group."""

    host: str
    """Address of the coordinator's node."""
    port: int
    """Port of the coordinator for ranks."""
    store_port: int
    """Port of torch's store."""
    token: str
    """Secret that a rank sends to the coordinator as its first frame."""
    store_fd: int = -1
    """File descriptor of the socket listening on `store_port`, in rank 0's process, where torch's
    store takes it over; -1 in other processes."""


class RendezvousHost:
    """The coordinator's listening sockets.

    Args:
        host: address of this node that is reachable from the other nodes.
        num_ranks: number of ranks expected to connect.
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
        """The rendezvous, including the store's socket, which the caller then owns."""
        assert self._store.fileno() >= 0, "the socket was already taken"
        return msgspec.structs.replace(self.rendezvous, store_fd=self._store.detach())

    def close(self) -> None:
        """Closes the store's socket unless rank 0 owns it. The channel closes the listener."""
        self._store.close()


def published(directory: str, store_fd: int = -1) -> Rendezvous | None:
    """The rendezvous written by `RendezvousHost.publish`; None before that."""
    try:
        rendezvous = msgspec.json.decode(
            Path(directory, _FILE).read_bytes(), type=analyzed(Rendezvous)
        )
    except FileNotFoundError:
        return None
    return msgspec.structs.replace(rendezvous, store_fd=store_fd)


def interface_towards(host: str) -> str | None:
    """Name of the network interface that leads to `host`; None if it is unknown."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket: nothing is sent
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == mine for entry in addresses):
            return name
    return None
