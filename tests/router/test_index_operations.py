"""The index matches real caches after any sequence of operations."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.fleet import BlockKey, Fleet, PromptBlocks
from tests.support.effort import cases
from tests.support.router.scheduled_worker import PAGE_SIZE, SALT, ScheduledWorker
from worker.protocol.messages import AttachSnapshot, Submit, WorkerDown
from worker.protocol.sampling import SamplingParams

WORKERS = ("w0", "w1", "w2")
HOST_PAGES = {"w0": 0, "w1": 9, "w2": 60}
GATEWAYS = ("g0", "g1")
KEY = BlockKey(PAGE_SIZE, SALT)


class IndexMachine(RuleBasedStateMachine):
    """Two gateways and three small workers; streams may lag, break and reconnect."""

    @initialize()
    def begin(self) -> None:
        self.workers = {
            worker_id: ScheduledWorker(worker_id, num_host_pages=HOST_PAGES[worker_id])
            for worker_id in WORKERS
        }
        self.fleets = {gateway_id: Fleet(clock=lambda: 0.0) for gateway_id in GATEWAYS}
        self.broken: set[tuple[str, str]] = set()
        self.num_requests = 0
        self.prompts: list[PromptBlocks] = []
        self.booked: dict[str, tuple[str, str]] = {}
        for worker in self.workers.values():
            for gateway_id in GATEWAYS:
                worker.attach(gateway_id)
                self.deliver(gateway_id, worker.worker_id)

    @rule(
        gateway_id=st.sampled_from(GATEWAYS),
        family=st.integers(0, 2),
        shared=st.integers(0, 10),
        rest=st.integers(1, 30),
        output=st.integers(1, 12),
        count=st.integers(1, 6),
    )
    def burst(
        self, gateway_id: str, family: int, shared: int, rest: int, output: int, count: int
    ) -> None:
        for _ in range(count):
            self.request(gateway_id, family, shared, rest, output)

    def request(self, gateway_id: str, family: int, shared: int, rest: int, output: int) -> None:
        self.num_requests += 1
        unique = np.arange(rest) + 1000 * self.num_requests
        tokens = np.concatenate([np.arange(4 * shared) + 100 * family + 1, unique]).astype("<i4")
        fleet = self.fleets[gateway_id]
        prompt = PromptBlocks(tokens.tobytes(), memo=fleet.memo)
        self.prompts.append(prompt)
        request_id = f"r{self.num_requests}"
        choice = fleet.reserve(request_id, prompt)
        if choice is None:
            return
        self.booked[request_id] = (gateway_id, choice.worker_id)
        sampling = SamplingParams(max_tokens=output, seed=1, ignore_eos=True)
        submit = Submit(
            request_id=request_id, gateway_id=gateway_id, prompt=prompt.token_ids, sampling=sampling
        )
        worker = self.workers[choice.worker_id]
        ordinal = worker.submit(submit)
        fleet.accepted(choice.worker_id, request_id, worker.epoch, ordinal)

    @rule(worker_id=st.sampled_from(WORKERS), count=st.integers(1, 30))
    def step(self, worker_id: str, count: int) -> None:
        for _ in range(count):
            self.workers[worker_id].step()

    @rule(worker_id=st.sampled_from(WORKERS), gateway_id=st.sampled_from(GATEWAYS))
    def deliver(self, gateway_id: str, worker_id: str) -> None:
        """The gateway reads all items of its stream."""
        fleet = self.fleets[gateway_id]
        if (gateway_id, worker_id) in self.broken:
            return
        while (item := self.workers[worker_id].take(gateway_id)) is not None:
            if isinstance(item, AttachSnapshot):
                fleet.attach(worker_id, item)
            elif isinstance(item, WorkerDown):
                fleet.lose(worker_id)
                self.end(gateway_id, worker_id)
            else:
                fleet.update(worker_id, item)
                for delta in item.deltas:
                    self.booked.pop(delta.request_id, None)
                    fleet.release_booking(worker_id, delta.request_id)

    @rule(worker_id=st.sampled_from(WORKERS), gateway_id=st.sampled_from(GATEWAYS))
    def break_stream(self, gateway_id: str, worker_id: str) -> None:
        """Items in flight are lost."""
        self.broken.add((gateway_id, worker_id))
        self.fleets[gateway_id].lose(worker_id)
        self.end(gateway_id, worker_id)

    @rule(worker_id=st.sampled_from(WORKERS), gateway_id=st.sampled_from(GATEWAYS))
    def attach_again(self, gateway_id: str, worker_id: str) -> None:
        if (gateway_id, worker_id) in self.broken:
            self.broken.remove((gateway_id, worker_id))
            self.workers[worker_id].attach(gateway_id)

    @rule(worker_id=st.sampled_from(WORKERS))
    def restart(self, worker_id: str) -> None:
        self.workers[worker_id].restart()

    @invariant()
    def broken_streams_leave_nothing_behind(self) -> None:
        if hasattr(self, "broken"):
            for gateway_id, worker_id in self.broken:
                assert self.fleets[gateway_id].index.num_blocks(worker_id) == 0

    def end(self, gateway_id: str, worker_id: str) -> None:
        """Ends the requests of a failed worker, as the gateway's channel does."""
        for request_id, place in list(self.booked.items()):
            if place == (gateway_id, worker_id):
                del self.booked[request_id]
                self.fleets[gateway_id].release_booking(worker_id, request_id)

    def teardown(self) -> None:
        if not hasattr(self, "broken"):
            return
        for gateway_id in GATEWAYS:
            for worker_id in WORKERS:
                self.attach_again(gateway_id, worker_id)
        while any(worker.scheduler.has_work() for worker in self.workers.values()):
            for worker_id in WORKERS:
                self.step(worker_id, 1)
        for gateway_id, fleet in self.fleets.items():
            for worker_id in WORKERS:
                self.step(worker_id, 1)
                self.deliver(gateway_id, worker_id)
            self.check(fleet)

    def check(self, fleet: Fleet) -> None:
        held: dict[str, set[int]] = {}
        for worker_id, worker in self.workers.items():
            device, host = worker.cached_hashes("device"), worker.cached_hashes("host")
            held[worker_id] = device | host
            assert fleet.index.num_blocks(worker_id) == len(device)
            assert fleet.index.num_blocks(worker_id, "host") == len(host)
            slot = fleet.index.slot(worker_id)
            assert slot is not None
            for value in held[worker_id]:
                [(mask, _)] = fleet.index.match(np.array([value], np.uint64))
                assert mask >> 2 * slot & 1 == (value in device)
                assert mask >> 2 * slot + 1 & 1
        for state in fleet.workers:
            assert not state.reservations
            assert not state.in_flight
            assert fleet.table.reserved_s[state.row] == 0.0
        assert len(fleet.in_flight) == 0
        for prompt in self.prompts:
            hits = fleet.view(prompt).hit_tokens
            hashes = prompt.hashes(KEY).tolist()
            for state in fleet.workers:
                cached = held[state.worker_id]
                length = next((i for i, h in enumerate(hashes) if h not in cached), len(hashes))
                expected = min(length * PAGE_SIZE, prompt.num_tokens - 1)
                assert hits[state.row] == expected


TestIndexOperations = IndexMachine.TestCase
TestIndexOperations.settings = settings(
    max_examples=cases(40), stateful_step_count=40, deadline=None
)
