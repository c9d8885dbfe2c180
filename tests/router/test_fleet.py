from __future__ import annotations

import msgspec
import pytest

from router.config import RoutingConfig
from router.fleet import Fleet
from tests.support.router.fleet_states import IDLE, fleet_of, prompt_of, snapshot, update
from worker.protocol.messages import (
    LoadSnapshot,
)


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    config = RoutingConfig(routing_policy="nope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix-score"):
        Fleet(config)


def test_ties_go_round() -> None:
    fleet = fleet_of("a", "b", "c")
    order = []
    for turn in range(6):
        choice = fleet.reserve(f"r{turn}", prompt_of(3))
        assert choice is not None
        order.append(choice.worker_id)
        fleet.release_booking(choice.worker_id, f"r{turn}")
    assert order == ["a", "b", "c"] * 2


def busy(num_running: int, num_submits_seen: int) -> LoadSnapshot:
    return msgspec.structs.replace(IDLE, num_running=num_running, num_submits_seen=num_submits_seen)


def test_booking_ends_with_the_load_that_contains_the_request() -> None:
    fleet = fleet_of("a")
    [worker] = fleet.workers
    fleet.reserve("r", prompt_of(12))
    assert (worker.num_active, worker.reserved_tokens) == (1, 12)
    fleet.update("a", update(busy(3, 3)))  # of other gateways: this one is not accepted yet
    assert worker.num_active == 4
    fleet.accepted("a", "r", 1, 5)
    for _ in range(3):  # heartbeats, and a step that started before it arrived
        fleet.update("a", update(busy(3, 3)))
        fleet.update("a", update(busy(4, 4)))
        assert worker.num_active == 5
    fleet.update("a", update(busy(4, 5)))  # it is included; another one has ended
    assert (worker.num_active, worker.reserved_tokens) == (4, 0)
    fleet.release_booking("a", "r")
    assert (worker.num_active, worker.reserved_tokens) == (4, 0)


def test_booking_ends_with_the_answer_if_the_load_was_first() -> None:
    fleet = fleet_of("a")
    [worker] = fleet.workers
    fleet.reserve("r1", prompt_of(12))
    fleet.reserve("r2", prompt_of(8, "another"))
    fleet.update("a", update(busy(1, 1)))
    fleet.accepted("a", "r1", 1, 1)
    assert (worker.num_active, worker.reserved_tokens) == (2, 8)
    fleet.accepted("a", "r2", 1, 2)
    assert worker.num_active == 2
    fleet.update("a", update(busy(2, 2)))
    assert (worker.num_active, worker.reserved_tokens) == (2, 0)


def test_bookings_of_an_epoch_end_with_it() -> None:
    fleet = fleet_of("a")
    for name in ("old", "open", "young"):
        fleet.reserve(name, prompt_of(8, name))
    fleet.accepted("a", "old", 1, 7)
    fleet.lose("a")
    fleet.accepted("a", "young", 2, 1)  # the reply overtakes the snapshot
    fleet.attach("a", snapshot("a", epoch=2))
    [worker] = fleet.workers
    assert list(worker.reservations) == ["open", "young"]
    assert worker.reserved_tokens == 16
    fleet.update("a", update(busy(1, 1)))
    assert list(worker.reservations) == ["open"]
    fleet.accepted("a", "open", 2, 1)
    assert (worker.num_active, worker.reserved_tokens) == (1, 0)


def test_a_snapshot_may_contain_the_request() -> None:
    fleet = fleet_of("a")
    fleet.reserve("r", prompt_of(8))
    fleet.accepted("a", "r", 1, 4)
    fleet.attach("a", snapshot("a", load=busy(1, 4)))
    [worker] = fleet.workers
    assert (worker.num_active, worker.reserved_tokens) == (1, 0)


def test_salt_and_holder_decide() -> None:
    fleet = fleet_of("a", "b")
    prompt = prompt_of(16)
    hashes = prompt.hashes(fleet.block_keys()[0]).tolist()
    fleet.attach("b", snapshot("b", hashes))
    choice = fleet.reserve("r1", prompt)
    assert choice is not None
    assert (choice.worker_id, choice.hit_tokens) == ("b", 15)
    salted = fleet.reserve("r2", prompt_of(16, "s"))
    assert salted is not None
    assert salted.hit_tokens == 0
    assert salted.best_hit_tokens == 0
    assert fleet.reserve("r3", prompt, excluded=["a", "b"]) is None


def test_lost_and_draining_workers_are_not_chosen() -> None:
    fleet = fleet_of("a", "b")
    fleet.set_draining("a", True)
    for turn in range(3):
        choice = fleet.reserve(f"r{turn}", prompt_of(4))
        assert choice is not None
        assert choice.worker_id == "b"
    fleet.lose("b")
    assert not fleet.ready
    assert fleet.reserve("r", prompt_of(4)) is None
    fleet.attach("b", snapshot("b", epoch=2))
    assert fleet.reserve("r", prompt_of(4)) is not None
    fleet.remove("b")
    assert [worker.worker_id for worker in fleet.workers] == ["a"]
