"""Moves requests from the queue into the running set while slots, pages and tokens last."""

from __future__ import annotations

from worker.cache.lease import Lease
from worker.cache.manager import CacheManager
from worker.cache.radix import Match
from worker.request import Request, RequestState
from worker.scheduler.budget import StepBudget
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Admit
from worker.scheduler.queue import FcfsQueue
from worker.scheduler.rules import token_rules
from worker.scheduler.running import RunningSet
from worker.scheduler.step import StepBuilder


def admit_waiting(
    config: SchedulerConfig,
    queue: FcfsQueue,
    running: RunningSet,
    cache: CacheManager,
    builder: StepBuilder,
    budget: StepBudget,
) -> None:
    """Admits from the head of the queue until one does not fit.

    One fits if pages for all its known tokens are available beside what the running set will need
    next (see `_still_needed`), so that nobody is taken back for a request just admitted. With
    nothing running that reserve is empty, and whatever passed the front's check fits.
    """
    reserve: int | None = None
    while cache.num_free_slots and budget.has_room_for_new:
        request = queue.peek()
        if request is None:
            return
        if reserve is None:
            reserve = sum(_still_needed(member, config.page_size) for member in running)
        match = _match(request, cache)
        num_tokens = len(request.token_ids) + 1
        needed = -(-num_tokens // config.page_size) - len(match.pages)
        if needed + reserve > cache.num_available - match.num_unlocked:
            return
        queue.remove(request)
        length = budget.grant_new(num_tokens - 1 - len(match.pages) * config.page_size)
        budget.spend_new(length)
        lease = _enter(request, match, length, cache, config.page_size)
        running.add(request)
        builder.admit(_admit(request, lease))
        builder.write_pages(lease.slot, 0, list(lease.pages))
        builder.add_row(request, lease, length)
        reserve += _still_needed(request, config.page_size)


def _match(request: Request, cache: CacheManager) -> Match:
    """The cached prefix that a request need not compute."""
    if request.wants_prompt_logprobs:
        return Match(None, [], 0)
    return cache.match(request.token_ids, request.cache_salt)


def _enter(
    request: Request, match: Match, length: int, cache: CacheManager, page_size: int
) -> Lease:
    """Gives a request its slot and the pages of its first chunk."""
    wants_all = request.wants_prompt_logprobs
    lease = cache.open(match, request.cache_salt, shared=not wants_all)
    request.move_to(RequestState.RUNNING)
    request.lease = lease
    request.num_computed = len(match.pages) * page_size
    request.num_prefill = len(request.token_ids)
    if request.num_cached < 0:
        request.num_cached = request.num_computed
    if wants_all:
        request.prompt_logprobs = []  # of an interrupted prefill, what came of it counts no more
    cache.extend(lease, -(-length // page_size))
    return lease


def _still_needed(request: Request, page_size: int) -> int:
    """Pages a running request will take to compute all its known tokens and a page beyond."""
    assert request.lease is not None
    num_tokens = min(request.limit, len(request.token_ids) + page_size)
    return max(0, -(-num_tokens // page_size) - len(request.lease.pages))


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
        seed=_signed(sampling.seed),
        rules=token_rules(request),
    )


def _signed(seed: int | None) -> int:
    """A seed as signed 64-bit; the front draws one for every request that samples."""
    value = (seed or 0) & (2**64 - 1)
    return value - 2**64 if value >= 2**63 else value
