"""Bursts over several gateways, on workers that run the real scheduler and prefix cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from math import ceil
from unittest.mock import patch

import numpy as np
import pytest

from router.fleet import BatchWindow, Choice, Fleet, PromptBlocks
from router.fleet.burst import group_order
from router.work_slice import SLICE_S
from tests.support.router.scheduled_worker import ScheduledWorker
from worker.protocol.messages import AttachSnapshot, Submit, WorkerUpdate
from worker.protocol.sampling import SamplingParams

PREFIX = 512


class Cluster:
    """Some workers, and gateways that are attached to all of them."""

    def __init__(self, num_workers: int, num_gateways: int) -> None:
        self.workers = {
            f"w{number}": ScheduledWorker(
                f"w{number}",
                num_pages=4000,
                max_num_seqs=64,
                max_num_batched_tokens=128,
                max_model_len=4096,
            )
            for number in range(num_workers)
        }
        self.now = 0.0
        self.fleets = [Fleet(clock=lambda: self.now) for _ in range(num_gateways)]
        self.cached: dict[str, int] = {}
        for worker in self.workers.values():
            worker.step_ms = 10.0
            for gateway in range(num_gateways):
                worker.attach(str(gateway))
        self.deliver()

    def send(self, gateway: int, request_id: str, prompt: PromptBlocks, choice: Choice) -> None:
        submit = Submit(
            request_id=request_id,
            gateway_id=str(gateway),
            prompt=prompt.token_ids,
            sampling=SamplingParams(max_tokens=2, seed=1, ignore_eos=True),
            num_expected_cached=choice.hit_tokens,
        )
        worker = self.workers[choice.worker_id]
        ordinal = worker.submit(submit)
        self.fleets[gateway].accepted(choice.worker_id, request_id, worker.epoch, ordinal)

    def deliver(self) -> None:
        for gateway, fleet in enumerate(self.fleets):
            for worker_id, worker in self.workers.items():
                while (item := worker.take(str(gateway))) is not None:
                    if isinstance(item, AttachSnapshot):
                        fleet.attach(worker_id, item)
                    elif isinstance(item, WorkerUpdate):
                        fleet.update(worker_id, item)
                        for delta in item.deltas:
                            fleet.release_booking(worker_id, delta.request_id)
                            if delta.num_cached_tokens >= 0:
                                self.cached[delta.request_id] = delta.num_cached_tokens

    def run(self) -> None:
        while any(worker.scheduler.has_work() for worker in self.workers.values()):
            self.now += 0.01
            for worker in self.workers.values():
                worker.step()
            self.deliver()


def prompt_with(prefix: int, number: int) -> PromptBlocks:
    head = np.arange(PREFIX) + 10_000 * prefix
    tail = np.arange(8) + 5_000_000 + 100 * number
    return PromptBlocks(np.concatenate([head, tail]).astype("<i4").tobytes())


@pytest.mark.parametrize("num_prefixes", [1, 2, 4, 8, 16])
def test_two_gateways_share_a_burst_fairly(num_prefixes: int) -> None:
    cluster = Cluster(num_workers=8, num_gateways=2)
    prompts = {f"r{n}": prompt_with(n // 2 % num_prefixes, n) for n in range(64)}
    placed: dict[str, str] = {}
    choices: list[tuple[int, str, Choice]] = []
    for gateway, fleet in enumerate(cluster.fleets):  # without reports about each other yet
        mine = [name for name in prompts if int(name[1:]) % 2 == gateway]
        for place, choice in fleet.reserve_group([(name, prompts[name], ()) for name in mine]):
            name = mine[place]
            assert choice is not None
            placed[name] = choice.worker_id
            choices.append((gateway, name, choice))
    for gateway, name, choice in choices:
        cluster.send(gateway, name, prompts[name], choice)
    cluster.run()
    cold = [name for name, cached in cluster.cached.items() if cached < PREFIX // 2]
    assert len(cluster.cached) == 64
    per_prefix = Counter(int(name[1:]) // 2 % num_prefixes for name in cold)
    assert set(per_prefix) == set(range(num_prefixes))
    assert max(per_prefix.values()) <= 2
    per_worker = Counter(placed[name] for name in cold)
    assert max(per_worker.values()) <= ceil(len(cold) / 8) + 1
    for fleet in cluster.fleets:
        assert len(fleet.in_flight) == 0
        assert not any(worker.reservations for worker in fleet.workers)


def test_a_second_gateway_sees_what_the_first_has_sent() -> None:
    cluster = Cluster(num_workers=3, num_gateways=2)
    first, second = cluster.fleets
    taken = []
    for number in range(2):
        choice = first.reserve(f"a{number}", prompt_with(number, number))
        assert choice is not None
        cluster.send(0, f"a{number}", prompt_with(number, number), choice)
        worker = cluster.workers[choice.worker_id]
        worker.load = worker.reserved.added_to(worker.load)
        worker.attachments["1"].put_prompts(1, [], worker.load)
        taken.append(choice.worker_id)
    cluster.deliver()
    for number in range(8):  # for any request, only one worker is free
        choice = second.reserve(f"b{number}", prompt_with(10 + number, number))
        assert choice is not None
        second.release_booking(choice.worker_id, f"b{number}")
        assert choice.worker_id not in taken
    assert sum(worker.load.num_reserved for worker in second.workers) == 2
    cluster.run()
    assert sum(worker.load.num_reserved for worker in second.workers) == 0


def test_a_hot_prefix_is_copied_when_its_queue_costs_more_than_that() -> None:
    cluster = Cluster(num_workers=4, num_gateways=1)
    [fleet] = cluster.fleets
    holders = []
    for number in range(400):
        choice = fleet.reserve(f"r{number}", prompt_with(0, number))
        assert choice is not None
        holders.append(choice.worker_id)
    first_copy = next(place for place, holder in enumerate(holders) if holder != holders[0])
    assert first_copy > PREFIX // 8 // 4  # not before the workers with the prefix have other work
    assert len(set(holders)) == 4  # and eventually everywhere


def test_group_order_puts_shared_prefixes_together_and_large_groups_first() -> None:
    fleet = Cluster(num_workers=1, num_gateways=1).fleets[0]
    prompts = [
        prompt_with(0, 0),
        prompt_with(1, 1),
        prompt_with(0, 2),
        prompt_with(2, 3),
        prompt_with(1, 4),
    ]
    prompts += [prompt_with(1, 5), PromptBlocks(b"\1\0\0\0")]
    order = group_order(prompts, fleet.block_keys())
    assert sorted(order[:3]) == [1, 4, 5]
    assert sorted(order[3:5]) == [0, 2]
    assert order[5:] == [3, 6]


async def test_requests_of_one_turn_are_placed_together() -> None:
    fleet = Cluster(num_workers=4, num_gateways=1).fleets[0]
    window = BatchWindow(fleet)
    names = [f"r{number}" for number in range(8)]
    prompts = [prompt_with(number % 2, number) for number in range(8)]
    pairs = list(zip(names, prompts, strict=True))
    choices = await asyncio.gather(*(window.place(name, prompt) for name, prompt in pairs))
    holders = {n % 2: choice.worker_id for n, choice in enumerate(choices) if choice}
    assert len(set(holders.values())) == 2
    for number, choice in enumerate(choices):
        assert choice is not None
        assert choice.worker_id == holders[number % 2]
    assert sum(choice.hit_tokens == 0 for choice in choices if choice) == 2


async def test_a_request_that_is_cancelled_while_it_is_placed_leaves_nothing() -> None:
    fleet = Cluster(num_workers=2, num_gateways=1).fleets[0]
    window = BatchWindow(fleet)
    early = asyncio.create_task(window.place("early", prompt_with(0, 0)))
    late = asyncio.create_task(window.place("late", prompt_with(0, 1)))
    await asyncio.sleep(0)
    early.cancel()  # before the window is over
    asyncio.get_running_loop().call_soon(late.cancel)  # in the window in which it is placed
    results = await asyncio.gather(early, late, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert not any(worker.reservations for worker in fleet.workers)
    assert len(fleet.in_flight) == 0


async def test_a_large_batch_is_placed_in_slices() -> None:
    fleet = Cluster(num_workers=2, num_gateways=1).fleets[0]
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += SLICE_S / 4  # a call before each slice, and one after each placement
        return now

    window = BatchWindow(fleet, clock)
    tasks = [asyncio.create_task(window.place(f"r{n}", prompt_with(n, n))) for n in range(10)]
    await asyncio.sleep(0)  # all are waiting
    late = asyncio.create_task(window.place("late", prompt_with(0, 99)))
    num_placed = []
    while not late.done():
        await asyncio.sleep(0)
        num_placed.append(sum(task.done() for task in tasks))
    assert max(after - before for before, after in pairwise([0, *num_placed])) <= 5
    assert num_placed[-1] == 10
    assert late.result() is not None


async def test_a_failure_reaches_all_that_wait_for_it() -> None:
    fleet = Cluster(num_workers=2, num_gateways=1).fleets[0]
    window = BatchWindow(fleet)
    with patch.object(fleet, "reserve", side_effect=RuntimeError("broken")):
        results = await asyncio.gather(
            window.place("r", prompt_with(0, 0)),
            window.place("other", prompt_with(1, 1)),
            return_exceptions=True,
        )
    assert all(isinstance(result, RuntimeError) for result in results)
    assert await window.place("next", prompt_with(0, 1)) is not None


async def test_an_idle_turn_adds_no_wait() -> None:
    fleet = Cluster(num_workers=2, num_gateways=1).fleets[0]
    placed = asyncio.create_task(BatchWindow(fleet).place("r", prompt_with(0, 0)))
    for _ in range(4):  # loop iterations, each of which would end a timer of zero seconds
        await asyncio.sleep(0)
    assert placed.done()
