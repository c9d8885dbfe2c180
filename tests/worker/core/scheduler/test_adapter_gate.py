"""LoRA adapters in the scheduler: slots, copies in host memory, fairness, failed reads.

Random operations with adapters are in `test_scheduler_operations`.
"""

from __future__ import annotations

import random

from tests.support.worker.fake_device import Harness, adapter_ref, make_submit
from tests.support.worker.scheduler_campaign import Campaign
from worker.core.scheduler.adapter_gate import TURN_S
from worker.protocol.blocks import cache_scope
from worker.protocol.messages import Submit


def lora(request_id: str, number: int, **options: object) -> Submit:
    """A short request of an adapter."""
    ref = adapter_ref(number)
    options = {"max_tokens": 4, "ignore_eos": True, **options}
    return make_submit(
        *(request_id, [3, 4, 5, 6, 7]),
        adapter=ref,
        cache_salt=cache_scope(adapter=ref.version),
        **options,
    )


def test_requests_of_other_adapters_run_while_one_is_read() -> None:
    harness = Harness(max_loras=2, max_cpu_loras=2)
    harness.submit(lora("a", 0, max_tokens=20))
    harness.step()
    harness.device.adapters.read_steps = lambda: 6
    harness.submit(lora("b", 1))
    harness.submit(make_submit("base", [9, 8], max_tokens=2, ignore_eos=True))
    for _ in range(4):
        harness.step()
    assert harness.outcomes["base", 0].finish_reason == "length"
    assert not harness.outcomes["b", 0].tokens
    assert harness.last is not None
    assert harness.last.load.adapters is not None
    assert harness.last.load.adapters.num_waiting == harness.last.load.num_waiting == 1
    harness.drain()
    for request_id in ("a", "b", "base"):
        harness.finished(request_id)
    assert harness.last.load.adapters.on_device == ["version 0", "version 1"]
    assert harness.last.load.adapters.read_s == 0.25


def test_an_idle_worker_serves_more_adapters_than_it_has_room_for() -> None:
    harness = Harness(max_loras=1, max_cpu_loras=1)
    for number in (0, 1, 2, 0, 1, 2):
        harness.submit(lora(f"r{harness.reports}", number))
        harness.drain(depth=1)
    assert harness.device.adapters.num_loads == 6
    assert {outcome.finish_reason for outcome in harness.outcomes.values()} == {"length"}


def test_an_adapter_gets_its_turn_though_all_slots_stay_in_use() -> None:
    harness = Harness(max_loras=1, max_cpu_loras=2, max_queued_requests=0)
    harness.submit(lora("first", 0))
    harness.submit(lora("other", 1))
    for number in range(200):
        harness.now += 0.01
        if number % 2:
            harness.submit(lora(f"r{number}", 0))
        harness.step(depth=1)
        if harness.outcomes["other", 0].finish_reason:
            break
    # Its turn, and the requests that had entered before.
    assert harness.now < TURN_S + 0.2
    harness.drain()
    assert all(outcome.finish_reason == "length" for outcome in harness.outcomes.values())


def test_an_adapter_that_cannot_be_read_fails_its_requests_only() -> None:
    for read_steps in (0, 3):
        harness = Harness(max_loras=1, max_cpu_loras=2)
        harness.device.adapters.read_steps = lambda steps=read_steps: steps
        for name, number in (("bad", -1), ("bad too", -1), ("good", 0)):
            harness.submit(lora(name, number))
        harness.drain()
        harness.finished("good")
        for name in ("bad", "bad too"):
            rejection = harness.outcomes[name, 0].rejection
            assert rejection is not None
            assert rejection.message == "LoRA adapter adapter -1 could not be loaded: no such file"
            assert not harness.outcomes[name, 0].tokens
        harness.submit(lora("again", -1))  # reads it again: the folder may have been repaired
        harness.drain()
        assert harness.scheduler.state.adapters is not None
        assert harness.scheduler.state.adapters.pool.totals.num_failures == 2


def test_adapters_share_no_prefix() -> None:
    harness = Harness(max_loras=4, max_cpu_loras=4)
    for number in range(4):
        for turn in range(2):
            request_id = f"{number}, {turn}"
            harness.submit(lora(request_id, number))
            harness.drain()
            assert harness.finished(request_id).num_cached == 4 * turn


def test_thousands_of_operations_with_adapters() -> None:
    rng = random.Random(5)
    harness = Harness(max_loras=2, max_cpu_loras=3, num_pages=65, max_num_batched_tokens=20)
    harness.device.adapters.read_steps = lambda: rng.choice([0, 1, 4, 20])
    campaign = Campaign(rng, harness)
    operations = [campaign.submit, campaign.submit, campaign.wait, campaign.abort]
    for _ in range(400):
        rng.choice([*operations, *[harness.step] * 9])()
    campaign.finish(depth=1)
    assert harness.device.adapters.num_loads > 10
