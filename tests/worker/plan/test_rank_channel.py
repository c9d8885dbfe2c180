"""Sockets between coordinator and ranks, with real streams."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator

import pytest

from worker.plan.channel import CoordinatorChannel, RankChannel
from worker.plan.messages import (
    Failure,
    FromRank,
    Hello,
    PlanMessage,
    Result,
    Start,
    Stop,
)
from worker.plan.plan import Admit, PageWrite, Plan, PlannedRow, StepResult
from worker.plan.sockets import socket_path


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield path


def receive(coordinator: CoordinatorChannel) -> FromRank:
    while not coordinator.messages:
        coordinator.wait()
    return coordinator.messages.popleft()


def connected(directory: str, size: int) -> tuple[CoordinatorChannel, list[RankChannel]]:
    coordinator = CoordinatorChannel(directory, range(size))
    ranks = [RankChannel(directory) for _ in range(size)]
    while len(coordinator.fds) < size:
        coordinator.wait()
    return coordinator, ranks


def test_messages_arrive_at_every_rank_in_order(directory: str) -> None:
    coordinator, ranks = connected(directory, 2)
    plan = Plan(
        seq=1,
        admits=[Admit(3, b"\x01\0\0\0", 0.0, 0, 1.0, 0.0, -5)],
        page_writes=[PageWrite(3, 0, [7])],
        rows=[PlannedRow(3, 0, 1, 1)],
    )
    sent = [Start(num_pages=9), PlanMessage(plan=plan), Stop()]
    for message in sent:
        coordinator.send(message)
    for rank in ranks:
        assert [rank.receive() for _ in sent] == sent


def test_the_coordinator_receives_messages_of_all_ranks(directory: str) -> None:
    coordinator, ranks = connected(directory, 2)
    sent = [
        Hello(rank=0, num_pages=4, max_model_len=32, vocab_size=10),
        Result(step=StepResult(seq=1, token_ids=[5], compute_ms=0.5)),
    ]
    for message in sent:
        ranks[0].send(message)
    ranks[1].send(Failure(rank=1, error="out of memory"))
    received = [receive(coordinator) for _ in range(3)]
    assert [message for message in received if not isinstance(message, Failure)] == sent
    assert Failure(rank=1, error="out of memory") in received


def test_no_message_is_dropped_before_a_rank_is_there(directory: str) -> None:
    coordinator = CoordinatorChannel(directory, [0])
    for pages in range(5000):
        coordinator.send(Start(num_pages=pages))
    rank = RankChannel(directory)
    coordinator.wait()
    assert [rank.receive() for _ in range(5000)] == [Start(num_pages=n) for n in range(5000)]


def test_a_rank_that_does_not_read_blocks_no_other(directory: str) -> None:
    coordinator, (busy, other) = connected(directory, 2)
    prompt = Admit(0, b"\x07" * (20 << 20), 0.0, 0, 1.0, 0.0, 0)
    plans = [PlanMessage(plan=Plan(seq, [prompt], [], [])) for seq in (1, 2)]
    for plan in plans:
        coordinator.send(plan)
    done = Result(step=StepResult(seq=2, token_ids=[], compute_ms=0.0))

    def obey(rank: RankChannel) -> None:
        if [rank.receive() for _ in plans] == plans:
            rank.send(done)

    # Data that the kernel did not accept is sent while the coordinator waits for something else.
    for rank in (other, busy):
        reader = threading.Thread(target=obey, args=(rank,))
        reader.start()
        assert receive(coordinator) == done
        reader.join()


def test_the_exit_of_a_rank_shows_after_its_last_message(directory: str) -> None:
    coordinator, (rank,) = connected(directory, 1)
    rank.send(Failure(rank=0, error="last word"))
    rank.close()
    assert receive(coordinator) == Failure(rank=0, error="last word")
    assert coordinator.num_lost == 0
    coordinator.wait()
    assert coordinator.num_lost == 1
    coordinator.send(Stop())


def test_the_end_of_the_coordinator_ends_a_rank(directory: str) -> None:
    coordinator, (rank,) = connected(directory, 1)
    coordinator.close()
    with pytest.raises(EOFError):
        rank.receive()


def test_a_path_too_long_for_a_unix_socket_is_rejected() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        socket_path("/tmp/" + "d" * 120, "ranks")
