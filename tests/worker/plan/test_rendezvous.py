"""Ranks without a shared directory connect over the network: TCP on loopback, in separate
processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import worker.llm
from tests.support.engines.forked_rank import RANK_FORKER, forking_ranks
from worker.config import EngineConfig
from worker.core.executor import Executor
from worker.core.executor_factory import create_executor
from worker.llm import LLM, SamplingParams
from worker.plan.channel import CoordinatorChannel, RankChannel
from worker.plan.messages import Ready, Start
from worker.plan.rendezvous import RendezvousHost, interface_towards, published
from worker.plan.sockets import FrameStream, connect_to
from worker.rank.main import run_rank

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
OPTIONS = {"device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 4096}


@pytest.fixture
def host() -> Iterator[RendezvousHost]:
    host = RendezvousHost(HOST, 2)
    yield host
    host.close()


def test_ranks_with_the_token_receive_plans(host: RendezvousHost, tmp_path: Path) -> None:
    assert published(str(tmp_path)) is None
    host.publish(str(tmp_path))
    rendezvous = published(str(tmp_path))
    assert rendezvous is not None
    coordinator = CoordinatorChannel("", [1, 2], host)
    ranks = [RankChannel("", rendezvous) for _ in range(2)]
    while len(coordinator.fds) < 2:
        coordinator.wait()
    coordinator.send(Start(num_pages=7))
    assert [rank.receive() for rank in ranks] == [Start(num_pages=7)] * 2
    ranks[1].send(Ready(rank=2))
    while not coordinator.messages:
        coordinator.wait()
    assert coordinator.messages.popleft() == Ready(rank=2)
    ranks[0].close()
    coordinator.wait()
    assert coordinator.num_lost == 1
    coordinator.close()


@pytest.mark.parametrize("word", [b"", b"x" * 64, b"\0" * 5000])
def test_unauthenticated_peers_are_disconnected(host: RendezvousHost, word: bytes) -> None:
    rendezvous = host.rendezvous
    coordinator = CoordinatorChannel("", [1], host)
    peer = connect_to(rendezvous.host, rendezvous.port)
    peer.send_all(word)
    rank = RankChannel("", rendezvous)
    coordinator.send(Start(num_pages=7))
    while not coordinator.fds or is_open(peer, coordinator):
        coordinator.wait(timeout_ms=20)
    assert len(coordinator.fds) == 1
    assert coordinator.num_lost == 0
    assert rank.receive() == Start(num_pages=7)
    coordinator.close()


def is_open(stream: FrameStream, coordinator: CoordinatorChannel) -> bool:
    try:
        assert stream.read(wait=False) == [], "an unauthenticated peer was sent something"
    except EOFError:
        return False
    return True


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_towards(HOST) in ("lo", "lo0")


def start_elsewhere(rank: int, config: EngineConfig, directory: str) -> threading.Thread:
    """Runs a rank as if on another node, which only knows the rendezvous."""
    rendezvous = published(directory)
    assert rendezvous is not None
    process = RANK_FORKER.start(run_rank, rank, config, "", rendezvous)
    thread = threading.Thread(target=process.join)
    thread.start()
    return thread


def test_a_model_over_two_nodes_generates_what_one_rank_does(
    tiny_chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def on_two_nodes(config: EngineConfig, directory: str, *, spawn_peers: bool) -> Executor:
        executor = create_executor(config, directory, spawn_peers=False, host=HOST)
        threads.append(start_elsewhere(1, config, directory))
        return executor

    prompts = ["a prompt of a few words", "another one"]
    with forking_ranks(), LLM(str(tiny_chat_model), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    monkeypatch.setattr(worker.llm, "create_executor", on_two_nodes)
    with LLM(str(tiny_chat_model), tensor_parallel_size=2, **OPTIONS) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "the rank outlives its coordinator"
