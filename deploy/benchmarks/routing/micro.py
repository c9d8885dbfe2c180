"""Benchmark `router --micro`: time per routing decision with an index of a given size.

A decision includes all of the gateway's work from a prompt's token ids to a reserved worker: block
hashing, lookup of the workers that cache the blocks, the cost of each worker, and the reservation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import psutil

from cluster.bench.report import Result, at_most, checks_json, note
from cluster.bench.stats import percentile
from router.config import RoutingConfig
from router.fleet import Fleet, PromptBlocks
from worker.protocol.blocks import TOKEN_BYTES, block_hash_array, root_hash
from worker.protocol.messages import (
    PROTOCOL_VERSION,
    AttachSnapshot,
    BlockRemoved,
    BlockStored,
    EngineInfo,
    LoadSnapshot,
    WorkerUpdate,
)

_SALT = "bench"
_VOCAB = 150_000
_SHARED = 512
"""Tokens in the system prompt, which every worker has cached."""
_TURN = 512
"""Tokens by which a conversation grows per turn."""
_CONVERSATION = 256
"""Blocks per stored conversation."""
_GOAL_BYTES = 150.0
_GOALS_US = {"decision_us_1k": 60.0, "decision_us_128k": 1000.0, "decision_us_128k_session": 200.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroOptions:
    """Options of `router --micro`."""

    workers: int = 64
    """Number of workers."""
    blocks: int = 1_000_000
    """Number of blocks in the index, over all workers."""
    in_flight: int = 4
    """Number of reserved requests per worker."""
    decisions: int = 300
    """Number of decisions per metric; the median is reported."""
    page_size: int = 16
    """Tokens per block."""
    growth: bool = True
    """Also measure with 8, 64, ... workers up to --max-workers, and with 10, 100, ... times as many
    blocks up to --max-blocks."""
    max_blocks: int = 10_000_000
    """Maximum number of blocks for --growth."""
    max_workers: int = 512
    """Maximum number of workers for --growth."""
    seed: int = 0
    """Random seed of the token ids."""
    routing_policy: str = "adaptive"
    """Routing policy to measure."""

    def __post_init__(self) -> None:
        if self.blocks < self.workers * _CONVERSATION:
            raise ValueError(
                f"--blocks must be at least {self.workers * _CONVERSATION} ({_CONVERSATION} per "
                f"worker), got {self.blocks}"
            )


def run_router_micro(options: MicroOptions) -> Result:
    """Measures decision times in microseconds by fleet and index size, and checks them."""
    rig = _Rig(options)
    figures = rig.decisions()
    result: Result = {"policy": options.routing_policy, **_row(options, figures, rig)}
    if options.growth:
        result["growth"] = [_row(options, figures, rig)]
        del rig
        for workers, blocks in _sizes(options):
            grown = replace(options, workers=workers, blocks=blocks)
            note(f"{workers} workers, {blocks:,} blocks")
            rig = _Rig(grown)
            result["growth"].append(_row(grown, rig.decisions(), rig))
            del rig
    checks = [at_most(name, figures[name], "us", goal) for name, goal in _GOALS_US.items()]
    largest = max(result.get("growth", [result]), key=lambda row: row["blocks"])
    checks.append(
        at_most("index_bytes_per_block", largest["process_bytes_per_block"], "B", _GOAL_BYTES)
    )
    result["checks"] = checks_json(checks)
    return result


def _row(options: MicroOptions, figures: dict[str, float], rig: _Rig) -> Result:
    sizes = {"workers": options.workers, "blocks": options.blocks}
    return {**sizes, **figures, **rig.index_figures}


def _sizes(options: MicroOptions) -> Iterator[tuple[int, int]]:
    workers = 8
    while workers <= options.max_workers:
        if workers != options.workers:
            yield workers, options.blocks
        workers *= 8
    blocks = options.blocks * 10
    while blocks <= options.max_blocks:
        yield options.workers, blocks
        blocks *= 10


class _Rig:
    """A fleet whose workers have cached conversations that begin with the same system prompt."""

    def __init__(self, options: MicroOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)
        self._root = root_hash(_SALT)
        self._shared = self._tokens(_SHARED)
        config = RoutingConfig(routing_policy=options.routing_policy)  # type: ignore[arg-type]
        self.fleet = Fleet(config)
        self._num_decisions = 0
        before = _resident_bytes()
        self._fill()
        index = self.fleet.index
        self.index_figures = {
            "index_bytes_per_block": index.num_bytes / len(index),
            "process_bytes_per_block": (_resident_bytes() - before) / len(index),
            "event_us_per_block": self._events(8),
            "event_us_per_block_of_512": self._events(512),
        }
        """Bytes per block, from the index's own count and from the process's resident memory, and
        time per block of an event in microseconds."""

    def decisions(self) -> dict[str, float]:
        """Median decision times in microseconds, by prompt length."""
        long = 128 * 1024
        return {
            "decision_us_1k": self._cold(1024),
            "decision_us_8k": self._cold(8 * 1024),
            "decision_us_128k": self._cold(long),
            "decision_us_128k_session": self._session(long),
        }

    def _cold(self, num_tokens: int) -> float:
        """Median decision time for new prompts of which workers have only cached the system
        prompt."""
        prompts = (
            self._shared + self._tokens(num_tokens - _SHARED)
            for _ in range(self._options.decisions)
        )
        return percentile([self._timed(prompt) for prompt in prompts], 50.0)

    def _session(self, num_tokens: int) -> float:
        """Median decision time for the next turn of a conversation that one worker has cached."""
        conversation = self._shared + self._tokens(num_tokens - _SHARED)
        self._timed(conversation)
        self._store("w3", conversation)
        times = []
        for _ in range(self._options.decisions):
            turn = conversation + self._tokens(_TURN)
            times.append(self._timed(turn))
        return percentile(times, 50.0)

    def _timed(self, token_ids: bytes) -> float:
        fleet = self.fleet
        self._num_decisions += 1
        request_id = f"r{self._num_decisions}"
        began = time.perf_counter()
        choice = fleet.reserve(request_id, PromptBlocks(token_ids, memo=fleet.memo))
        seconds = time.perf_counter() - began
        assert choice is not None, "no worker was ready"
        fleet.release_booking(choice.worker_id, request_id)
        return seconds * 1e6

    def _events(self, size: int) -> float:
        """Median time per block to apply events that store or remove `size` blocks."""
        times = []
        for _ in range(max(1, 2048 // size)):
            hashes = self._random.integers(1, 2**64, size, dtype=np.uint64).tolist()
            for event in (BlockStored(hashes, None), BlockRemoved(hashes)):
                began = time.perf_counter()
                self.fleet.index.apply("w1", [event])
                times.append((time.perf_counter() - began) / size * 1e6)
        return percentile(times, 50.0)

    def _fill(self) -> None:
        options = self._options
        info = EngineInfo(
            "bench",
            10**6,
            10**7,
            _VOCAB,
            options.page_size,
            256,
            [0],
            _SALT,
            max_num_batched_tokens=8192,
        )
        pages = 2 * options.blocks // options.workers
        loads = []
        for number in range(options.workers):
            load = LoadSnapshot(
                num_running=number % 7,
                num_free_pages=pages,
                num_total_pages=pages,
                max_num_seqs=256,
                queued_prefill_tokens=int(self._random.integers(0, 20_000)),
            )
            loads.append(load)
            snapshot = AttachSnapshot(PROTOCOL_VERSION, f"w{number}", 1, info, [], load)
            self.fleet.attach(f"w{number}", snapshot)
            self._store(f"w{number}", self._shared)
        per_worker = options.blocks // options.workers
        for _ in range(per_worker // _CONVERSATION):
            for number, load in enumerate(loads):
                # Random numbers replace block hashes, which take longer to compute.
                hashes = self._random.integers(1, 2**64, _CONVERSATION, dtype=np.uint64)
                event = BlockStored(hashes.tolist(), None)
                self.fleet.update(f"w{number}", WorkerUpdate(1, 1, [], [event], load))
        for number in range(options.in_flight * options.workers):
            prompt = PromptBlocks(self._shared + self._tokens(_TURN))
            self.fleet.reserve(f"early-{number}", prompt)

    def _store(self, worker_id: str, token_ids: bytes) -> None:
        hashes = block_hash_array(token_ids, self._options.page_size, self._root)
        self.fleet.index.apply(worker_id, [BlockStored(hashes.tolist(), None)])

    def _tokens(self, count: int) -> bytes:
        tokens = self._random.integers(0, _VOCAB, count, dtype=np.int32)
        data = tokens.astype("<i4").tobytes()
        assert len(data) == count * TOKEN_BYTES
        return data


def _resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)
