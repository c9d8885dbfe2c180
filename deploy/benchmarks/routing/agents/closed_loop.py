"""Discrete-event simulation of agents and a gateway, with the real schedulers, caches and gate.

Time is coarse, so that a run takes seconds: a simulated step stands for `COARSE` engine steps, and
a simulated output token for `COARSE` tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from deploy.benchmarks.routing.agents.load import AgentLoad, AgentSession
from deploy.benchmarks.routing.simulated import Clock, GatewayRouter, Placement, SimulatedRouter
from deploy.benchmarks.routing.worker import TOKEN, SimWorker
from deploy.benchmarks.routing.workload import DEFAULT_COSTS, Arrival, FleetShape
from router.fleet import PromptBlocks
from router.fleet.memo import HashMemo
from router.fleet.session_gate import SessionGate, Visit
from worker.protocol.messages import Submit
from worker.protocol.sampling import SamplingParams

COARSE = 4
PAGE = 64
CACHE_TOKENS = 270_000
"""KV cache size of a worker in tokens, as for a 70B model on a group of data-center GPUs."""
_GATEWAY = "simulated"
_POLL_S = 0.25
_FIRST_S = 60.0
"""Time in seconds within which the initial sessions start."""
_REPLACED_S = 5.0
"""Mean number of seconds until a finished session is replaced."""


def fleet_shape(num_workers: int, host_share: float) -> FleetShape:
    """Number, limits and speeds of the simulated workers. `host_share` is the size of the host tier
    relative to the device's KV cache."""
    costs = msgspec.structs.replace(
        DEFAULT_COSTS,
        constant=DEFAULT_COSTS.constant * COARSE,
        decode_row=DEFAULT_COSTS.decode_row * COARSE,
        context_token=DEFAULT_COSTS.context_token * COARSE,
    )
    num_pages = CACHE_TOKENS // PAGE
    return FleetShape(
        slowness=(1.0,) * num_workers,
        costs=costs,
        page_size=PAGE,
        num_pages=num_pages,
        max_num_batched_tokens=8192,
        default_tpot_ms=100 * COARSE,
        num_host_pages=int(host_share * num_pages),
    )


