"""Placer: finds workers for completions, including those whose worker has failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from router.channel import SubmitRejected, WorkerChannel, WorkerUnreachable
from router.config import ModelRoute
from router.errors import ApiError, no_worker, raise_for_problem, rejected
from router.explain import DecisionLog
from router.fleet import BatchWindow, Choice, Fleet, RejectedGrammars
from router.metrics.stats import ModelStats
from router.serving.account import count_choice, decision_line
from router.serving.completion import Completion
from router.serving.entrance import SessionEntrance
from router.serving.isolation import Changes, Isolation
from worker.protocol.limits import Limits
from worker.protocol.messages import EngineInfo

logger = logging.getLogger(__name__)

ATTACH_S = 5.0
"""Seconds that a request waits for workers that are connecting; connecting takes 0.1 s."""
MAX_WAITING = 4096
"""Maximum number of requests waiting for a worker at a time."""
_MAX_RETRIES = 2
"""Maximum number of other workers that are tried when a submit fails."""
FIRST_PAUSE_S = 0.1
"""Seconds between the first two attempts to resume a request; doubled with each attempt."""
LAST_PAUSE_S = 2.0
"""Maximum seconds between attempts to resume a request; a worker that becomes ready ends the
pause early."""


class Placer:
    """Places the completions of one model, waiting for workers if none is available.

    - A new completion waits if a worker is expected: in a rolling update, the last worker may leave
      just after, or even before, the next one joins.
    - A completion whose worker failed is placed on another worker, or on the same one once it is
      back; its client sees a pause. A completion that may have crashed workers is retried alone,
      then failed (see Isolation).

    Args:
        route: configuration of the model.
        fleet: workers of the model.
        channels: channels to the workers, by id.
        stats: counters of decisions, retries and resubmissions.
        rejected_grammars: grammars that workers could not compile.
        log: decision log; None if there is none.
    """

    def __init__(
        self,
        route: ModelRoute,
        fleet: Fleet,
        channels: Mapping[str, WorkerChannel],
        stats: ModelStats,
        rejected_grammars: RejectedGrammars,
        log: DecisionLog | None,
    ) -> None:
        self._route = route
        self._fleet = fleet
        self._channels = channels
        self._stats = stats
        self._rejected_grammars = rejected_grammars
        self._log_file = log
        self._wait_s = route.routing.no_worker_timeout_s
        self._batch_window = BatchWindow(fleet)
        wait_s = route.routing.max_session_wait_s
        self.entrance = SessionEntrance(fleet, wait_s) if wait_s else None
        """Gate at which agent sessions wait for room in the caches; None if it is disabled."""
        self._changes = Changes()
        self._isolation = Isolation(route.routing.max_request_attempts, channels, self._changes)
        self._pending: dict[str, None] = {}
        """Ids of new workers that have not reported yet."""
        self._vacant = route.on_demand
        """Whether there are no workers although some are expected, because the last one has left,
        or because workers are started on demand."""
        self._num_waiting = 0
        """Number of requests waiting for a worker."""
        self._num_ready = 0
        """Number of snapshots so far after which a worker was ready."""
        self._resuming: dict[asyncio.Task[None], None] = {}
        """Tasks that resume completions."""
        self._closed = False

    # Notifications of the model.

    def expect(self, worker_id: str) -> None:
        """Records that a worker has joined, so that its first report is expected."""
        self._pending[worker_id] = None
        self._vacant = False

    def attached(self, worker_id: str) -> None:
        """Records that a worker has attached, and the fleet has its snapshot."""
        self.resolved(worker_id)
        if self._fleet.ready:
            self._num_ready += 1
            self._changes.notify()

    def resolved(self, worker_id: str) -> None:
        """Records that a worker's first report is no longer expected. Idempotent."""
        if self._pending.pop(worker_id, worker_id) is None:
            self._changes.notify()

    def all_left(self) -> None:
        """Records that the set of workers is now empty."""
        self._vacant = True

    def lose_sessions(self, worker_id: str) -> None:
        """Records that a worker has lost its cache, or has left."""
        if self.entrance is not None:
            self.entrance.lost(worker_id)

    def forget(self, worker_id: str) -> None:
        """Records that a worker's channel has ended."""
        self.resolved(worker_id)
        self._isolation.forget(worker_id)

    def close(self) -> None:
        """Fails all completions that wait for a worker, or whose worker fails from now on."""
        self._closed = True
        for task in self._resuming:
            task.cancel()
        self._vacant = False
        self._pending.clear()
        self._changes.notify()
        if self.entrance is not None:
            self.entrance.close()

    # Methods of CompletionOwner.

    def begun(self, completion: Completion) -> None:
        """Releases the reservation of the prompt at the first token."""
        self._release(completion)
        if completion.choice is not None and not completion.attempt:
            error = completion.times.at_worker_s - completion.choice.first_token_s
            self._stats.prediction_error.observe(abs(error))

    def lost(self, completion: Completion, reason: str) -> None:
        """Starts the next attempt of a completion whose worker failed, or fails it."""
        self._release(completion)
        extra = {"request_id": completion.spec.request_id, "worker_id": completion.worker_id}
        if self._closed:
            completion.fail(reason)
        elif (problem := self._isolation.why_given_up(completion, reason)) is not None:
            completion.fail(problem)
        else:
            num_tokens = len(completion.token_ids)
            logger.warning(
                "resuming request on another worker after %d tokens: %s",
                num_tokens,
                reason,
                extra=extra,
            )
            self._stats.resubmissions += 1
            task = asyncio.create_task(self._place_again(completion, reason))
            self._resuming[task] = None
            task.add_done_callback(self._resuming.pop)

    def ended(self, completion: Completion) -> None:
        """Releases the reservation of a finished completion, and logs its decision."""
        self._release(completion)
        if self.entrance is not None:
            self.entrance.ended(completion)
        if self._log_file is not None and (line := decision_line(completion)) is not None:
            self._log_file.decided(line, self._fleet)

    async def ready_info(self) -> EngineInfo:
        """EngineInfo of a ready worker; waits if a worker is expected. Raises ApiError (503)."""
        if not self._fleet.ready:
            self._stats.pending_requests += 1  # starts a worker on demand
            try:
                await self._wait_for_worker()
            finally:
                self._stats.pending_requests -= 1
        info = self._fleet.info
        if info is None:
            self._stats.unplaced += 1
            raise no_worker(self._route.name, "try again shortly")
        return info

    async def place(self, completion: Completion) -> None:
        """Submits the completion to a worker. Raises ApiError if no worker accepts it."""
        stats, num_tokens = self._stats, completion.spec.prompt.num_tokens
        stats.pending_requests += 1
        stats.pending_tokens += num_tokens
        try:
            if self.entrance is not None and not completion.num_losses:
                await self._enter(self.entrance, completion)
            await self._try_workers(completion)
        finally:
            stats.pending_requests -= 1
            stats.pending_tokens -= num_tokens

    async def _enter(self, entrance: SessionEntrance, completion: Completion) -> None:
        """Makes a completion of an agent session wait for room, and records the wait."""
        stats = self._stats
        stats.waiting_sessions += 1
        try:
            await entrance.enter(completion)
        finally:
            stats.waiting_sessions -= 1
        visit = completion.visit
        if visit is not None and visit.admitted and visit.context.counts:
            stats.session_wait.observe(visit.wait_s)

    async def _try_workers(self, completion: Completion) -> None:
        """Submits the completion to a worker, and to others if that fails."""
        tried: list[str] = []
        while not completion.finished:
            problem = await self._try_worker(completion, tried)
            if problem is None:
                return
            self._release(completion)
            extra = {"model": self._route.name, "request_id": completion.spec.request_id}
            worker_id = completion.worker_id
            logger.info("submit to worker %s failed: %s", worker_id, problem, extra=extra)
            if len(tried) > _MAX_RETRIES:
                raise self._nobody(completion, problem)
            self._stats.retries += 1
            completion.begin_again()

    async def _try_worker(self, completion: Completion, tried: list[str]) -> str | None:
        """Submits to the best worker not in `tried`; returns the error, or None on success."""
        spec = completion.spec
        choice = None
        if completion.visit is not None and completion.visit.excluded:
            choice = await self._choose_apart(completion, [*tried, *completion.visit.excluded])
        if choice is None:
            choice = await self._choose_apart(completion, tried)
        if choice is None and await self._wait_for_worker():
            choice = await self._choose_apart(completion, tried)
        if choice is None:
            raise self._nobody(completion)
        if completion.finished:  # its client has disconnected meanwhile
            self._isolation.leave(completion, choice.worker_id)
            self._fleet.release_booking(choice.worker_id, spec.request_id)
            return None
        tried.append(choice.worker_id)
        if not completion.token_ids:
            completion.choice = choice
        channel = self._channels.get(choice.worker_id)
        if channel is None:
            return "the worker was removed"
        submit = completion.submit_to(channel, asyncio.get_running_loop().time())
        submit.num_expected_cached = choice.hit_tokens
        submit.sampled_blocks, submit.shared_block = choice.sampled_blocks, choice.shared_block
        if self.entrance is not None:
            submit.session = self.entrance.placed(completion, choice)
        try:
            await channel.submit(submit, completion)
        except WorkerUnreachable as error:
            if error.had_it:
                completion.lose(str(error))
                return None
            return str(error)
        except SubmitRejected as error:
            if error.rejection.status == 429:
                completion.rejection = error.rejection
            if error.rejection.status == 429 or error.rejection.status >= 500:
                return error.rejection.message
            if completion.num_losses:  # a failed worker had accepted it, so another one may
                return error.rejection.message
            self._release(completion)
            grammar = spec.sampling.structured_outputs
            if error.rejection.is_final and grammar is not None:
                self._rejected_grammars.add(grammar, error.rejection.message)
            param = spec.feasibility.param(error.rejection.param)
            raise rejected(error.rejection, param) from error
        if not completion.finished:  # the last delta may overtake the reply to the submit
            completion.rejection = None
        count_choice(self._stats, completion, choice)
        routed = self._stats.routed
        routed[choice.worker_id] = routed.get(choice.worker_id, 0) + 1
        return None

    async def _choose_apart(self, completion: Completion, tried: list[str]) -> Choice | None:
        """Like `_choose`, but isolates suspects; see Isolation."""
        isolation = self._isolation
        while True:
            num_changes = self._changes.number
            excluded = isolation.excluded(completion)
            choice = await self._choose(completion, [*tried, *excluded])
            if choice is not None:
                if isolation.enter(completion, choice.worker_id):
                    return choice
                self._fleet.release_booking(choice.worker_id, completion.spec.request_id)
            elif not excluded:
                return None
            elif not await isolation.wait(completion, num_changes):
                return await self._choose(completion, tried)

    async def _choose(self, completion: Completion, tried: Sequence[str]) -> Choice | None:
        """Reserves the best worker for the completion; None if no worker is available now.

        Raises ApiError, without a reservation, if no ready worker could ever run it.
        """
        spec, prompt = completion.spec, completion.prompt
        kinds = self._fleet.limits
        num_resumed = len(completion.token_ids)
        problems = {
            kind: problem
            for kind in kinds
            if (problem := spec.feasibility.at(kind, prompt, num_resumed)) is not None
        }
        excluded = tried
        if problems:
            if len(problems) == len(kinds):
                raise_for_problem(next(iter(problems.values())))
            workers = self._fleet.workers
            unfit = [w.worker_id for w in workers if w.info and Limits.of(w.info) in problems]
            excluded = [*tried, *unfit]
        return await self._batch_window.place(spec.request_id, prompt, excluded)

    def _nobody(self, completion: Completion, problem: str = "try again shortly") -> ApiError:
        """The error for a completion that no worker accepts."""
        rejection = completion.rejection
        if rejection is None:
            self._stats.unplaced += 1
            return no_worker(self._route.name, problem)
        completion.times.rejected()
        return rejected(rejection)

    async def wait_for_worker(self) -> None:
        """Waits until a worker is ready, if one is expected; the request counts as pending, so that
        a worker is started on demand."""
        self._stats.pending_requests += 1
        try:
            await self._wait_for_worker()
        finally:
            self._stats.pending_requests -= 1

    async def _wait_for_worker(self) -> bool:
        """Waits until a worker is ready, if one is expected; returns whether one is."""
        if self._num_waiting < MAX_WAITING:
            self._num_waiting += 1
            try:
                await self._changes.wait_until(
                    lambda: self._fleet.ready or not (self._vacant or self._pending),
                    self._wait_s if self._vacant else ATTACH_S,
                )
            finally:
                self._num_waiting -= 1
        return self._fleet.ready

    async def _place_again(self, completion: Completion, reason: str) -> None:
        try:
            problem = await self._try_until_placed(completion)
        except asyncio.CancelledError:
            completion.fail("the gateway is shutting down")
            raise
        except Exception:
            # HAZARD: without an end of the completion its client would wait forever.
            logger.exception(
                "failed to resume request", extra={"request_id": completion.spec.request_id}
            )
            problem = "internal error: the request could not be resumed"
        if problem is not None:
            completion.fail(f"{reason}; then {problem}")

    async def _try_until_placed(self, completion: Completion) -> str | None:
        """Resumes a completion; returns the error, or None if it is running or has ended."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._wait_s
        pause = FIRST_PAUSE_S
        while not completion.finished:
            completion.begin_again()
            try:
                await self.place(completion)
            except ApiError as error:
                left = deadline - clock()
                if error.status < 429 or left <= 0.0:
                    return error.message
            else:
                return None
            await self._wait_for_another(min(pause, left))
            pause = min(2.0 * pause, LAST_PAUSE_S)
        return None

    async def _wait_for_another(self, seconds: float) -> None:
        """Waits until another worker is ready, at most `seconds`."""
        num_ready = self._num_ready
        await self._changes.wait_until(lambda: self._num_ready != num_ready, seconds)

    def _release(self, completion: Completion) -> None:
        self._isolation.leave(completion, completion.worker_id)
        self._fleet.release_booking(completion.worker_id, completion.spec.request_id)
