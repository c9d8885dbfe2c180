"""The index by itself: tiers, growth, and workers that join and leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.hash_table import HashTable
from router.fleet.index import PrefixIndex
from tests.support.effort import IS_LONG, cases
from worker.protocol.messages import BlockRemoved, BlockStored, Tier

GOLDEN = 0x9E3779B97F4A7C15


def hashes_of(chain: int, start: int, end: int) -> list[int]:
    """Blocks `start` to `end` of a chain; chain 0 has a block of hash 0."""
    return [(chain * 10_000 + place) * GOLDEN % 2**64 for place in range(start, end)]


def holders(
    index: PrefixIndex, hashes: list[int], workers: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Per worker: leading blocks in any tier, and on the device."""
    found = {}
    matches = index.match(np.array(hashes, np.uint64))
    lengths = [length for _, length in matches]
    assert lengths == sorted(set(lengths))
    for worker_id in workers:
        slot = index.slot(worker_id)
        anywhere = device = 0
        for mask, length in matches:
            if slot is not None and mask >> (2 * slot + 1) & 1:
                anywhere = length
            if slot is not None and mask >> (2 * slot) & 1:
                device = length
        found[worker_id] = (anywhere, device)
    return found


@given(data=st.data())
@settings(max_examples=cases(150), deadline=None)
def test_index_equals_plain_sets(data: st.DataObject) -> None:
    """Blocks of each tier are added in chain order and removed from the end, as in caches."""
    index = PrefixIndex()
    device = {w: {0: 0, 1: 0} for w in "abc"}
    host = {w: {0: 0, 1: 0} for w in "abc"}  # ends of the host blocks, which follow the device's
    for _ in range(data.draw(st.integers(0, 15))):
        worker_id = data.draw(st.sampled_from("abc"))
        chain = data.draw(st.integers(0, 1))
        on_device, in_all = device[worker_id][chain], host[worker_id][chain]
        count = data.draw(st.sampled_from([1, 2, 5, 250, 1100]))
        match data.draw(st.sampled_from(["store", "evict", "offload", "drop", "replace"])):
            case "store":
                end = on_device + count
                event = BlockStored(hashes_of(chain, on_device, end), None)
                index.apply(worker_id, [event])
                device[worker_id][chain] = end
                host[worker_id][chain] = max(end, in_all)
                gone = hashes_of(chain, on_device, min(end, in_all))
                index.apply(worker_id, [BlockRemoved(gone, "host")])
            case "evict":
                end = max(0, in_all - count)
                for start, tier in ((on_device, "host"), (0, "device")):
                    stop = in_all if tier == "host" else on_device
                    gone = hashes_of(chain, max(start, end), max(stop, end))
                    index.apply(worker_id, [BlockRemoved(gone, tier)])  # type: ignore[arg-type]
                host[worker_id][chain] = end
                device[worker_id][chain] = min(on_device, end)
            case "offload":
                end = max(0, on_device - count)
                moved = hashes_of(chain, end, on_device)
                index.apply(worker_id, [BlockStored(moved, None, "host"), BlockRemoved(moved)])
                device[worker_id][chain] = end
            case "drop":
                index.drop(worker_id)
                device[worker_id] = {0: 0, 1: 0}
                host[worker_id] = {0: 0, 1: 0}
            case _:
                index.replace(worker_id, [BlockStored(hashes_of(chain, 0, count), None)])
                device[worker_id] = {0: 0, 1: 0, chain: count}
                host[worker_id] = {0: 0, 1: 0, chain: count}
    for chain in (0, 1):
        length = data.draw(st.sampled_from([1, 3, 400, 5000]))
        found = holders(index, hashes_of(chain, 0, length), "abc")
        for worker_id in "abc":
            expected = (
                min(length, host[worker_id][chain]),
                min(length, device[worker_id][chain]),
            )
            assert found[worker_id] == expected
    for worker_id in "abc":
        num_device = sum(device[worker_id].values())
        assert index.num_blocks(worker_id) == num_device
        num_host = sum(host[worker_id].values()) - num_device
        assert index.num_blocks(worker_id, "host") == num_host


POOL = [0, 1, 2, 3, 2**63, *(place << 20 for place in range(1, 8))]
"""Block hashes, most of which have the same first cell in a small table."""
EVENTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from([BlockStored, BlockRemoved]),
        st.sampled_from(["device", "host"]),
        st.lists(st.sampled_from(POOL), max_size=20),
    ),
    max_size=20,
)


