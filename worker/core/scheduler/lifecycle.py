"""Lifecycle of requests: transitions between waiting, running, held and finished."""

from __future__ import annotations

import logging

from worker.core.cache.lease import Lease, Match
from worker.core.request import Request, RequestState
from worker.core.scheduler.finish import stop_reason
from worker.core.scheduler.state import SchedulerState

logger = logging.getLogger(__name__)


class Lifecycle:
    """Moves requests between sets. The other moves are made by the Scheduler, which queues or holds
    arriving requests, and queues held ones.

        queue ──start──> running ──finish──> ended
          ^ ^              │  │
          │ └── preempt ───┘  └──hold──> held
          └───────── queued again ─────────┘

    The full pages of a preempted or held request stay in the prefix cache until their memory is
    needed, and then in the host-memory tier, if enabled. The request's slot and other pages are
    freed.

    HAZARD(fence): the pages and the slot of a request with a row in flight are freed only after
    that step, so preempting it immediately would free nothing and waste the row. Its preemption is
    therefore deferred: the request is skipped in one step, so that it has nothing in flight in the
    next.
    """

    def __init__(self, state: SchedulerState) -> None:
        self.deferred: dict[str, Request] = {}
        """Requests about to be preempted, by id. They have no rows in the step being built."""
        self._state = state
        self._unguided: list[tuple[str, int]] = []
        """Requests to be returned by `take_unguided`."""

    def start(self, request: Request, match: Match) -> Lease:
        """Moves a waiting request to the running set, with a slot and a lock on its cached pages.

        The caller must check that there is a free slot, and that there are device pages for the
        part of `match` in host memory.
        """
        state = self._state
        state.queue.remove(request)
        scores_prompt = request.needs_prompt_logprobs
        lease = state.cache.open(match, request.cache_salt, shared=not scores_prompt)
        request.move_to(RequestState.RUNNING)
        request.lease = lease
        request.num_computed = match.num_pages * state.config.page_size
        request.num_prefill = len(request.token_ids)
        if request.num_cached < 0:
            request.num_cached = request.num_computed
            state.stats.load.num_prefix_queries += request.num_prefill
            state.stats.load.num_prefix_hits += request.num_cached
        if request.preemption.count:
            request.preemption.resumed_at = len(request.token_ids)
        if scores_prompt and request.delivery.prompt_logprobs is None:
            request.delivery.prompt_logprobs = []
        state.running.add(request)
        return lease

    def is_idle(self, request: Request) -> bool:
        """Whether a running request has no row in a step in flight."""
        assert request.lease is not None
        return self._state.cache.is_idle(request.lease)

    def defer_preemption(self, request: Request) -> None:
        """Skips a running request in the step being built, so that the next one can preempt it."""
        self.deferred[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Moves an idle request from the running set back to the queue."""
        assert not request.num_placeholders, "a step in flight samples a token for it"
        self.requeue(request)
        self._state.stats.load.num_preemptions += 1

    def requeue(self, request: Request) -> None:
        """Moves a request from the running set to the queue, ahead of requests that have
        never run."""
        self._vacate(request)
        self._state.queue.push_back(request, self._state.clock())

    def hold(self, request: Request) -> None:
        """Removes a request from the running set until its slow grammar has advanced by its last
        token.

        Its rows in flight become stale, like those of an aborted request.
        """
        self._leave_adapter(request)
        self._vacate(request)
        self._state.held[request.request_id] = request

    def finish(self, request: Request, ended: RequestState) -> None:
        """Finishes a running request whose last token was sampled, and reports that to its gateway.

        The caller must remove it from the running set (`RunningSet.drop_finished`).
        """
        self.end_request(request, ended, keep_running=True)
        reason = None
        if ended is RequestState.FINISHED_STOPPED:
            reason = stop_reason(request, self._state.config.eos_token_ids)
        self._state.outputs.put(request, reason)

    def end_request(
        self, request: Request, ended: RequestState, *, keep_running: bool = False
    ) -> None:
        """Moves a request from any state to a finished one and frees its resources.

        With `keep_running`, the caller must remove it from the running set.
        """
        state = self._state
        self._leave_adapter(request)
        if state.held.pop(request.request_id, None) is not None:
            pass
        elif request.lease is None:
            state.queue.remove(request)
        else:
            if not keep_running:
                state.running.remove(request)
            state.cache.release(request.lease)
            request.lease = None
        if request.grammar is not None:
            self.note_unguided(request)
        state.tenants.charge_output((request,))
        request.move_to(ended)
        del state.requests[request.request_id]
        logger.debug(
            "%s after %d prompt and %d generated tokens, %.3f s",
            request.finish_reason,
            request.num_prompt,
            request.num_output,
            state.clock() - request.times.arrived_s,
            extra={"request_id": request.request_id},
        )

    def note_unguided(self, request: Request) -> None:
        """Records that a request has ended or needs no more masks, for `take_unguided`."""
        self._unguided.append((request.request_id, request.attempt))

    def take_unguided(self) -> list[tuple[str, int]]:
        """Requests with grammars that have ended or switched to free text since the last call, by
        id and attempt."""
        unguided, self._unguided = self._unguided, []
        return unguided

    def _leave_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            assert self._state.adapters is not None
            self._state.adapters.leave(request, request.lease.fence if request.lease else 0)

    def _vacate(self, request: Request) -> None:
        """Moves a request out of the running set as PREEMPTED; the caller queues or holds it."""
        assert request.lease is not None
        if request.adapter is not None:
            request.adapter.fence = max(request.adapter.fence, request.lease.fence)
        self._state.running.remove(request)
        self._state.cache.release(request.lease)
        request.lease = None
        request.preemption.num_computed = request.num_computed
        request.num_computed = request.num_placeholders = request.num_unverified = 0
        request.num_prefill = len(request.token_ids)
        request.preemption.count += 1
        request.queue_entry.uncached_round = -1
        request.move_to(RequestState.PREEMPTED)
