"""Simulated router that calls NVIDIA Dynamo's SelectionService, from `ai-dynamo-runtime`.

The index, the cost function and the reservations are Dynamo's own. Simulated workers report to
Dynamo as vLLM does: KV events over a ZeroMQ socket, and the first token and the end of each
request. Dynamo breaks ties at random, so runs differ slightly.
"""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import zmq
from dynamo.llm import SelectionService
from dynamo.llm.exceptions import DynamoException

from deploy.benchmarks.routing.simulated import Clock, Placement, SimulatedRouter
from deploy.benchmarks.routing.worker import SALT, TOKEN, SimWorker
from deploy.benchmarks.routing.workload import Arrival
from worker.protocol.blocks import TOKEN_BYTES, block_hash_array, root_hash
from worker.protocol.messages import BlockEvent, BlockRemoved, StepReport, Submit

_MODEL = {"model_name": "simulated"}
_MARK_TOKEN = 2**31 - 1
"""Token id of the first marker block; later ones count down. Prompts have no such tokens."""
_LONG_S = 30.0
"""Timeout in seconds for an event to reach Dynamo's index."""


class DynamoRouter(SimulatedRouter):
    """Router that uses `dynamo.llm.SelectionService` in this process.

    A broken event stream has no effect, since Dynamo requests missed events from the worker.

    Args:
        clock: clock of the simulation.
        settings: Dynamo's environment variables, without the prefix DYN_ROUTER_; empty uses
            Dynamo's defaults.
    """

    def __init__(self, clock: Clock, settings: Mapping[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="rf-dyn-")
        self._context = zmq.Context()
        self._workers: dict[str, _Publisher] = {}
        self._names: dict[int, str] = {}
        self._incarnations: Counter[str] = Counter()
        self._bookings: dict[str, str] = {}
        """Ids of Dynamo's reservations, keyed by request."""
        self._num_bookings = 0
        self._num_marks = 0
        self._tokens = BlockTokens()
        with _environment({f"DYN_ROUTER_{key}": str(value) for key, value in settings.items()}):
            self._service = SelectionService(indexer_threads=1)

    def joined(self, worker: SimWorker) -> None:
        """Adds a worker that has started, or whose attach stream was reopened."""
        name = worker.worker_id
        if name in self._workers:
            return
        self._incarnations[name] += 1
        number = 1000 * self._incarnations[name] + len(self._names)
        path = f"ipc://{self._folder.name}/{number}"
        publisher = _Publisher(self._context, path, number, worker.info.page_size)
        self._workers[name] = publisher
        self._names[number] = name
        record = {
            **_MODEL,
            "worker_id": number,
            "endpoint": f"simulated://{number}",
            "block_size": worker.info.page_size,
            "max_num_batched_tokens": worker.info.max_num_batched_tokens,
            "total_kv_blocks": worker.info.max_total_tokens // worker.info.page_size,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: path},
        }
        self._run(self._service.upsert_worker, record)
        publisher.wait_for_subscriber()

    def lost(self, worker: SimWorker) -> None:
        """Removes a worker that failed or left."""
        if (not worker.up or worker.draining) and worker.worker_id in self._workers:
            publisher = self._workers.pop(worker.worker_id)
            self._run(self._service.delete_worker, publisher.number)
            publisher.close()

    def place(self, arrivals: Sequence[Arrival]) -> list[Placement | None]:
        """Chooses workers for requests that arrive at the same time."""
        if not self._workers:
            return [None] * len(arrivals)
        self._catch_up()
        return [self._place(arrival) for arrival in arrivals]

    def submitted(self, worker: SimWorker, submit: Submit, ordinal: int) -> None:
        """Does nothing, as `place` has already made the reservation."""

    def reported(self, worker: SimWorker, report: StepReport) -> None:
        """Handles the report of a worker's step."""
        publisher = self._workers.get(worker.worker_id)
        if publisher is not None:
            for event in report.block_events:
                publisher.add(event, self._tokens)
        for deltas in report.deltas.values():
            for delta in deltas:
                if delta.num_cached_tokens >= 0:
                    self._report(self._service.prefill_complete, delta.request_id)

    def ended(self, worker_id: str, request_id: str) -> None:
        """Records that a request has finished or its worker has ended."""
        self._report(self._service.free_reservation, request_id)
        self._bookings.pop(request_id, None)

    def close(self) -> None:
        """Releases the router's resources after the simulation."""
        self._service.shutdown()
        for publisher in self._workers.values():
            publisher.close()
        self._context.term()
        self._loop.close()
        self._folder.cleanup()

    def _place(self, arrival: Arrival) -> Placement:
        self._tokens.learn(arrival, next(iter(self._workers.values())).page_size)
        self._num_bookings += 1
        booking = f"{self._num_bookings}"
        answer = self._run(
            self._service.select_and_reserve,
            {
                **_MODEL,
                "selection_id": booking,
                "token_ids": np.frombuffer(arrival.tokens, "<i4").tolist(),
                "expected_output_tokens": arrival.output_len,
            },
        )
        self._bookings[arrival.request_id] = booking
        hit = int(answer["overlap"]["gpu"])
        return Placement(self._names[answer["worker_id"]], hit)

    def _catch_up(self) -> None:
        """Publishes all new events and waits until Dynamo's index has applied them, because events
        take no time in the simulation."""
        behind = [one for one in self._workers.values() if one.has_news]
        if not behind:
            return
        self._num_marks += 1
        for one in behind:
            one.flush(self._num_marks)
        request = {**_MODEL, "token_ids": _mark(self._num_marks, behind[0].page_size)}
        waiting = {one.number for one in behind}
        end = self._loop.time() + _LONG_S
        while waiting:
            scores = self._run(self._service.overlap_scores, request)
            waiting -= {w["worker_id"] for w in scores["workers"] if w["device_blocks"]}
            if self._loop.time() > end:
                raise RuntimeError("Dynamo's index is incomplete: events were lost")

    def _report(self, call: Any, request_id: str) -> None:
        booking = self._bookings.get(request_id)
        if booking is None:
            return
        try:
            self._run(call, booking)
        except DynamoException:
            return  # the worker and its reservations are gone

    def _run(self, call: Any, argument: Any) -> Any:
        async def wait() -> Any:
            return await call(argument)

        return self._loop.run_until_complete(wait())


class BlockTokens:
    """Token ids of blocks, keyed by rayfleet's block hash. rayfleet's events contain only hashes,
    but Dynamo's need tokens."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}
        self._root = root_hash(SALT)

    def learn(self, arrival: Arrival, page_size: int) -> None:
        """Adds the blocks of a request's prompt and answer, which workers may cache."""
        output = np.full(arrival.output_len, TOKEN, "<i4").tobytes()
        data = arrival.tokens + output
        hashes = block_hash_array(data, page_size, self._root).tolist()
        width = page_size * TOKEN_BYTES
        for place, value in enumerate(hashes):
            if value not in self._blocks:
                block = data[place * width : (place + 1) * width]
                self._blocks[value] = np.frombuffer(block, "<i4").tolist()

    def of(self, hashes: Sequence[int]) -> list[int]:
        """Token ids of a chain of blocks."""
        return [token for value in hashes for token in self._blocks[value]]


class _Publisher:
    """Publisher of a worker's KV events in vLLM's format; each flush ends with a marker block."""

    def __init__(self, context: Any, path: str, number: int, page_size: int) -> None:
        self.number = number
        self.page_size = page_size
        self._socket = context.socket(zmq.XPUB)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(path)
        self._events: list[Any] = []
        self._mark = 0
        self._seq = 0

    @property
    def has_news(self) -> bool:
        """Whether there are events to flush."""
        return bool(self._events)

    def wait_for_subscriber(self) -> None:
        """Waits until Dynamo has subscribed; events sent before that are lost."""
        if not self._socket.poll(_LONG_S * 1000):
            raise RuntimeError(
                f"Dynamo's selection service did not subscribe to its worker within {_LONG_S:g} s: "
                "see its log"
            )
        self._socket.recv()

    def add(self, event: BlockEvent, tokens: BlockTokens) -> None:
        """Adds an event of the simulated worker to the next flush."""
        hashes = event.block_hashes
        if isinstance(event, BlockRemoved):
            self._events.append(["BlockRemoved", hashes])
            return
        block = [event.parent_hash, tokens.of(hashes), self.page_size, None]
        self._events.append(["BlockStored", hashes, *block])

    def flush(self, mark: int) -> None:
        """Sends all events, then stores marker block `mark` and removes the one before it."""
        block = [None, _mark(mark, self.page_size), self.page_size, None]
        self._events.append(["BlockStored", [mark], *block])
        if self._mark:
            self._events.append(["BlockRemoved", [self._mark]])
        payload = msgspec.msgpack.encode([0.0, self._events, 0])
        self._socket.send_multipart([b"", struct.pack(">q", self._seq), payload])
        self._events = []
        self._mark = mark
        self._seq += 1

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def _mark(number: int, page_size: int) -> list[int]:
    return [_MARK_TOKEN - number] * page_size


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