@pytest.mark.parametrize("many", [1, 4, 1024])
@given(events=EVENTS)
@settings(max_examples=cases(60), deadline=None)
def test_runs_of_blocks_equal_single_blocks(many: int, events: list[Any]) -> None:
    """Any events, in runs of either code path, leave what the same blocks leave one by one."""
    runs, singles = PrefixIndex(), PrefixIndex()
    held: dict[tuple[str, str], set[int]] = defaultdict(set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.fleet.index._MANY", many)
        for worker_id, kind, tier, hashes in events:
            event = BlockRemoved(hashes, tier)
            if kind is BlockStored:
                event = BlockStored(hashes, None, tier)
                held[worker_id, tier].update(hashes)
            else:
                held[worker_id, tier].difference_update(hashes)
            runs.apply(worker_id, [event])
            for value in hashes:
                single = msgspec.structs.replace(event, block_hashes=[value])
                singles.apply(worker_id, [single])
    for index in (runs, singles):
        assert len(index) == len(set().union(*held.values()))
        for (worker_id, tier), values in held.items():
            assert index.num_blocks(worker_id, tier) == len(values)
        for value in POOL:
            found = holders(index, [value], "abc")
            for worker_id in "abc":
                device = value in held[worker_id, "device"]
                anywhere = device or value in held[worker_id, "host"]
                assert found[worker_id] == (anywhere, device)
        counts = index._sets._counts
        assert sum(counts[1:]) == len(index)
        assert {number for number, count in enumerate(counts) if number and not count} == set(
            index._sets._free
        )


def test_forgotten_workers_leave_the_table_and_their_slots_are_used_again() -> None:
    index = PrefixIndex()
    index.apply("stays", [BlockStored(hashes_of(1, 0, 3000), None)])
    for turn in range(60):
        index.replace("flaps", [BlockStored(hashes_of(2 + turn, 0, 3000), None)])
        for step in range(40):
            index.apply("stays", [BlockStored(hashes_of(1, 3000 + step, 3001 + step), None)])
            index.apply("stays", [BlockRemoved(hashes_of(1, 3000 + step, 3001 + step))])
        assert holders(index, hashes_of(1, 0, 3000), ["stays"])["stays"] == (3000, 3000)
    assert len(index) < 4 * 6000
    slot = index.slot("flaps")
    assert slot is not None
    assert slot < 20
    assert holders(index, hashes_of(61, 0, 3000), ["flaps"])["flaps"] == (3000, 3000)
    assert holders(index, hashes_of(60, 0, 3000), ["flaps"])["flaps"] == (0, 0)


def test_who_is_forgotten_is_in_no_answer() -> None:
    index = PrefixIndex()
    for name, end in (("a", 50), ("b", 30)):
        index.apply(name, [BlockStored(hashes_of(1, 0, end), None)])
    index.drop("a")
    [(_, length)] = index.match(np.array(hashes_of(1, 0, 50), np.uint64))
    assert length == 30
    index.drop("b")
    assert index.match(np.array(hashes_of(1, 0, 50), np.uint64)) == []


def test_nothing_goes_wrong_while_the_table_moves() -> None:
    """Blocks are added and removed in both tables, old and new, one by one and many at once;
    another worker has some of them, and is repeatedly dropped."""
    random = np.random.default_rng(0)
    index = PrefixIndex()
    pool = random.integers(1, 2**64, 60_000, dtype=np.uint64)
    held: set[int] = set()

    def change(count: int, *, add: bool) -> None:
        hashes = random.choice(pool, count).tolist()
        event = BlockStored(hashes, None) if add else BlockRemoved(hashes)
        index.apply("a", [event])
        (held.update if add else held.difference_update)(hashes)

    def check(values: list[int]) -> None:
        slot = index.slot("a")
        assert slot is not None
        for value in values:
            masks = [mask for mask, _ in index.match(np.array([value], np.uint64))]
            assert any(mask >> 2 * slot & 1 for mask in masks) == (value in held)

    num_moving = 0
    for step in range(600):
        change(500 if step % 5 else 3 if step % 2 else 1200, add=step % 3 != 2)
        change(400 if step % 7 == 0 else 4, add=False)
        if step % 40 == 0:
            for name in "bcde":
                index.replace(name, [BlockStored(random.choice(pool, 2000).tolist(), None)])
        num_moving += index._table._old is not None
        check(random.choice(pool, 40).tolist())
        assert index.num_blocks("a") == len(held) <= len(index)
    assert num_moving > 15
    check((pool if IS_LONG else pool[::5]).tolist())


def test_blocks_cost_few_bytes_at_every_size() -> None:
    index = PrefixIndex()
    random = np.random.default_rng(0)
    worst = 0.0
    for turn in range(400):
        hashes = random.integers(1, 2**64, 500, dtype=np.uint64).tolist()
        index.apply(f"w{turn % 8}", [BlockStored(hashes, None)])
        if turn > 20:
            worst = max(worst, index.num_bytes / len(index))
    assert len(index) == 200_000
    assert worst < 75.0  # and half of that except while the table grows


@pytest.mark.parametrize("crowded", [False, True])
def test_table_finds_what_was_claimed(crowded: bool) -> None:
    random = np.random.default_rng(1)
    table = HashTable(2048)
    keys = np.unique(random.integers(1, 2**64, 1300, dtype=np.uint64))
    if crowded:  # all hash to the same few cells
        keys = np.arange(1, 1300, dtype=np.uint64) << np.uint64(13)
    random.shuffle(keys)
    half = len(keys) // 2
    cells = np.concatenate([table.claim_many(keys[:half]), table.claim_many(keys[half:])])
    assert len(set(cells.tolist())) == len(keys) == table.used
    assert (table.claim_many(keys) == cells).all()
    assert (table.find_many(keys) == cells).all()
    assert [table.claim(key) for key in keys.tolist()] == cells.tolist()
    assert table.claim_each(keys.tolist()) == table.find_each(keys.tolist()) == cells.tolist()
    assert (table.find_many(keys + np.uint64(1)) == -1).all()
    assert table.find_each((keys + np.uint64(1)).tolist()) == []
    table.put(table.claim(12345), 7)
    assert (table.get(12345), table.take(12345), table.get(12345), table.get(54321)) == (7, 7, 0, 0)


def test_tiers_are_counted_apart() -> None:
    index = PrefixIndex()
    tiers: tuple[Tier, ...] = ("device", "host")
    index.apply("a", [BlockStored([1, 2, 3], None), BlockStored([3, 4], 2, "host")])
    assert [index.num_blocks("a", tier) for tier in tiers] == [3, 2]
    index.apply("a", [BlockStored([3], 2), BlockRemoved([9, 4], "host")])
    assert [index.num_blocks("a", tier) for tier in tiers] == [3, 1]
    assert index.match(np.zeros(0, np.uint64)) == []
