"""SessionGate: agent sessions wait while caches are full of the contexts of live sessions.

Agents send their whole context with each of their requests, often tens of times. If the contexts of
all sessions exceed the KV cache, each request evicts the prefix of the next one, and every context
is recomputed from the start. The gate admits sessions, the oldest first, when a worker has room for
their contexts, so that admitted sessions run at full speed. Chats and live sessions are never
delayed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import nlargest
from itertools import islice

from router.fleet.blocks import PromptBlocks
from router.fleet.fleet import Choice, Fleet
from router.fleet.idle_share import IdleShare
from router.fleet.session_list import SessionList, listed
from router.fleet.sessions import Context, Sessions
from router.fleet.state import WorkerState
from worker.protocol.blocks import BlockHashes
from worker.protocol.messages import LoadSnapshot
from worker.protocol.working_sets import SessionUse, WorkingSets

CAPACITY = 0.95
"""Fraction of a worker's device pages that live sessions may need. In simulations, turns per
minute were 25 % lower with 0.8, and 29 % lower if pages in host memory were counted."""
PLAIN_TOKENS = 4096
"""Prompt length in tokens below which requests neither wait nor count against the caches. A coding
agent's first prompt, with its instructions and tools, has 5,000 to 20,000 tokens."""
IDLE = 0.25
"""Fraction of idle time, while requests wait at the gate, above which a worker accepts one more
session even if its cache is full, since it has time to recompute evicted pages. Interactive
sessions, with pauses of a minute, fill caches without keeping workers busy."""
EXCEED_S = 10.0
"""Minimum seconds between sessions that are admitted to full caches of idle workers: the prompt
of the first must show up in the workers' reports before the next is admitted."""
_MIN_RETURNS = 0.5
"""Fraction of recent new contexts that must have had a second request for new contexts to count
from their first request; otherwise, they count from their second. Single requests with tools,
which are not an agent's, therefore soon stop counting."""
_END_WEIGHT, _RETURN_WEIGHT = 1 / 32, 1 / 16
"""Weights in the moving average of that fraction: of the end of a context's first request, and of
its second request."""
MAX_WAITING = 4096
"""Maximum number of waiting requests; further ones are not delayed."""


class Visit:
    """An agent's request at the gate. Times are on the fleet's clock."""

    __slots__ = (
        "admitted",
        "arrived_at",
        "closed",
        "context",
        "displaced",
        "excluded",
        "hashes",
        "num_tokens",
        "on_over",
        "order",
        "sets",
        "wait_s",
    )

    def __init__(
        self, context: Context, hashes: BlockHashes, num_tokens: int, now: float, number: int
    ) -> None:
        self.context = context
        self.hashes = hashes
        self.num_tokens = num_tokens
        self.arrived_at = now
        self.order = (context.born, now, number)
        """Sort key: waiting requests are admitted in ascending order."""
        self.admitted = False
        self.closed = False
        """Whether the request has ended, or has left the gate without being accepted by a worker.
        """
        self.wait_s = 0.0
        """Seconds that the request waited at the gate."""
        self.excluded: tuple[str, ...] = ()
        """Workers without room for the request."""
        self.displaced: tuple[int, ...] = ()
        """Keys of the contexts that the request displaced from its worker."""
        self.sets: WorkingSets | None = None
        """Working sets of the worker on which the request is counted; None if it is not counted."""
        self.on_over: Callable[[], None] | None = None
        """Called when the wait ends because the request is admitted or has ended."""


