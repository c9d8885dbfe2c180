"""Where the ranks of one group find each other when they are on several nodes.

Within a node they meet in a directory. Across nodes the coordinator listens at its node's address:
at one port it sends the plans, to whoever presents the token first; at the other torch keeps the
store with which a process group is made. That store, and the connections of the collectives, know
no token: the network between the nodes has to be one that nobody else is in.
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
    """What a rank needs to know."""

    host: str
    """Address of the coordinator's node."""
    port: int
    """Of the coordinator."""
    store_port: int
    """Of torch's store."""
    token: str
    """The first frame that a rank sends to the coordinator."""
    store_fd: int = -1
    """In rank 0's process: the socket that listens at `store_port`, which the store takes over."""


class RendezvousHost:
    """The coordinator's end: both sockets, open from here on.

    Args:
        host: address of this node that the others reach.
        num_ranks: that are expected.
    """

    def __init__(self, host: str, num_ranks: int) -> None:
        self.listener = listen_on(host, num_ranks)
        """For the ranks that are to be sent the plans."""
        self._store = listen_on(host, num_ranks)
        self.rendezvous = Rendezvous(
            host=host,
            port=self.listener.getsockname()[1],
            store_port=self._store.getsockname()[1],
            token=secrets.token_hex(32),
        )

    def publish(self, directory: str) -> None:
        """Writes into the group's private directory where the other ranks are to go."""
        path = Path(directory, _FILE)
        draft = path.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self.rendezvous))
        draft.replace(path)

    def for_rank_0(self) -> Rendezvous:
        """The rendezvous with the store's socket, which is the caller's from now on."""
        assert self._store.fileno() >= 0, "the socket has been taken"
        return msgspec.structs.replace(self.rendezvous, store_fd=self._store.detach())

    def close(self) -> None:
        """Closes what was not taken. The channel closes the listener."""
        self._store.close()


def published(directory: str, store_fd: int = -1) -> Rendezvous | None:
    """What `RendezvousHost.publish` has written; None while there is nothing."""
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