@dataclass(kw_only=True, slots=True)
class Turn:
    """One request of a session. Times are seconds of simulated time."""

    session: AgentSession
    prompt: PromptBlocks
    at: float
    num_output: int
    """Number of simulated output tokens."""
    num_repeated: int
    """Prompt tokens that would be hits in an unlimited cache."""
    is_first: bool
    visit: Visit | None = None
    first_token_s: float = -1.0
    """Seconds from arrival to first token, including the wait at the gate; negative until the first
    token."""
    cached_tokens: int = 0
    ended_at: float = -1.0

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting at the gate."""
        return 0.0 if self.visit is None else self.visit.wait_s


class ClosedLoop:
    """A constant number of concurrent sessions, served by simulated workers. Deterministic.

    Args:
        load: the sessions.
        num_sessions: number of concurrent sessions; a session that ends is replaced.
        shape: the workers.
        router: creates the router, given the simulation's clock.
        max_wait_s: maximum wait at the gate in seconds; 0 disables the gate. The gate requires the
            gateway's own router.
    """

    def __init__(
        self,
        load: AgentLoad,
        num_sessions: int,
        shape: FleetShape,
        router: Callable[[Clock], SimulatedRouter],
        max_wait_s: float,
    ) -> None:
        self._load = load
        self._num_sessions = num_sessions
        self._now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self._router = router(self._clock)
        self._memo = HashMemo()
        self._gate: SessionGate | None = None
        if max_wait_s:
            assert isinstance(self._router, GatewayRouter), "only this gateway has a gate"
            self._gate = SessionGate(self._router.fleet, self._clock, max_wait_s)
        self._polls = False
        self._turns: dict[str, Turn] = {}
        """Unfinished turns, keyed by request id."""
        self._num_turns = 0
        self._products = set[int]()
        """Lengths of the shared prefixes (system prompts) that have been sent so far."""
        self.ended: list[Turn] = []
        self._workers: dict[str, SimWorker] = {}
        for number in range(len(shape.slowness)):
            worker = SimWorker(f"w{number}", shape, clock=self._clock)
            self._workers[worker.worker_id] = worker
            self._router.joined(worker)

    def run(self, horizon_s: float) -> None:
        """Simulates the first `horizon_s` seconds; finished turns are in `ended`."""
        random = self._load.random
        for _ in range(self._num_sessions):
            at = float(random.uniform(0.0, _FIRST_S))
            self._push(at, "turn", self._load.session(started=True))
        while self._events and self._events[0][0] <= horizon_s:
            self._now, _, kind, what = heapq.heappop(self._events)
            if kind == "turn":
                self._begin(what)
            elif kind == "step":
                self._step(what)
            else:
                assert kind == "poll"
                self._polls = False
                self._admit()
        self._now = horizon_s
        self._router.close()

    @property
    def oldest_s(self) -> float:
        """Longest time in seconds that an unfinished turn has been waiting for its first token."""
        waiting = (turn.at for turn in self._turns.values() if turn.first_token_s < 0.0)
        return self._now - min(waiting, default=self._now)

    def _clock(self) -> float:
        return self._now

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, kind, what))

    def _begin(self, session: AgentSession) -> None:
        tokens = session.context.astype("<i4").tobytes()
        num_repeated = session.num_before
        if not num_repeated and session.num_shared in self._products:
            num_repeated = session.num_shared
        self._products.add(session.num_shared)
        prompt = PromptBlocks(tokens, session=session.name, memo=self._memo)
        prompt.has_tools = True
        turn = Turn(
            session=session,
            prompt=prompt,
            at=self._now,
            num_output=max(self._load.num_output() // COARSE, 8),
            num_repeated=num_repeated // PAGE * PAGE,
            is_first=not session.num_before,
        )
        self._num_turns += 1
        request_id = f"r{self._num_turns}"
        self._turns[request_id] = turn
        if self._gate is None:
            self._place(request_id, turn)
            return
        visit = turn.visit = self._gate.arrive(prompt)
        if visit is None or visit.admitted:
            self._place(request_id, turn)
        else:
            visit.on_over = lambda: self._place(request_id, turn)
            self._admit()

    def _admit(self) -> None:
        assert self._gate is not None
        self._gate.admit()
        if self._gate.num_waiting and not self._polls:
            self._polls = True
            self._push(self._now + _POLL_S, "poll", None)

    def _place(self, request_id: str, turn: Turn) -> None:
        placement = self._choose(request_id, turn)
        worker = self._workers[placement.worker_id]
        submit = Submit(
            request_id=request_id,
            gateway_id=_GATEWAY,
            prompt=turn.prompt.token_ids,
            sampling=SamplingParams(max_tokens=turn.num_output, seed=1, ignore_eos=True),
            num_expected_cached=placement.hit_tokens,
            sampled_blocks=placement.sampled_blocks,
            shared_block=placement.shared_block,
        )
        ordinal = worker.submit(submit)
        self._router.submitted(worker, submit, ordinal)
        self._go_on(worker)

    def _choose(self, request_id: str, turn: Turn) -> Placement:
        """Chooses the worker for a turn that has passed the gate."""
        if self._gate is not None and turn.visit is not None:
            assert isinstance(self._router, GatewayRouter)
            choice = self._router.fleet.reserve(request_id, turn.prompt, turn.visit.excluded)
            assert choice is not None, "no worker is ready"
            self._gate.placed(turn.visit, choice)
            return Placement(choice.worker_id, choice.hit_tokens)
        arrival = Arrival(
            request_id=request_id,
            at=self._now,
            tokens=turn.prompt.token_ids,
            output_len=turn.num_output,
            session=turn.session.name,
        )
        (group,) = self._router.split([arrival])
        (placement,) = self._router.place(group)
        assert placement is not None, "no worker is ready"
        return placement

    def _go_on(self, worker: SimWorker) -> None:
        seconds = worker.begin()
        if seconds is not None:
            self._push(self._now + seconds, "step", worker)

    def _step(self, worker: SimWorker) -> None:
        report = worker.finish()
        self._router.reported(worker, report)
        if self._gate is not None:
            self._gate.reported(worker.worker_id, report.load)
        for delta in report.deltas.get(_GATEWAY, []):
            turn = self._turns[delta.request_id]
            if delta.num_cached_tokens >= 0 and turn.first_token_s < 0.0:
                turn.first_token_s = self._now - turn.at
                turn.cached_tokens = delta.num_cached_tokens
            if delta.finish_reason is not None:
                assert delta.finish_reason == "length", delta.error
                self._router.ended(worker.worker_id, delta.request_id)
                self._end(self._turns.pop(delta.request_id))
        if self._gate is not None:
            self._admit()
        self._go_on(worker)

    def _end(self, turn: Turn) -> None:
        turn.ended_at = self._now
        self.ended.append(turn)
        if self._gate is not None and turn.visit is not None:
            self._gate.end(turn.visit)
        session, load = turn.session, self._load
        load.answered(session, np.full(turn.num_output, TOKEN, np.int32))
        if load.ends(session):
            self._replace(session)
        elif children := load.sub_agents(session):
            for child in children:
                self._push(self._now + 0.3, "turn", child)
        else:
            self._push(self._now + load.grow(session), "turn", session)

    def _replace(self, session: AgentSession) -> None:
        """Replaces a finished session with a new one, or with the parent's next turn."""
        parent, load = session.parent, self._load
        if parent is None:
            later = float(load.random.exponential(_REPLACED_S))
            self._push(self._now + later, "turn", load.session())
            return
        parent.num_children -= 1
        if not parent.num_children:
            load.grow(parent)
            self._push(self._now + 0.2, "turn", parent)
