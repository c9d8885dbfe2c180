"""Moves requests from the queue into the running set while slots, pages and tokens last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker.core.cache.lease import Lease
from worker.core.cache.manager import CacheManager
from worker.core.cache.match import Match
from worker.core.request import Request, RequestState
from worker.core.scheduler.admission_fifo import Fifo
from worker.core.scheduler.admission_pack import Pack, PackInTurn
from worker.core.scheduler.ageing import Ageing
from worker.core.scheduler.budget import StepBudget
from worker.core.scheduler.displacement import Displacement
from worker.core.scheduler.drain import DrainRate
from worker.core.scheduler.fairness import TenantService
from worker.core.scheduler.ordering import COUNTED_ROUNDS, LEVEL, cheapest_in_turn, lpm_order, rank
from worker.core.scheduler.pages import num_still_needed
from worker.core.scheduler.policy import AdmissionPolicy, Item, Outcome, TokenRoom, run_round
from worker.core.scheduler.queue import WaitingQueue
from worker.core.scheduler.recall import Recall
from worker.core.scheduler.rules import token_rules
from worker.core.scheduler.running import RunningSet
from worker.core.scheduler.siblings import Siblings
from worker.core.scheduler.step import StepBuilder
from worker.plan.plan import Admit, BlockAdmit
from worker.wire.admission import AdmissionOptions

LPM_MAX_QUEUE = 128
"""Where more than so many wait, lpm is fcfs: to order them all would take longer than it gains."""
MAX_DISPLACING = 8
"""Waiting requests that fifo looks at where there is no free slot."""


class Admitted(NamedTuple):
    """A request that has its slot, and the pages for all that it may compute in this step."""

    request: Request
    lease: Lease
    length: int
    """Tokens it computes at least."""
    cost: int
    """Tokens it could compute."""


class Admission:
    """Makes one round per step in which there is room for prompts and somebody waits.

    Who is admitted finds pages for all its known tokens beside what the running set will need next
    (see `num_still_needed`), so that nobody is taken back for a request just admitted. With
    nothing running that reserve is empty, and whatever passed the front's check fits.

    Who does not find place, and is much more urgent than running ones, takes theirs.
    """

    def __init__(
        self,
        options: AdmissionOptions,
        page_size: int,
        cache: CacheManager,
        running: RunningSet,
        queue: WaitingQueue,
        displacement: Displacement,
        service: TenantService,
        drain: DrainRate,
        recall: Recall,
        siblings: Siblings,
    ) -> None:
        self.options = options
        """May be changed between steps."""
        self._page_size = page_size
        self._cache = cache
        self._running = running
        self._queue = queue
        self._displacement = displacement
        self._service = service
        self._drain = drain
        self._recall = recall
        self._siblings = siblings
        self._ageing = Ageing()
        self._num_rounds = 0
        self._reserve: int | None = None
        """Pages that running requests will need; None where it has to be counted anew."""

    @property
    def has_slots(self) -> bool:
        """Whether somebody could enter without taking another's place."""
        return self._cache.num_free_slots > 0

    def round(
        self,
        budget: StepBudget,
        needs: Sequence[int],
        now: float,
        level: int = -1,
        above: int = 0,
    ) -> list[Admitted]:
        """Admits requests; their pages, tables and rows follow with `launch`.

        Args:
            budget: of the step.
            needs: tokens that running prompts as urgent as the elder have still to compute.
            now: the clock.
            level: highest of the running prompts; whom these outrank by the gap waits.
            above: tokens that more urgent running prompts have still to compute.
        """
        options, queue = self.options, self._queue
        elder = queue.elder()
        if elder is None or not self.can_admit(elder.level):
            return []
        room = budget.room(needs, options.prefill_max_batch_size or len(queue), above)
        # An oversize request may go alone though there is no room for one that shares the step.
        if not room.is_open and (needs or above):
            return []
        self._num_rounds += 1
        self._reserve = None
        self._displacement.begin_round()
        self._siblings.begin_round(self._running)
        if self._service.is_shared:
            self._service.charge_output(self._running)
        generation, aged = elder.generation, self._ageing.is_due(elder)
        force = options.prefill_force_fifo_every
        forced = aged or (force > 0 and self._num_rounds % force == 0)
        packs = options.prefill_admission_policy == "pack" and not forced
        requests, items = self._candidates(room, packs, elder if aged else None)
        leases: dict[int, Lease] = {}

        def enter(index: int, only_displacing: bool) -> Outcome:
            request = requests[index]
            if not aged and self._siblings.is_coming(request):
                request.uncached_round = -1
                return Outcome.WAITS
            outcome, lease = self._try_enter(request, only_displacing)
            if lease is not None:
                leases[index] = lease
                self._siblings.add(request)
            return outcome

        policy: AdmissionPolicy = Fifo()
        if packs:
            policy = PackInTurn() if self._is_shared(requests) else Pack()
        drop = self._displacement.gap * LEVEL
        floor = level * LEVEL - drop + 1 if drop else -1
        lengths = run_round(policy, items, room, enter, drop, floor)
        self._ageing.count(elder, generation, [requests[index] for index in leases])
        admitted = []
        for index, length in lengths.items():
            request = requests[index]
            self._note(request, now)
            cost = request.num_pending
            admitted.append(Admitted(request, leases[index], min(length, cost), cost))
        return admitted

    def launch(self, admitted: Admitted, length: int, builder: StepBuilder) -> None:
        """Gives an admitted request the pages of its first `length` tokens, and its row."""
        request, lease, _, _ = admitted
        self._cache.extend(lease, self.num_pages(admitted, length))
        builder.admit(_admit(request, lease))
        builder.write_pages(lease.slot, 0, list(lease.pages))
        builder.add_row(request, lease, length)

    def num_pages(self, admitted: Admitted, length: int) -> int:
        """Pages that `launch` takes."""
        request, lease, _, _ = admitted
        return -(-(request.num_computed + length) // self._page_size) - len(lease.pages)

    def can_admit(self, level: int) -> bool:
        """Whether there is a slot for a request of this level, or somebody who gives way to it."""
        return bool(self._cache.num_free_slots) or self._displacement.is_possible(level)

    def cost(self, request: Request) -> int:
        """Tokens to compute; cached prefixes are looked up again every few rounds only."""
        age = self._num_rounds - request.uncached_round
        if request.uncached_round < 0 or age >= COUNTED_ROUNDS:
            self._count(request, self._match(request))
        return request.num_uncached

    def _candidates(
        self, room: TokenRoom, packs: bool, aged: Request | None
    ) -> tuple[list[Request], list[Item]]:
        """Whom the round looks at, in the order of the queue."""
        options = self.options
        by_prefix = options.schedule_policy == "lpm" and len(self._queue) <= LPM_MAX_QUEUE
        if packs or by_prefix:
            count = options.prefill_admission_lookahead
        else:
            count = max(self._cache.num_free_slots, MAX_DISPLACING)
        requests = self._queue.window(count)
        if by_prefix:
            requests = lpm_order(requests, [self.cost(request) for request in requests])
        if packs and self._is_shared(requests):
            requests = cheapest_in_turn(requests, [self.cost(request) for request in requests])
        if aged is not None:
            requests = [aged, *(request for request in requests if request is not aged)]
        items: list[Item] = []
        left = room.tokens
        for request in requests:
            items.append(Item(self.cost(request), rank(request)))
            if not self._siblings.is_coming(request):
                left -= min(items[-1].cost, room.most)
            if not packs and left <= 0:
                break  # those behind would not get any tokens
        return requests, items

    def _is_shared(self, requests: Sequence[Request]) -> bool:
        """Whether there are several tenants to be fair to among `requests`."""
        return self._service.is_shared and any(r.tenant != requests[0].tenant for r in requests)

    def _count(self, request: Request, match: Match) -> None:
        request.num_uncached = request.num_wanted - match.num_pages * self._page_size
        request.uncached_round = self._num_rounds

    def _match(self, request: Request) -> Match:
        """The cached prefix that a request does not compute."""
        if request.wants_prompt_logprobs:
            return Match(None, [], 0)
        # A running block is computed in any case, and may hold no known token at all.
        num_left = 1 if request.block_size == 1 else 0
        match = self._cache.match(request.token_ids, request.cache_salt, num_left=num_left)
        return self._recall.choose(match)

    def _try_enter(self, request: Request, only_displacing: bool) -> tuple[Outcome, Lease | None]:
        """Finds a slot and pages, or takes them from less urgent requests."""
        match = self._match(request)
        num_missing = self._num_missing(request, match)
        if only_displacing or num_missing > 0 or not self._cache.num_free_slots:
            outcome = self._displacement.make_place(request, num_missing)
            if outcome is not Outcome.ENTERED:
                return outcome, None
            self._reserve = None
            match = self._match(request)
            if self._num_missing(request, match) > 0:
                return Outcome.NO_PLACE, None
        return Outcome.ENTERED, self._enter(request, match)

    def _num_missing(self, request: Request, match: Match) -> int:
        """Pages short of what it needs, beside what running requests will need."""
        if self._reserve is None:
            self._reserve = sum(num_still_needed(r, self._page_size) for r in self._running)
        room = max(request.num_wanted, len(request.token_ids) + 1)
        needed = -(-room // self._page_size) - len(match.pages)
        return needed + self._reserve - (self._cache.num_available - match.num_unlocked)

    def _enter(self, request: Request, match: Match) -> Lease:
        """Moves a request into the running set: with a slot, and a lock on what is cached."""
        self._queue.remove(request)
        self._count(request, match)
        wants_all = request.wants_prompt_logprobs
        lease = self._cache.open(match, request.cache_salt, shared=not wants_all)
        request.move_to(RequestState.RUNNING)
        request.lease = lease
        request.num_computed = match.num_pages * self._page_size
        request.num_prefill = len(request.token_ids)
        if request.num_cached < 0:
            request.num_cached = request.num_computed
        if request.num_preempted:
            request.resumed_at = len(request.token_ids)
            self._recall.note_resumed(request, match)
        if wants_all:
            request.prompt_logprobs = []  # of an interrupted prefill, what came counts no more
        self._running.add(request)
        if self._reserve is not None:
            self._reserve += num_still_needed(request, self._page_size)
        return lease

    def _note(self, request: Request, now: float) -> None:
        if request.admitted_s < 0.0:
            request.admitted_s = now
        self._drain.note(len(request.token_ids), now)
        if not request.num_preempted:
            self._service.charge_prompt(request, request.num_uncached)


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
        rules=token_rules(request),
        block=None if request.block_size == 1 else _block_admit(request),
        # Before `min_tokens` it is not certain.
        end_token_ids=[] if sampling.min_tokens else sorted(request.end_token_ids),
    )


def _block_admit(request: Request) -> BlockAdmit:
    return BlockAdmit(
        params=request.sampling.diffusion,
        end_token_ids=sorted(request.end_token_ids),
        limit=request.limit,
        state=request.block_state,
    )


def _signed(seed: int | None) -> int:
    """A seed as signed 64-bit; the front draws one for every request that samples."""
    value = (seed or 0) & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value
