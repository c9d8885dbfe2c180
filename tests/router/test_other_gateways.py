"""Prompts in flight of other gateways: found like own ones, forgotten when they are computed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Fleet, PromptBlocks
from router.fleet.blocks import BlockKey
from router.fleet.other_gateways import MIN_TOKENS, OtherGatewaysPrompts, sampled_blocks
from tests.support.effort import cases
from tests.support.router.fleet_states import IDLE, INFO, fleet_of, snapshot
from tests.support.router.peer_network import PeerNetwork
from tests.support.router.rig import Rig
from worker.protocol.blocks import BlockHashes, block_hash_array
from worker.protocol.messages import BlockStored, LoadSnapshot, PromptInFlight, WorkerUpdate
from worker.protocol.text.tokenizer import Tokenizer

KEY = BlockKey.of(INFO)
PROMPT = st.lists(st.integers(0, 1), max_size=9)


def chain(prompt: list[int]) -> BlockHashes:
    return block_hash_array(np.array(prompt, np.int32), 1, 1)


def common(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@given(data=st.data())
@settings(max_examples=cases(100), deadline=None)
def test_matches_equal_a_list_of_prompts(data: st.DataObject) -> None:
    prompts = OtherGatewaysPrompts()
    kept: dict[tuple[int, int], list[int]] = {}
    for ordinal in range(data.draw(st.integers(0, 20))):
        action, row = data.draw(st.sampled_from(("add", "add", "remove", "drop"))), 0
        if action == "add":
            row, prompt = data.draw(st.integers(0, 3)), data.draw(PROMPT)
            packed = sampled_blocks(chain(prompt))
            prompts.add(row, [PromptInFlight(ordinal, packed)])
            if prompt:
                kept[row, ordinal] = prompt
        elif action == "remove" and kept:
            row, removed = data.draw(st.sampled_from(sorted(kept)))
            prompts.remove(row, [removed, 99])
            del kept[row, removed]
        else:
            row = data.draw(st.integers(0, 3))
            prompts.drop(row)
            kept = {key: prompt for key, prompt in kept.items() if key[0] != row}
    query = data.draw(PROMPT)
    found = prompts.match(chain(query))
    assert len(prompts) == len(kept)
    for row in range(4):
        expected = max((common(p, query) for (r, _), p in kept.items() if r == row), default=0)
        assert max((length for rows, length in found if rows >> row & 1), default=0) == expected


def test_long_common_prefixes_are_found_but_for_a_512th() -> None:
    random = np.random.default_rng(1)
    hashes = random.integers(1, 2**64, 9000, dtype=np.uint64)
    prompts = OtherGatewaysPrompts()
    packed = sampled_blocks(hashes)
    assert len(packed) < 11_000
    prompts.add(0, [PromptInFlight(1, packed)])
    for shared in (1, 511, 1024, 1500, 4099, 8999, 9000):
        query = hashes.copy()
        query[shared:] += np.uint64(1)
        [(rows, length)] = prompts.match(query)
        assert rows == 1
        assert shared * 511 / 512 <= length <= shared


def prompt(first: int, last: int) -> PromptBlocks:
    """600 tokens after a number, all but the last 10 shared by all with the same `first`."""
    tokens = np.array([first, *range(600)], "<i4")
    tokens[-10:] = last
    return PromptBlocks(tokens.tobytes())


def sent(fleet: Fleet, request_id: str, blocks: PromptBlocks) -> tuple[str, PromptInFlight]:
    choice = fleet.reserve(request_id, blocks)
    assert choice is not None
    return choice.worker_id, PromptInFlight(1, choice.sampled_blocks, choice.shared_block)


def test_a_prefix_in_flight_elsewhere_attracts_its_requests_until_it_is_computed() -> None:
    one, two = fleet_of("a", "b", "c"), fleet_of("a", "b", "c")
    one.has_other_gateways = two.has_other_gateways = True
    sent(one, "earlier", prompt(1, 1))
    worker_id, message = sent(one, "r", prompt(7, 1))
    assert worker_id != "a", "the other gateway would choose it anyway"
    load = LoadSnapshot(num_free_pages=250, num_total_pages=250, max_num_seqs=8)
    two.update(worker_id, WorkerUpdate(1, 1, [], [], load, [message]))
    choice = two.reserve("s", prompt(7, 2))
    assert choice is not None
    assert (choice.worker_id, choice.hit_tokens) == (worker_id, 588)
    assert not choice.sampled_blocks, "little is left to compute"
    two.release_booking(worker_id, "s")
    # Computed: its blocks are in the cache from then on, unless they were evicted at once.
    stored = BlockStored(prompt(7, 1).hashes(KEY).tolist()[:100], None)
    two.update(worker_id, WorkerUpdate(1, 2, [], [stored], load, computed=[1]))
    assert len(two.others) == 0
    assert two.view(prompt(7, 3)).best_hit == 400


def test_prompts_of_a_lost_worker_are_forgotten_and_a_snapshot_has_those_it_runs() -> None:
    fleet = fleet_of("a", "b")
    message = PromptInFlight(3, sampled_blocks(prompt(7, 1).hashes(KEY)))
    fleet.update("a", WorkerUpdate(1, 1, [], [], IDLE, [message]))
    assert fleet.view(prompt(7, 2)).best_hit == 588
    fleet.lose("a")
    assert fleet.view(prompt(7, 2)).best_hit == 0
    again = snapshot("a", epoch=2)
    again.prompts = [message]
    fleet.attach("a", again)
    fleet.attach("a", again)
    assert fleet.view(prompt(7, 2)).best_hit == 588
    fleet.remove("a")
    assert len(fleet.others) == 0


def test_short_prompts_are_not_sent() -> None:
    fleet = fleet_of("a")
    fleet.has_other_gateways = True
    short = PromptBlocks(np.arange(MIN_TOKENS - 1, dtype="<i4").tobytes())
    assert sent(fleet, "r", short)[1].sampled_blocks == b""


async def test_prompts_are_sent_only_while_there_are_other_gateways(
    checkpoint: Path, tokenizer: Tokenizer
) -> None:
    network, rig = PeerNetwork(), Rig(checkpoint, tokenizer)
    rig.peers = network.join("gw-first")
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, max_model_len=512)
    await rig.start()

    async def sends_prompt(first: int) -> bool:
        body = {"model": "stub", "prompt": [first] * 300, "max_tokens": 1}
        assert (await rig.client.post("/v1/completions", json=body)).status_code == 200
        [submit] = [s for s in rig.submits() if s.prompt[0] == first]
        return bool(submit.sampled_blocks)

    assert not await sends_prompt(5)
    network.join("gw-second")
    assert await sends_prompt(6)
    network.leave("gw-second")
    assert not await sends_prompt(7)
    await rig.stop()
