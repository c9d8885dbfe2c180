"""Grammars that become ready wake a sleeping loop once, and nothing else does."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from tests.support.worker.played_engine import INFO
from worker.core.grammar.base import GrammarFault
from worker.core.grammar.store import GrammarStore
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

SUBMIT = Submit(
    request_id="r", gateway_id="g", prompt=bytes(4), sampling=SamplingParams(), grammar="nowhere"
)


@pytest.fixture
def store() -> Iterator[GrammarStore]:
    store = GrammarStore(INFO)
    yield store
    store.close()


def test_grammars_between_two_polls_wake_the_loop(
    store: GrammarStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller = select.poll()
    poller.register(store.wake_fd, select.POLLIN)
    is_looking = threading.Event()

    def create_state(*_: object) -> None:
        is_looking.wait(120)
        raise GrammarFault("whatever it is")

    def read(fd: int, size: int, read: object = os.read) -> bytes:
        if fd == store.wake_fd:
            is_looking.set()
            poller.poll(200)
        return read(fd, size)  # type: ignore[operator]

    monkeypatch.setattr(store, "_create_state", create_state)
    monkeypatch.setattr(os, "read", read)
    store.request(SUBMIT)
    assert store.take() == []
    assert poller.poll(120_000), "the request would wait for ever"
    assert [one.request_id for one in store.take()] == ["r"]


def test_ready_grammars_wake_the_loop_once(store: GrammarStore) -> None:
    poller = select.poll()
    poller.register(store.wake_fd, select.POLLIN)
    for _ in range(2000):
        store.request(SUBMIT)
        while not (taken := store.take()):
            assert poller.poll(120_000), "the request would wait for ever"
        assert [one.request_id for one in taken] == ["r"]
        assert store.num_due == 0
        assert not poller.poll(0), "the loop would spin"
