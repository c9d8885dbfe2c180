"""The sockets between coordinator and ranks, over real ipc."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from worker.parallel.channel import CoordinatorChannel, RankChannel, endpoint
from worker.parallel.messages import Failure, Hello, PlanMessage, Result, Start, Stop, ToRank
from worker.scheduler.plan import Admit, PageWrite, Plan, Row, StepResult

HELLO = Hello(rank=0, num_pages=4, max_model_len=32, vocab_size=10)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield path


@contextmanager
def group(directory: str, num_ranks: int) -> Iterator[tuple[CoordinatorChannel, list[RankChannel]]]:
    """A coordinator and ranks that have said hello."""
    coordinator = CoordinatorChannel(directory, num_ranks)
    ranks = [RankChannel(directory) for _ in range(num_ranks)]
    for rank in ranks:
        rank.send(HELLO)
        assert coordinator.receive() == HELLO
    yield coordinator, ranks
    for end in (*ranks, coordinator):
        end.close()


def test_messages_arrive_at_every_rank_in_order(directory: str) -> None:
    plan = Plan(
        seq=1,
        admits=[Admit(3, b"\x01\0\0\0", 0.0, 0, 1.0, 0.0, -5)],
        page_writes=[PageWrite(3, 0, [7])],
        rows=[Row(3, 0, 1, True)],
    )
    with group(directory, 2) as (coordinator, ranks):
        coordinator.send(Start(num_pages=9))
        coordinator.send(PlanMessage(plan=plan))
        coordinator.send(Stop())
        for rank in ranks:
            assert rank.receive() == Start(num_pages=9)
            assert rank.receive() == PlanMessage(plan=plan)
            assert rank.receive() == Stop()


def test_the_coordinator_hears_all_ranks(directory: str) -> None:
    said = [
        Result(step=StepResult(seq=1, token_ids=[5], compute_ms=0.5)),
        Result(step=StepResult(seq=2, token_ids=[6], compute_ms=0.5)),
    ]
    with group(directory, 2) as (coordinator, ranks):
        for message in said:
            ranks[0].send(message)
        ranks[1].send(Failure(rank=1, error="out of memory"))
        heard = [coordinator.receive() for _ in range(3)]
    assert [message for message in heard if not isinstance(message, Failure)] == said
    assert Failure(rank=1, error="out of memory") in heard


def test_a_rank_waits_for_the_coordinator_to_be_there(directory: str) -> None:
    with ThreadPoolExecutor() as threads:
        rank = threads.submit(RankChannel, directory)
        coordinator = CoordinatorChannel(directory, 1)
        rank.result().send(HELLO)
        assert coordinator.receive() == HELLO
        rank.result().close()
        coordinator.close()


def test_full_sockets_on_both_sides_do_not_lock_up(directory: str) -> None:
    plan = Plan(1, [Admit(0, bytes(4_000_000), 0.0, 0, 1.0, 0.0, 0)], [], [])
    said = [Result(StepResult(seq, [7] * 100_000, 0.0)) for seq in range(8)]

    def talk_first(rank: RankChannel) -> ToRank:
        for message in said:
            rank.send(message)
        return rank.receive()

    with group(directory, 1) as (coordinator, ranks), ThreadPoolExecutor() as threads:
        heard_by_rank = threads.submit(talk_first, ranks[0])
        coordinator.send(PlanMessage(plan=plan))
        assert [coordinator.receive() for _ in said] == said
        assert heard_by_rank.result() == PlanMessage(plan=plan)


def test_last_words_outlive_their_sender_and_its_end_is_seen(directory: str) -> None:
    with group(directory, 2) as (coordinator, ranks):
        ranks[1].send(Failure(rank=1, error="gone"))
        ranks[1].close()
        assert coordinator.receive() == Failure(rank=1, error="gone")
        coordinator.send(Start(num_pages=9))
        coordinator.send_last(Stop())
        assert coordinator.receive(timeout_ms=1) is None
        coordinator.close()
        assert [ranks[0].receive(), ranks[0].receive()] == [Start(num_pages=9), Stop()]
        with pytest.raises(ConnectionError, match="coordinator"):
            ranks[0].receive()


def test_other_descriptors_wake_the_coordinator_after_what_ranks_said(directory: str) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with group(directory, 1) as (coordinator, ranks):
        ranks[0].send(HELLO)
        assert coordinator.receive([reader]) == HELLO
        assert coordinator.receive([reader]) is None
    os.close(reader)


def test_a_path_too_long_for_a_unix_socket_is_refused() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        endpoint("/tmp/" + "d" * 120, "ranks")
