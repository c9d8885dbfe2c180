"""Routing by the places of LoRA adapters."""

from __future__ import annotations

import numpy as np
import pytest

from router.fleet import Choice, PromptBlocks
from tests.support.router.played_fleet import PlayedFleet
from worker.protocol.adapters import AdapterRef, AdapterTotals

READ_S = 0.5
FRENCH = AdapterRef("french", "/adapters/french", "v1")


def fleet(**places: tuple[list[str], list[str]]) -> PlayedFleet:
    """Workers by name, with the versions that each has on the device and in host memory."""
    played = PlayedFleet(names=list(places), explain_routing=True)
    for name, (on_device, on_host) in places.items():
        totals = AdapterTotals(on_device=on_device, on_host=on_host, read_s=READ_S)
        played.load(name, adapters=totals)
    return played


def choose(played: PlayedFleet, adapter: AdapterRef | None, seed: int = 0) -> Choice:
    tokens = np.random.default_rng(seed).integers(0, 10**5, 64).astype("<i4").tobytes()
    played.num_requests += 1
    prompt = PromptBlocks(tokens, adapter=adapter)
    choice = played.fleet.reserve(f"r{played.num_requests}", prompt)
    assert choice is not None
    played.fleet.release_booking(choice.worker_id, f"r{played.num_requests}")
    return choice


def term(choice: Choice) -> float | None:
    assert choice.explanation is not None
    return choice.explanation.terms.get("adapter")


def test_requests_go_where_their_adapter_is() -> None:
    played = fleet(a=([], []), b=([], ["v1"]), c=(["v2", "v1"], []), d=([], []))
    for seed in range(8):
        choice = choose(played, FRENCH, seed)
        assert (choice.worker_id, term(choice)) == ("c", 0.0)
    assert {choose(played, None, seed).worker_id for seed in range(30)} == {"a", "b", "c", "d"}
    assert term(choose(played, None)) is None
    played.fleet.set_draining("c", True)
    choice = choose(played, FRENCH)
    assert (choice.worker_id, term(choice)) == ("b", pytest.approx(READ_S / 10))
    assert choice.waiting_s >= READ_S / 10


def test_an_adapter_is_replicated_once_requests_would_queue_for_longer() -> None:
    queue = {"num_waiting": 4, "num_queued_tokens": 4000, "queued_prefill_tokens": 4000}
    for num_prompts, chosen in ((1, "a"), (40, "b")):
        played = fleet(a=(["v1"], []), b=([], []))
        played.load(
            "a",
            adapters=AdapterTotals(on_device=["v1"], read_s=READ_S),
            **{name: count * num_prompts for name, count in queue.items()},
        )
        assert choose(played, FRENCH).worker_id == chosen


def test_requests_that_follow_count_on_the_reads_of_earlier_ones() -> None:
    played = fleet(a=([], []), b=([], []))
    first = choose(played, FRENCH)
    assert term(first) == READ_S
    assert {choose(played, FRENCH, seed).worker_id for seed in range(9)} == {first.worker_id}
    others = [AdapterRef(f"other {n}", "/", f"w{n}") for n in range(3)]
    chosen = [choose(played, other).worker_id for other in others]
    assert chosen[0] != first.worker_id, "it is still reading the first one"
    played.now += 10.0
    assert term(choose(played, FRENCH)) == READ_S, "it has not reported the adapter since"


def test_reads_that_no_worker_has_measured_take_a_default_time() -> None:
    played = PlayedFleet(names=["a", "b"], explain_routing=True)
    for name in ("a", "b"):
        played.load(name, adapters=AdapterTotals())
    assert term(choose(played, FRENCH)) == pytest.approx(0.3)
    played.load("a", adapters=AdapterTotals(read_s=2.0))
    played.load("b", adapters=AdapterTotals())
    played.now += 10.0
    assert term(choose(played, FRENCH)) == pytest.approx(2.0)
