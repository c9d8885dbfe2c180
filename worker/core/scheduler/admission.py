"""Admission: moves requests from the queue to the running set while there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.core.cache.lease import Lease, Match
from worker.core.request import Request, RequestState
from worker.core.scheduler.host_load_policy import HostLoadPolicy
from worker.core.scheduler.lifecycle import Lifecycle
from worker.core.scheduler.logits_params import logits_params
from worker.core.scheduler.page_claims import num_still_needed
from worker.core.scheduler.policy import (
    ORDERS,
    POLICIES,
    AdmissionPolicy,
    AdmissionRound,
    Item,
    Outcome,
    StepHeadroom,
)
from worker.core.scheduler.prefix_deduplication import PrefixDeduplication
from worker.core.scheduler.priority_preemption import PriorityPreemption
from worker.core.scheduler.starvation_guard import StarvationGuard
from worker.core.scheduler.state import SchedulerState
from worker.core.scheduler.step import StepBuilder
from worker.plan.plan import Admit, BlockAdmit

COUNTED_ROUNDS = 16
"""Number of admission rounds for which a prefix cache lookup is reused: the cache changes
slowly."""
LEVEL = 2
"""Number of sort keys per level of urgency: preempted requests precede other requests of their
level (`_rank`).
"""
MAX_DISPLACING = 8
"""Minimum number of waiting requests that a fifo round considers, even if fewer slots are free: a
request may get its slot by preempting a running one."""


class Admitted(NamedTuple):
    """A request admitted to a step. It has a slot, and there are pages for its tokens."""

    request: Request
    lease: Lease
    length: int
    """Number of tokens granted by the round."""
    cost: int
    """Number of pending tokens, which is the maximum that the request could compute."""


class _Placement(NamedTuple):
    """Decision about one waiting request: outcome, cached prefix, and running requests
    to preempt."""

    outcome: Outcome
    match: Match
    victims: Sequence[Request] = ()
    """Running requests to preempt for the waiting one: in this step, or in the next one if the
    outcome is PREEMPTING."""


class Admission:
    """Runs one admission round per step, if the step has tokens left for prompts and requests are
    waiting.

    A request is admitted if there are pages for all its known tokens in addition to the reserve:
    the pages that running requests will need next (`num_still_needed`). No request is thus
    preempted for one that was just admitted. The reserve is empty while nothing runs, so any
    request that passed the frontend's validation fits.

    If there is no free slot, or there are too few pages, a request preempts running ones that it
    outranks by at least the gap.

    Requests are tried one by one, each with the room left by those before it: `_placement`
    decides without side effects, and `_take` carries out the decision.
    """

    def __init__(
        self, state: SchedulerState, lifecycle: Lifecycle, host_loads: HostLoadPolicy | None
    ) -> None:
        self.options = state.config.admission
        """Admission options, which may change between steps."""
        self._state = state
        self._lifecycle = lifecycle
        self._page_size = state.config.page_size
        self._cache = state.cache
        self._queue = state.queue
        self._host_loads = host_loads
        self._preemption = PriorityPreemption(state, host_loads)
        self._deduplication = PrefixDeduplication(
            self._page_size, state.config.max_num_batched_tokens // 8
        )
        self._starvation_guard = StarvationGuard()
        self.num_rounds = 0
        """Number of rounds so far."""
        self._reserve: int | None = None
        """Number of pages that running requests will need; None if it must be recomputed."""
        self._giving_way: set[str] = set()
        """Ids of the running requests that this round preempts."""

    @property
    def has_slots(self) -> bool:
        """Whether a request could be admitted without preempting another."""
        return self._cache.num_free_slots > 0

    @property
    def max_requests(self) -> int:
        """Maximum number of requests that a round may admit."""
        return self.options.prefill_max_batch_size or self._queue.num_requests

    def round(
        self, headroom: StepHeadroom, now: float, *, running_level: int = -1, is_shared: bool
    ) -> list[Admitted]:
        """Runs a round and returns the admitted requests; `launch` adds their pages and rows.

        Args:
            headroom: numbers of tokens and requests for which the step has room.
            now: time on the scheduler's clock, in seconds.
            running_level: highest level of running prefills, -1 if there are none; requests that it
                outranks by at least the gap are not admitted.
            is_shared: whether running prefills also need some of the step's tokens.
        """
        # Check for requests to admit and for room. An oversize request may run alone even if there
        # is no room for one that shares the step.
        oldest = self._queue.oldest()
        if oldest is None or not self.can_admit(oldest.level):
            return []
        if not headroom.is_open and is_shared:
            return []
        self._begin_round()

        # Policy: the configured one, or fifo with the oldest request first if that request starves.
        options = self.options
        generation, starves = oldest.queue_entry.generation, self._starvation_guard.is_due(oldest)
        force = options.prefill_force_fifo_every
        forced = starves or (force > 0 and self.num_rounds % force == 0)
        policy = POLICIES["fifo" if forced else options.prefill_admission_policy]

        # Candidates, in queue order.
        requests, items = self._candidates(headroom, policy, oldest if starves else None)
        if not policy.stops and self._is_shared(requests):
            policy = policy._replace(key=None)  # already in order
        drop = self._preemption.gap * LEVEL
        floor = running_level * LEVEL - drop + 1 if drop else -1

        # Placements: one by one, each with the room left by those before it.
        leases: dict[int, Lease] = {}
        round_ = AdmissionRound(policy, items, headroom, drop, floor)
        while (index := round_.next()) is not None:
            request = requests[index]
            if not starves and self._deduplication.is_being_computed(request):
                request.queue_entry.uncached_round = -1
                round_.report(Outcome.WAITS)
                continue
            outcome, lease = self._take(request, self._placement(request, round_.is_preempting))
            round_.report(outcome)
            if lease is not None:
                leases[index] = lease
                self._deduplication.add(request)
        self._starvation_guard.count(oldest, generation, [requests[index] for index in leases])

        # Admitted: with the tokens granted by the round.
        admitted = []
        for index, length in round_.lengths.items():
            request = requests[index]
            self._note(request, now)
            cost = request.num_pending
            admitted.append(Admitted(request, leases[index], min(length, cost), cost))
        return admitted

    def launch(self, admitted: Admitted, length: int, builder: StepBuilder) -> None:
        """Allocates pages for the next `length` tokens of an admitted request, and adds its row. If
        `length` is 0, adds no row."""
        request, lease, _, _ = admitted
        self._cache.allocate(lease, self.num_pages(admitted, length))
        builder.admit(_admit(request, lease))
        builder.write_pages(lease.slot, self._cache.page_rows(lease))
        lease.fence = builder.seq
        if length:
            builder.add_row(request, lease, length)

    def waits_for_loads(self, admitted: Sequence[Admitted], builder: StepBuilder) -> bool:
        """Whether requests that were just admitted get no row yet because their pages are being
        loaded. If only a few pages are being loaded, the step waits for them instead."""
        if not any(self._cache.is_loading(new.lease) for new in admitted):
            return False
        assert self._host_loads is not None, "loads without a host tier"
        if self._cache.has_loads or not self._host_loads.is_short(self._cache.num_to_load):
            return True
        self._cache.load_now(builder.seq)
        return False

    def num_pages(self, admitted: Admitted, length: int) -> int:
        """Number of pages (blocks, with sliding-window layers) that `launch` allocates."""
        request, lease, _, _ = admitted
        return -(-(request.num_computed + length) // self._page_size) - len(lease.pages)

    def can_admit(self, level: int) -> bool:
        """Whether there is a free slot, or a running request that a request of `level` may
        preempt."""
        return bool(self._cache.num_free_slots) or self._preemption.is_possible(level)

    def cost(self, request: Request) -> int:
        """Number of uncached tokens of a waiting request. It is looked up again every
        COUNTED_ROUNDS rounds, except while the request waits for another one to compute a shared
        prefix."""
        if self._deduplication.still_waits(request):
            return request.queue_entry.num_uncached
        age = self.num_rounds - request.queue_entry.uncached_round
        if request.queue_entry.uncached_round < 0 or age >= COUNTED_ROUNDS:
            self._count(request, self._match(request))
        return request.queue_entry.num_uncached

    def _begin_round(self) -> None:
        state = self._state
        self.num_rounds += 1
        self._reserve = None
        self._giving_way.clear()
        self._deduplication.begin_round(state.running)
        if state.tenants.is_shared:
            state.tenants.charge_output(state.running)

    def _candidates(
        self, headroom: StepHeadroom, policy: AdmissionPolicy, starves: Request | None
    ) -> tuple[list[Request], list[Item]]:
        """Requests that the round tries to admit, in queue order."""
        options = self.options
        order = ORDERS[options.schedule_policy]
        if order is not None and self._queue.num_requests > order.max_queue:
            order = None
        if order is not None or not policy.stops:
            count = options.prefill_admission_lookahead
        else:
            count = max(self._cache.num_free_slots, MAX_DISPLACING)
        requests = self._queue.window(count)
        if order is not None:
            requests = [requests[index] for index in order.order(list(map(self._item, requests)))]
        if not policy.stops and self._is_shared(requests):
            waiting = list(map(self._item, requests))
            turns = policy.in_turn(waiting, [request.tenant for request in requests])
            requests = [requests[index] for index in turns]
        if starves is not None:
            requests = [starves, *(request for request in requests if request is not starves)]
        items: list[Item] = []
        left = headroom.tokens
        for request in requests:
            items.append(self._item(request))
            if not self._deduplication.is_being_computed(request):
                left -= min(items[-1].cost, headroom.max_each)
            if policy.stops and left <= 0:
                break  # later ones would get no tokens
        return requests, items

    def _item(self, request: Request) -> Item:
        return Item(self.cost(request), _rank(request), len(request.token_ids))

    def _is_shared(self, requests: Sequence[Request]) -> bool:
        """Whether `requests` belong to more than one tenant."""
        return self._state.tenants.is_shared and any(
            r.tenant != requests[0].tenant for r in requests
        )

    def _count(self, request: Request, match: Match) -> None:
        request.queue_entry.num_uncached = (
            request.num_to_compute - match.num_pages * self._page_size
        )
        request.queue_entry.uncached_round = self.num_rounds

    def _match(self, request: Request) -> Match:
        """The cached prefix that a request will reuse."""
        if request.needs_prompt_logprobs:
            return Match(None, [], 0)
        # A running block is always computed, and may contain no known token.
        num_left = 1 if request.block_size == 1 else 0
        match = self._cache.match(request.token_ids, request.cache_salt, num_left=num_left)
        if not match.num_host or self._host_loads is None or self._host_loads.pays(match):
            return match
        return self._cache.match(
            *(request.token_ids, request.cache_salt), num_left=num_left, with_host=False
        )

    def _placement(self, request: Request, only_preempting: bool) -> _Placement:
        """Decides whether a request is admitted to free slots and pages, admitted by preempting
        less urgent requests, or not admitted."""
        match = self._match(request)
        num_missing = self._num_missing(request, match)
        if not only_preempting and num_missing <= 0 and self._cache.num_free_slots:
            return _Placement(Outcome.ENTERED, match)
        victims = self._preemption.victims(request, num_missing, self._giving_way)
        if not victims:
            return _Placement(Outcome.NO_CAPACITY, match)
        if all(map(self._lifecycle.is_idle, victims)):
            return _Placement(Outcome.ENTERED, match, victims)
        return _Placement(Outcome.PREEMPTING, match, victims)

    def _take(self, request: Request, placement: _Placement) -> tuple[Outcome, Lease | None]:
        """Carries out a placement: preempts the victims and moves the request to the
        running set."""
        self._giving_way.update(victim.request_id for victim in placement.victims)
        if placement.outcome is not Outcome.ENTERED:
            for victim in placement.victims:
                self._lifecycle.defer_preemption(victim)
            return placement.outcome, None
        match = placement.match
        if placement.victims:
            for victim in placement.victims:
                self._lifecycle.preempt(victim)
            # Cached pages held by victims are unlocked and may be evicted.
            self._reserve = None
            match = self._match(request)
            if self._num_missing(request, match) > 0:
                return Outcome.NO_CAPACITY, None
        return Outcome.ENTERED, self._start(request, match)

    def _num_missing(self, request: Request, match: Match) -> int:
        """Number of pages missing to admit a request and keep the reserve; 0 or less if it fits."""
        if self._reserve is None:
            self._reserve = sum(map(self._num_still_needed, self._state.running))
        num_tokens = request.num_to_compute
        if not request.is_pooled:
            num_tokens = max(num_tokens, len(request.token_ids) + 1)
        needed = self._cache.num_needed(num_tokens, match)
        return needed + self._reserve - (self._cache.num_available - match.num_unlocked)

    def _start(self, request: Request, match: Match) -> Lease:
        self._count(request, match)
        if self._host_loads is not None:
            self._host_loads.note_hit(match)
            if request.preemption.count:
                self._host_loads.note_resumed(request, match)
        lease = self._lifecycle.start(request, match)
        if self._reserve is not None:
            self._reserve += self._num_still_needed(request)
        return lease

    def _num_still_needed(self, request: Request) -> int:
        return num_still_needed(request, self._page_size, self._cache)

    def _note(self, request: Request, now: float) -> None:
        if request.times.admitted_s < 0.0:
            request.times.admitted_s = now
        self._state.drain.note(len(request.token_ids))
        if not request.preemption.count:
            self._state.tenants.charge_prompt(request, request.queue_entry.num_uncached)


def _rank(request: Request) -> int:
    """Sort key of a waiting request, highest first: its level, then whether it was preempted."""
    return LEVEL * request.level + (request.state is RequestState.PREEMPTED)


def _admit(request: Request, lease: Lease) -> Admit:
    sampling = request.sampling
    greedy = sampling.temperature == 0.0
    return Admit(
        slot=lease.slot,
        token_ids=request.token_ids.tobytes(),
        temperature=sampling.temperature,
        top_k=0 if greedy else max(sampling.top_k, 0),
        top_p=1.0 if greedy else sampling.top_p,
        min_p=0.0 if greedy else sampling.min_p,
        seed=_signed(request.seed),
        logits_params=logits_params(request),
        block=None if request.block_size == 1 else _block_admit(request),
        # With `min_tokens`, an EOS token may not end the request.
        end_token_ids=[] if sampling.min_tokens else sorted(request.end_token_ids),
        pooling=sampling.pooling,
        adapter=0 if request.adapter is None else request.adapter.slot,
        second_text=request.second_text,
    )


def _block_admit(request: Request) -> BlockAdmit:
    return BlockAdmit(
        params=request.sampling.diffusion,
        end_token_ids=sorted(request.end_token_ids),
        limit=request.limit,
        state=request.blocks.state,
    )


def _signed(seed: int | None) -> int:
    """The seed as a signed 64-bit integer. The gateway sets a seed for every request
    that samples."""
    value = (seed or 0) & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value
