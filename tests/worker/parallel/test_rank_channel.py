"""The sockets between coordinator and ranks, over real ipc."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import zmq

from worker.parallel.channel import CoordinatorChannel, RankChannel, endpoint
from worker.parallel.messages import Failure, Hello, PlanMessage, Result, Start, Stop
from worker.scheduler.plan import Admit, PageWrite, Plan, Row, StepResult


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield path


def test_messages_arrive_at_every_rank_in_order(
    context: zmq.Context[zmq.Socket[bytes]], directory: str
) -> None:
    coordinator = CoordinatorChannel(context, directory, [0, 1])
    ranks = [RankChannel(context, directory, rank) for rank in (0, 1)]
    plan = Plan(
        seq=1,
        admits=[Admit(3, b"\x01\0\0\0", 0.0, 0, 1.0, 0.0, -5)],
        page_writes=[PageWrite(3, 0, [7])],
        rows=[Row(3, 0, 1, True)],
    )
    coordinator.send(Start(num_pages=9))
    coordinator.send(PlanMessage(plan=plan))
    coordinator.send(Stop())
    for rank in ranks:
        assert rank.receive() == Start(num_pages=9)
        assert rank.receive() == PlanMessage(plan=plan)
        assert rank.receive() == Stop()


def test_the_coordinator_hears_all_ranks(
    context: zmq.Context[zmq.Socket[bytes]], directory: str
) -> None:
    coordinator = CoordinatorChannel(context, directory, [0, 1])
    ranks = [RankChannel(context, directory, rank) for rank in (0, 1)]
    said = [
        Hello(rank=0, num_pages=4, max_model_len=32, vocab_size=10),
        Result(step=StepResult(seq=1, token_ids=[5], compute_ms=0.5)),
    ]
    for message in said:
        ranks[0].send(message)
    ranks[1].send(Failure(rank=1, error="out of memory"))
    heard = [coordinator.receive() for _ in range(3)]
    assert [message for message in heard if not isinstance(message, Failure)] == said
    assert Failure(rank=1, error="out of memory") in heard


def test_no_message_is_dropped_while_nobody_listens(
    context: zmq.Context[zmq.Socket[bytes]], directory: str
) -> None:
    coordinator = CoordinatorChannel(context, directory, [0])
    for pages in range(5000):
        coordinator.send(Start(num_pages=pages))
    rank = RankChannel(context, directory, 0)
    assert [rank.receive() for _ in range(5000)] == [Start(num_pages=n) for n in range(5000)]


def test_a_path_too_long_for_a_unix_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        endpoint("/tmp/" + "d" * 120, "ranks")
