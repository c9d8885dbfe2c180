"""Completion: one completion from prompt to last character, across worker failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from router.channel import WorkerChannel
from router.fleet import Choice, Visit
from router.serving.completion_times import CompletionSpec, CompletionTimes
from worker.protocol.messages import FinishReason, Rejection, Submit, TokenDelta, TokenLogprobs
from worker.protocol.slo import SloOutcome
from worker.protocol.text.detokenizer import RequestText

TOKEN_BYTES = 64
"""Memory in bytes of a generated token: its id in a list, and its text."""
LOGPROBS_BYTES = 160
"""Memory in bytes of a token's TokenLogprobs without its entries: CPython object headers, and a
list item."""
LOGPROB_BYTES = 8
"""Memory in bytes of one entry of TokenLogprobs: 4 each for an id and a float."""


class CompletionOwner(Protocol):
    """Listener for the first tokens, worker failures and end of a completion."""

    def begun(self, completion: Completion) -> None:
        """Called when the first token of an attempt has arrived from the worker."""
        ...

    def lost(self, completion: Completion, reason: str) -> None:
        """Called when the worker has failed. The owner must resume the completion on another worker
        or fail it."""
        ...

    def ended(self, completion: Completion) -> None:
        """Called once, when the completion has ended for any reason."""
        ...


class Mailbox:
    """Completions of one request with new output, for the task that writes the response.

    The task takes all of them at once, so an engine step wakes it once. A mailbox is cheaper than
    asyncio.Queue; it supports one reader, on the event loop of the workers' channels.
    """

    __slots__ = ("_completions", "_waiter")

    def __init__(self) -> None:
        self._completions: list[Completion] = []
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._completions)

    def put(self, completion: Completion) -> None:
        """Adds a completion and wakes the reader, unless the completion is in the mailbox."""
        if completion.is_in_mailbox:
            return
        completion.is_in_mailbox = True
        self._completions.append(completion)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """Drops all completions."""
        self._completions.clear()

    async def take(self) -> list[Completion]:
        """Waits until there is a completion; returns all of them."""
        if not self._completions:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        completions, self._completions = self._completions, []
        return completions


class Completion:
    """Receiver of a worker channel that converts token deltas to text for the response.

    It holds the state needed to resume on another worker: the prompt and the tokens so far. Clients
    see the same output as if one worker had generated all of it.
    """

    __slots__ = (
        "_awaited",
        "_channel",
        "_earlier_forwards",
        "_earlier_rounds",
        "_logprobs_taken",
        "_mailbox",
        "_new_text",
        "_owner",
        "_stream",
        "_text",
        "attempt",
        "choice",
        "draft",
        "error",
        "finish_reason",
        "is_in_mailbox",
        "logprobs",
        "num_cached_tokens",
        "num_forwards",
        "num_losses",
        "num_rounds",
        "num_suspected",
        "num_taken",
        "pooled",
        "prompt",
        "prompt_logprobs",
        "rejection",
        "slo",
        "spec",
        "stop_reason",
        "times",
        "token_ids",
        "visit",
        "worker_id",
    )

    def __init__(
        self,
        spec: CompletionSpec,
        *,
        text: RequestText,
        mailbox: Mailbox,
        stream: bool,
        times: CompletionTimes,
        owner: CompletionOwner,
    ) -> None:
        self.spec = spec
        self.times = times
        self.attempt = 0
        """Number of the current attempt, starting at 0; deltas of other attempts are ignored."""
        self.num_losses = 0
        """Number of workers that failed while they had the request."""
        self.num_suspected = 0
        """Number of worker failures that the request may have caused: those of attempts in which
        the worker had not sent a token yet."""
        self.prompt = spec.prompt
        """Prompt of the current attempt: the client's prompt and the tokens of earlier attempts."""
        self.worker_id = ""
        """Worker of the last submit; empty before the first."""
        self.visit: Visit | None = None
        """The completion's visit at the SessionGate; None for plain traffic and before it arrives
        there."""
        self.choice: Choice | None = None
        """The routing decision that led to the first token, or the last decision before it."""
        self._begin_output()
        self._text = text
        self._mailbox = mailbox
        self._stream = stream
        self._owner = owner
        self._channel: WorkerChannel | None = None
        self._new_text: list[str] = []
        """Text that `take` has not returned yet."""
        self.num_taken = 0
        """Number of tokens that `take` has returned."""
        self._logprobs_taken = 0
        """Number of tokens whose log-probabilities `take_logprobs` has returned."""
        self.is_in_mailbox = False
        """Whether the completion was put into the mailbox since the last `take`."""
        self._awaited = True
        """Whether this attempt has not produced a token yet."""
        self._earlier_rounds = 0
        """Sum of `num_rounds` over earlier attempts."""
        self._earlier_forwards = 0
        """Sum of `num_forwards` over earlier attempts."""

    def _begin_output(self) -> None:
        """Initializes the output, which grows with each delta."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache of the worker that generated the first token."""
        self.num_rounds = 0
        """Number of forward passes that decided tokens (block diffusion)."""
        self.num_forwards = 0
        """Number of forward passes (block diffusion); 0 for an autoregressive model."""
        self.draft: list[int] | None = None
        """Token ids of the running block (block diffusion), -1 for undecided ones, until the
        response takes it; None if it has not changed or the stream does not request drafts."""
        self.logprobs: list[TokenLogprobs] = []
        """Log-probabilities of each token; empty unless requested."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Log-probabilities of the prompt's tokens; None unless requested."""
        self.pooled = b""
        """Vector of a pooling model, little-endian float32; empty before it is computed."""
        self.rejection: Rejection | None = None
        """The last worker's rejection, if its queue was full and no worker has accepted the request
        since, or if the request's parameters are contradictory; otherwise None."""
        self.slo: SloOutcome | None = None
        """Whether the SLO was met; None before the end, or if there is no SLO."""

    @property
    def family(self) -> str:
        """Prefix of the ids of all completions of the client's request."""
        return self.spec.request_id.rpartition(".")[0] + "."

    @property
    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None

    @property
    def num_unread_bytes(self) -> int:
        """Memory in bytes of tokens that the response has not taken yet, within a factor of two."""
        num_unread = len(self.token_ids) - self.num_taken
        if not num_unread or not self.logprobs:
            return num_unread * TOKEN_BYTES
        num_likeliest = len(self.logprobs[-1].packed_ids) // 4
        return num_unread * (TOKEN_BYTES + LOGPROBS_BYTES + num_likeliest * LOGPROB_BYTES)

    def submit_to(self, channel: WorkerChannel, now: float) -> Submit:
        """Assigns the completion to a worker at time `now`; returns the message to send to it."""
        self._channel = channel
        waited_s = self.times.submitted(now)
        self.worker_id = channel.worker_id
        return Submit(
            request_id=self.spec.request_id,
            gateway_id=self.spec.gateway_id,
            prompt=self.prompt.token_ids,
            sampling=self.spec.sampling,
            seed=self.spec.seed,
            attempt=self.attempt,
            cache_salt=self.spec.prompt.cache_salt,
            priority=self.spec.priority,
            slo=self.spec.slo,
            tenant=self.spec.tenant,
            waited_ms=waited_s * 1e3,
            num_resumed=len(self.token_ids),
            is_resubmitted=self.num_losses > 0,
            traceparent=self.spec.traceparent,
            adapter=self.spec.prompt.adapter,
            second_text=self.spec.prompt.second_text,
        )

    def begin_again(self) -> None:
        """Starts the next attempt, after the tokens so far; later deltas of earlier attempts are
        ignored."""
        self.attempt += 1
        self.prompt = self.spec.prompt.followed_by(self.token_ids)
        self._awaited = True
        if not self.token_ids:
            self.prompt_logprobs = None  # the next worker computes all of them
        self._earlier_rounds, self._earlier_forwards = self.num_rounds, self.num_forwards

    def deliver(self, delta: TokenDelta, now: float) -> None:
        """Handles the delta of one engine step, received at time `now`."""
        if self.finish_reason is not None:
            return
        if delta.num_cached_tokens >= 0 and not self.token_ids:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.num_forwards:
            self.num_rounds = self._earlier_rounds + delta.num_rounds
            self.num_forwards = self._earlier_forwards + delta.num_forwards
        self.draft = delta.draft
        if delta.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = delta.prompt_logprobs
            else:
                self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.token_ids:
            self._take_tokens(delta, now)
        elif delta.pooled is not None:
            self.pooled = delta.pooled
            self.times.took_tokens(0, now, delta.times)
            self._begin()
        if self._text.stop_reason is not None:
            self.stop_reason = self._text.stop_reason
            self._abort_worker()
            self._end("stop", now)
        elif delta.finish_reason is not None:
            self._new_text.append(self._text.flush())
            self.stop_reason = delta.stop_reason
            if delta.finish_reason == "error":
                self.error = delta.error or "the worker aborted the request"
                self.rejection = delta.rejection
                if delta.rejection is not None and delta.rejection.status == 429:
                    self.times.rejected()
            self._end(delta.finish_reason, now)
        is_partial = delta.prompt_logprobs is not None and not delta.token_ids
        if (self._stream and not is_partial) or self.finish_reason is not None:
            self._mailbox.put(self)

    def lose(self, reason: str) -> None:
        """Records that the worker has failed; the owner decides whether the completion is
        resumed."""
        if self.finish_reason is None:
            self.num_losses += 1
            self.num_suspected += self._awaited
            self._owner.lost(self, reason)

    def fail(self, message: str) -> None:
        """Ends the completion with an error that is returned to the client."""
        if self.finish_reason is None:
            self.error = message
            self._end("error", self.times.last_token_at)
            self._mailbox.put(self)

    def abort(self) -> None:
        """Ends the completion after its client has disconnected, and aborts it at the worker."""
        if self.finish_reason is None:
            self._abort_worker()
            self._end("abort", self.times.last_token_at)
            self._mailbox.put(self)

    def take(self) -> tuple[str, list[int]]:
        """The text and token ids that are new since the last call."""
        self.is_in_mailbox = False
        text = self._new_text[0] if len(self._new_text) == 1 else "".join(self._new_text)
        self._new_text.clear()
        token_ids = self.token_ids[self.num_taken :]
        self.num_taken += len(token_ids)
        return text, token_ids

    def offsets(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Text offsets of the tokens that the last `take` returned; empty unless `with_offsets` is
        set."""
        return (self._text.offsets or ())[self.num_taken - len(token_ids) : self.num_taken]

    def take_draft(self) -> list[int] | None:
        """The running block, if it has changed since the last call (see `draft`)."""
        draft, self.draft = self.draft, None
        return draft

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that `take` has returned since the last call of this
        method."""
        start, self._logprobs_taken = self._logprobs_taken, self.num_taken
        return self.logprobs[start : self.num_taken]

    def _take_tokens(self, delta: TokenDelta, now: float) -> None:
        before, token_ids = self._text.num_tokens, delta.token_ids
        stopped = delta.finish_reason is not None and delta.ends_with_stop_token
        text = self._text.push(token_ids, stopped=stopped)
        if text:
            self._new_text.append(text)
        num_new = self._text.num_tokens - before
        self.token_ids += token_ids if num_new == len(token_ids) else token_ids[:num_new]
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs[:num_new]
        self.times.took_tokens(num_new, now, delta.times)
        self._begin()

    def _begin(self) -> None:
        """Records the first output of an attempt."""
        if self._awaited:
            self._awaited = False
            self._owner.begun(self)

    def _abort_worker(self) -> None:
        if self._channel is not None:
            self._channel.abort(self.spec.request_id)

    def _end(self, reason: FinishReason, now: float) -> None:
        self.finish_reason = reason
        self.slo = self.times.ended(reason, now, len(self.token_ids), self.num_cached_tokens)
        self._owner.ended(self)