class SessionGate:
    """Admits the requests of agent sessions. Does no I/O; its methods take microseconds.

    A context is live while one of its requests is in flight, and for some time after the last one,
    estimated from its session's gaps (the pauses between requests). Requests of live contexts pass.
    Other requests wait until a worker has room for their context alongside the live ones, but at
    most `max_wait_s`. The oldest session goes first, and is never overtaken by a younger one. A
    request that has waited for `max_wait_s` displaces the contexts that were admitted first on one
    worker; the next requests of these contexts wait. Otherwise, the contexts of many overdue
    requests would exceed the caches. If over 10 % of all gaps exceed MAX_LIVE_S, as in interactive
    sessions, only the first request of a session waits. A sub-agent's request is queued by the age
    of its session; queued by their own age, sub-agents had a third fewer turns per minute in
    simulations. Workers report the live contexts of all gateways, so that several gateways agree.

    Args:
        fleet: the workers.
        clock: the fleet's clock.
        max_wait_s: maximum seconds that a request waits.
    """

    def __init__(self, fleet: Fleet, clock: Callable[[], float], max_wait_s: float) -> None:
        self.sessions = Sessions()
        self._fleet = fleet
        self._clock = clock
        self._max_wait_s = max_wait_s
        self._sets: dict[str, WorkingSets] = {}
        """Contexts of this gateway's live sessions, by worker id."""
        self._others: dict[str, int] = {}
        """Tokens of the live sessions of other gateways, by worker id."""
        self._idle: dict[str, IdleShare] = {}
        """Fraction of the time in which the worker has no requests although some wait at the gate,
        by worker id."""
        self._waiting: list[Visit] = []
        self._first_returns = 1.0
        """Fraction of recent new contexts that had a second request."""
        self._exceeded_at = -EXCEED_S
        """Time at which a session was last admitted to a full worker that was often idle."""
        self._num_visits = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def own_tokens(self) -> dict[str, int]:
        """Tokens of this gateway's live sessions, by worker id."""
        return {worker_id: sets.tokens for worker_id, sets in self._sets.items()}

    def arrive(self, prompt: PromptBlocks) -> Visit | None:
        """Registers a new request; returns None for plain traffic, which the gate neither delays
        nor counts.

        The request waits unless it is `admitted`. The caller must call `placed` when a worker has
        been chosen, and `end` or `leave` at the end.
        """
        is_long, is_agent = prompt.num_tokens >= PLAIN_TOKENS, prompt.has_tools or prompt.session
        if not (is_long or prompt.has_tools):
            return None
        keys = self._fleet.block_keys()
        if not keys:
            return None
        now, hashes = self._clock(), prompt.hashes(keys[0])
        context = self.sessions.find(prompt.session, hashes)
        if context is None:
            context = self.sessions.add(prompt.session, hashes, now)
            context.is_agent = is_long and bool(is_agent)
            counts = context.is_agent and self._first_returns >= _MIN_RETURNS
        else:
            counts = True
            self._returned(context, now)
        context.counts = context.counts or (is_long and counts)
        self.sessions.extend(context, hashes, prompt.num_tokens)
        self._num_visits += 1
        visit = Visit(context, hashes, prompt.num_tokens, now, self._num_visits)
        passes = not context.counts or self._is_inside(context, now)
        if passes or len(self._waiting) >= MAX_WAITING:
            visit.admitted = True
        else:
            insort(self._waiting, visit, key=lambda waiting: waiting.order)
        for dropped in self.sessions.dropped():
            self._forget(dropped)
        return visit

    def admit(self) -> list[Visit]:
        """Admits the waiting requests that may proceed now, in order; returns them."""
        if not self._waiting:
            return []
        now = self._clock()
        self.expire()
        admitted: list[Visit] = []
        is_full = False
        for visit in self._waiting:
            is_overdue = now - visit.arrived_at >= self._max_wait_s
            if not self._is_inside(visit.context, now):
                if not is_overdue:
                    # Without overtaking: the first one without room holds up all others.
                    is_full = is_full or not self._find_room(visit)
                    if is_full:
                        continue
                elif self._max_wait_s and not self._find_room(visit):
                    self._displace(visit)
                visit.context.admitted_at = now
                visit.context.is_displaced = False
            visit.admitted = True
            visit.wait_s = now - visit.arrived_at
            admitted.append(visit)
        self._waiting = [visit for visit in self._waiting if not visit.admitted]
        for visit in admitted:
            if visit.on_over is not None:
                visit.on_over()
        return admitted

    def open(self) -> None:
        """Admits all waiting requests, and all later ones without a wait."""
        self._max_wait_s = 0.0
        self.admit()

    def placed(self, visit: Visit, choice: Choice) -> SessionUse | None:
        """Assigns an admitted request to its worker; returns the data to send to the worker.

        Returns None for requests that do not count. May be called again for another worker.
        """
        context = visit.context
        if visit.closed or not context.counts:
            return None
        if not context.num_turns:
            page = choice.info.page_size
            blocks = min(choice.hit_tokens // page, len(visit.hashes))
            context.shared_tokens = blocks * page
            context.shared_key = visit.hashes.item(blocks - 1) if blocks else 0
        context.num_turns += 1
        return self._count(visit, choice.worker_id)

    def end(self, visit: Visit) -> None:
        """Ends a request: its context stays live for a while. Idempotent."""
        context = visit.context
        if visit.closed or (context.counts and visit.sets is None):
            self.leave(visit)
            return
        visit.closed = True
        if context.is_agent and not context.ended_at:
            self._first_returns *= 1.0 - _END_WEIGHT
        context.ended_at = self._clock()
        live_s = 0.0 if context.is_displaced else self._live_s(context)
        context.live_until = context.ended_at + live_s
        if visit.sets is not None:
            context.num_open -= 1
            visit.sets.end(context.key, context.ended_at)

    def leave(self, visit: Visit) -> None:
        """Removes a request that no worker has accepted. Idempotent."""
        if visit.closed:
            return
        visit.closed = True
        if not visit.admitted:
            self._waiting.remove(visit)
            if visit.on_over is not None:
                visit.on_over()
        if visit.sets is not None:
            visit.context.num_open -= 1
            visit.sets.leave(visit.context.key)

    def reported(self, worker_id: str, load: LoadSnapshot) -> None:
        """Records a worker's load, with the live contexts of all gateways."""
        sets = self._sets.get(worker_id)
        local_tokens = sets.tokens if sets is not None else 0
        if load.session_tokens > local_tokens:
            self._others[worker_id] = load.session_tokens - local_tokens
        else:
            self._others.pop(worker_id, None)
        is_busy = load.num_running or load.num_waiting or load.num_reserved
        is_idle = bool(self._waiting) and not is_busy
        share = self._idle.get(worker_id)
        if share is None:
            share = self._idle[worker_id] = IdleShare(self._clock())
        share.update(is_idle, self._clock())

    def expire(self) -> None:
        """Subtracts contexts that are no longer live from the tokens of their workers."""
        for sets in self._sets.values():
            sets.expire(self._clock())

    def lose(self, worker_id: str) -> None:
        """Records that a worker has lost its cache, or has left."""
        self._sets.pop(worker_id, None)
        self._others.pop(worker_id, None)
        self._idle.pop(worker_id, None)

    def listing(self, limit: int) -> SessionList:
        """The waiting and live contexts, of which at most `limit` are listed. Takes 1.3 ms with
        4,000 live contexts."""
        now = self._clock()
        waiting: dict[int, Visit] = {}
        for visit in self._waiting:
            waiting.setdefault(visit.context.key, visit)
        live = [
            context
            for context in self.sessions
            if context.counts and context.is_live(now) and context.key not in waiting
        ]
        rows = [
            listed(visit.context, "waiting", now - visit.arrived_at, now)
            for visit in islice(waiting.values(), limit)
        ]
        for context in nlargest(limit - len(rows), live, key=lambda context: context.num_tokens):
            if context.num_open:
                rows.append(listed(context, "running", 0.0, now))
            else:
                rows.append(listed(context, "idle", now - context.ended_at, now))
        return SessionList(num_waiting=len(waiting), num_live=len(live), sessions=tuple(rows))

    def check_invariants(self) -> None:
        """Raises AssertionError if sums and queue are inconsistent."""
        self.sessions.check_invariants()
        orders = [visit.order for visit in self._waiting]
        assert orders == sorted(orders)
        assert not any(visit.admitted or visit.closed for visit in self._waiting)
        for sets in self._sets.values():
            sets.check_invariants()

    def _returned(self, context: Context, now: float) -> None:
        """Records the gap before a further request of a context."""
        if context.ended_at and not context.num_open:
            context.session.gaps.add(now - context.ended_at)
            self.sessions.gaps.add(now - context.ended_at)
            if context.is_agent and not context.has_returned:
                self._first_returns += (1.0 - self._first_returns) * _RETURN_WEIGHT
            context.has_returned = True

    def _find_room(self, visit: Visit) -> bool:
        """Assigns the visit to the worker with the most room; returns False if no ready worker has
        enough room."""
        now = self._clock()
        best, most, full = "", 0.0, list[str]()
        may_exceed = now - self._exceeded_at >= EXCEED_S
        for worker in self._fleet.workers:
            if not worker.ready or worker.info is None:
                continue
            room = self._room(visit.context, worker)
            if room < 0.0 and not (may_exceed and self._is_idle(worker.worker_id, now)):
                full.append(worker.worker_id)
            elif not best or room > most:
                best, most = worker.worker_id, room
        if not best:
            return False
        if most < 0.0:
            self._exceeded_at = now
        visit.excluded = tuple(full)
        self._count(visit, best)
        return True

    def _displace(self, visit: Visit) -> None:
        """Assigns an overdue visit to the worker with the most room, displacing the contexts
        admitted first.

        The displaced contexts are no longer live once their requests in flight have ended. Contexts
        of other gateways, and of sessions with long gaps, which wait only once, are not displaced.
        """
        if not self.sessions.gaps.is_mostly_short:
            return
        now, context = self._clock(), visit.context
        ready = [w for w in self._fleet.workers if w.ready and w.worker_id in self._sets]
        rooms = {worker.worker_id: self._room(context, worker) for worker in ready}
        if not rooms:
            return
        best = max(rooms, key=rooms.__getitem__)
        missing, sets = -rooms[best], self._sets[best]
        found = [self.sessions.get(key) for key in sets if key != context.key]
        others = [other for other in found if other is not None]
        for other in sorted(others, key=lambda other: other.admitted_at):
            if missing <= 0.0:
                break
            missing -= sets.drop(other.key)
            other.is_displaced, other.live_until = True, now
            visit.displaced += (other.key,)
        visit.excluded = tuple(w.worker_id for w in self._fleet.workers if w.worker_id != best)
        self._count(visit, best)

    def _is_idle(self, worker_id: str, now: float) -> bool:
        share = self._idle.get(worker_id)
        return share is not None and share.value(now) > IDLE

    def _room(self, context: Context, worker: WorkerState) -> float:
        """Tokens that would be left on a worker with this context added to the live ones; negative
        if the worker has no room for it."""
        assert worker.info is not None, "a ready worker has an engine"
        use, sets = context.use(), self._sets.get(worker.worker_id)
        used = self._others.get(worker.worker_id, 0)
        needed = use.tokens + use.shared_tokens
        if sets is not None:
            used += sets.tokens
            needed = sets.needed(use)
        capacity = CAPACITY * worker.load.num_total_pages * worker.info.page_size
        if not used or not capacity:
            # A worker without live sessions accepts any context that its engine can run.
            return capacity
        return capacity - used - needed

    def _count(self, visit: Visit, worker_id: str) -> SessionUse:
        """Assigns the visit, now in flight, to a worker in place of its previous one; returns the
        data to send to the worker."""
        context = visit.context
        sets = self._sets.get(worker_id)
        if sets is None:
            sets = self._sets[worker_id] = WorkingSets()
        # Without those that were admitted again before the request is retried.
        found = [(key, self.sessions.get(key)) for key in visit.displaced]
        displaced = tuple(key for key, other in found if other is None or other.is_displaced)
        use = context.use(self._live_s(context), displaced)
        sets.begin(use)
        if visit.sets is not None:
            # Also if it is the same: the shared prefix has become known.
            visit.sets.leave(context.key)
        else:
            context.num_open += 1
        visit.sets = sets
        if (share := self._idle.get(worker_id)) is not None:
            share.update(False, self._clock())
        if context.home != worker_id and (home := self._sets.get(context.home)) is not None:
            home.forget(context.key)
        context.home = worker_id
        return use

    def _is_inside(self, context: Context, now: float) -> bool:
        """Whether a context's requests pass: it is live, or it is not new and over 10 % of all gaps
        exceed MAX_LIVE_S."""
        if context.is_live(now):
            return True
        return context.ended_at > 0.0 and not self.sessions.gaps.is_mostly_short

    def _live_s(self, context: Context) -> float:
        return context.session.gaps.live_s(self.sessions.gaps)

    def _forget(self, context: Context) -> None:
        if (sets := self._sets.get(context.home)) is not None:
            sets.forget(context.key)
