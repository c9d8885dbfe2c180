"""Rank processes of the coordinator: startup, messages, failures and shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from worker.config import EngineConfig
from worker.core.executor import RankFailure
from worker.plan.channel import CoordinatorChannel
from worker.plan.messages import Failure, FromRank, Hello, Ready, Stop, ToRank
from worker.plan.rendezvous import Rendezvous, RendezvousHost

LAST_WORD_MS = 1000
"""Maximum time in milliseconds to wait for the last message of an exiting rank, or for another rank
to exit. A killed process closes its sockets first, and ranks have a low priority, so on a loaded
machine the process may exit much later."""


class RankGroup:
    """Ranks of a worker group that run outside the coordinator's process.

    Args:
        config: the group's engine configuration.
        directory: the group's private folder.
        ranks: ranks connected by sockets.
        spawn: ranks to start as child processes; another process starts the others.
        host: this node's address if ranks are on several nodes, otherwise empty.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: str,
        ranks: Sequence[int],
        spawn: Sequence[int],
        host: str = "",
    ) -> None:
        self._config = config
        self._directory = directory
        self._ranks = list(ranks)
        self._rendezvous = RendezvousHost(host, len(self._ranks)) if host else None
        self._channel = CoordinatorChannel(directory, self._ranks, self._rendezvous)
        self.send: Callable[[ToRank], None] = self._channel.send
        """Sends a message to all ranks without waiting."""
        self._children: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._is_connected = False
        """Whether every rank has sent its hello."""
        self._is_stopped = self._closed = False
        if self._rendezvous is not None:
            self._rendezvous.publish(directory)
        for rank in spawn:
            self._spawn(rank)

    def rendezvous_of_rank_0(self) -> Rendezvous | None:
        """Rendezvous of ranks on several nodes, for a rank 0 in this process; None if all ranks are
        on one node."""
        return None if self._rendezvous is None else self._rendezvous.for_rank_0()

    @property
    def death_fds(self) -> list[int]:
        """File descriptors that become readable when a rank exits; polled while idle."""
        return [*self._children, *self._channel.fds]

    def collect_hellos(self) -> dict[int, Hello]:
        """Waits until every rank has loaded its shard; returns their hellos by rank. Raises
        RankFailure."""
        hellos: dict[int, Hello] = {}
        while len(hellos) < len(self._ranks):
            message = self.receive()
            assert isinstance(message, Hello), f"expected a hello, got {message!r}"
            hellos[message.rank] = message
        self._is_connected = True
        return hellos

    def collect_readies(self) -> list[Ready]:
        """Waits until every rank has handled `Start`. Raises RankFailure."""
        readies = []
        for _ in self._ranks:
            message = self.receive()
            assert isinstance(message, Ready), f"expected ready, got {message!r}"
            readies.append(message)
        return readies

    def receive(self) -> FromRank:
        """Returns the next message from any rank. Raises RankFailure if a rank failed or exited."""
        messages = self._channel.messages
        while not messages:
            # Before a child is connected, its exit can only be detected from its process.
            self._channel.wait(() if self._is_connected else self._children)
            if self._channel.num_lost or not self._is_connected:
                self.raise_on_death()
        message = messages.popleft()
        if isinstance(message, Failure):
            self._fail(message)
        return message

    def raise_on_death(self) -> None:
        """Raises RankFailure if a rank has exited, with the error that it sent, if any."""
        self._channel.wait(timeout_ms=0)
        if not self._channel.num_lost and not self._ended_children():
            return
        # Read a rank's last messages before its exit code. The exit of a process may be detected
        # shortly after the end of its stream.
        self._channel.wait(self._children, timeout_ms=LAST_WORD_MS)
        while self._channel.messages:
            message = self._channel.messages.popleft()
            if isinstance(message, Failure):
                self._fail(message)
        codes = ", ".join(str(child.returncode) for child in self._ended_children())
        raise RankFailure(
            self._describe_deaths() or f"a rank exited unexpectedly{codes and f', code {codes}'}"
        )

    def _ended_children(self) -> list[subprocess.Popen[bytes]]:
        return [child for _, child in self._children.values() if child.poll() is not None]

    def _fail(self, message: Failure) -> NoReturn:
        # When a rank is killed, the others fail in their next collective, so list the kill first.
        words = [f"rank {message.rank} failed:\n{message.error}"]
        deadline_polls = LAST_WORD_MS // 10
        while not (deaths := self._describe_deaths()) and deadline_polls:
            deadline_polls -= 1
            time.sleep(0.01)
        # A killed rank may start successfully the next time, regardless of the other ranks' errors.
        heals = message.heals or bool(deaths)
        raise RankFailure("\n".join([*words, *([deaths] if deaths else [])]), heals=heals)

    def _describe_deaths(self) -> str:
        """Descriptions of the children that were killed by a signal, one line each."""
        lines = []
        for rank, child in self._children.values():
            code = child.poll()
            if code is not None and code < 0:
                name = signal.Signals(-code).name
                lines.append(f"rank {rank} (process {child.pid}) was killed by {name}")
        return "\n".join(lines)

    def stop(self) -> None:
        """Requests that all ranks exit, without waiting."""
        if not self._is_stopped:
            self._is_stopped = True
            self.send(Stop())

    def close(self) -> None:
        """Stops all ranks, and kills children that do not exit on request."""
        if self._closed:
            return
        self.stop()
        self._closed = True
        for fd, (_, child) in self._children.items():
            if child.stdin is not None:
                child.stdin.close()  # a rank that is not waiting for a Plan exits because of this
            try:
                child.wait(timeout=2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            os.close(fd)
        self._children.clear()
        self._channel.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _spawn(self, rank: int) -> None:
        command = [sys.executable, "-m", "worker.rank.main", str(rank), self._directory]
        command.append(msgspec.json.encode(self._config).decode())
        rendezvous = self.rendezvous_of_rank_0()
        passed = []
        if rendezvous is not None:
            assert rank == 0, "with ranks on several nodes, only rank 0 is a child"
            command.append(str(rendezvous.store_fd))
            passed.append(rendezvous.store_fd)
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=passed)
        for fd in passed:
            os.close(fd)
        fd = os.pidfd_open(child.pid)
        self._children[fd] = (rank, child)
