"""One completion under way, from its prompt to its last character."""

from __future__ import annotations

from typing import Protocol

from router.channel import WorkerChannel
from router.fleet import Choice
from router.serving.completion_times import CompletionSpec, CompletionTimes
from router.serving.mailbox import Mailbox
from worker.wire.detokenizer import RequestText
from worker.wire.messages import FinishReason, Rejection, Submit, TokenDelta, TokenLogprobs
from worker.wire.slo import SloOutcome

TOKEN_BYTES = 64
"""An id in a list, and its text."""
LOGPROBS_BYTES = 160
LOGPROB_BYTES = 8
"""Four bytes of an id and four of a float; CPython's heads of the two, of their struct and of a
rank, and its place in a list, are the 160 of a token."""


class CompletionOwner(Protocol):
    """Is notified of what becomes of a completion."""

    def begun(self, completion: Completion) -> None:
        """A worker's reports show a token of it for the first time, in each attempt."""
        ...

    def lost(self, completion: Completion, reason: str) -> None:
        """Its worker is gone: the owner has it continue elsewhere, or ends it."""
        ...

    def ended(self, completion: Completion) -> None:
        """Called once when it has ended, in whatever way."""
        ...


class Completion:
    """A channel's receiver: turns token deltas into text that the response takes.

    It owns everything another worker needs to continue: the prompt and the tokens so far. What it
    tells the client is the same as if one worker had done all of it.

    Args:
        spec: what is asked for.
        text: fresh detokenizer and stop strings.
        mailbox: of the response; gets this completion whenever it has news.
        stream: whether tokens are news, or only the end.
        times: fresh, from the request's arrival on.
        owner: notified of its first tokens, losses and end.
    """

    __slots__ = (
        "_awaited",
        "_channel",
        "_dirty",
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
        "logprobs",
        "num_cached_tokens",
        "num_forwards",
        "num_losses",
        "num_rounds",
        "num_suspected",
        "num_taken",
        "prompt",
        "prompt_logprobs",
        "rejection",
        "slo",
        "spec",
        "stop_reason",
        "times",
        "token_ids",
        "worker_id",
    )

    def __init__(
        self,
        spec: CompletionSpec,
        *,
        text: RequestText,
        mailbox: Mailbox[Completion],
        stream: bool,
        times: CompletionTimes,
        owner: CompletionOwner,
    ) -> None:
        self.spec = spec
        self.times = times
        self.attempt = 0
        self.num_losses = 0
        """Workers that were lost with it."""
        self.num_suspected = 0
        """Losses of which it may be the reason: the worker had brought no token of that attempt."""
        self.prompt = spec.prompt
        """Prompt of the next attempt: the prompt, and the tokens so far."""
        self.worker_id = ""
        self.choice: Choice | None = None
        """The decision that led to its first token, or the last one where there is none yet."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.num_rounds = 0
        self.num_forwards = 0
        self.draft: list[int] | None = None
        """How the running block stands, -1 where undecided, until a response has taken it; of
        streams that ask for it."""
        self.logprobs: list[TokenLogprobs] = []
        """One per token where asked for, else empty."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.rejection: Rejection | None = None
        """Refusal by a worker whose queue is full, while no other has taken it; or by one for which
        the request contradicts itself."""
        self.slo: SloOutcome | None = None
        """Whether the times it was asked for were met; None before the end, and where none were."""
        self._text = text
        self._mailbox = mailbox
        self._stream = stream
        self._owner = owner
        self._channel: WorkerChannel | None = None
        self._new_text: list[str] = []
        self.num_taken = 0
        """Tokens that `take` has returned."""
        self._logprobs_taken = 0
        self._dirty = False
        self._awaited = True
        """Whether this attempt has brought no token yet."""
        self._earlier_rounds = 0
        """Rounds of lost attempts; so are the forwards."""
        self._earlier_forwards = 0

    @property
    def family(self) -> str:
        """How the ids of all completions of its client's request begin."""
        return self.spec.request_id.rpartition(".")[0] + "."

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def num_unread_bytes(self) -> int:
        """Memory of what no response has taken, within a factor of two."""
        num_unread = len(self.token_ids) - self.num_taken
        if not num_unread or not self.logprobs:
            return num_unread * TOKEN_BYTES
        num_likeliest = len(self.logprobs[-1].packed_ids) // 4
        return num_unread * (TOKEN_BYTES + LOGPROBS_BYTES + num_likeliest * LOGPROB_BYTES)

    def submit_to(self, channel: WorkerChannel, now: float) -> Submit:
        """Binds the completion to a worker; the message to send there, at time `now`."""
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
        )

    def begin_again(self) -> None:
        """The next attempt continues from here: what is still on its way counts no more."""
        self.attempt += 1
        self.prompt = self.spec.prompt.followed_by(self.token_ids)
        self._awaited = True
        self._earlier_rounds, self._earlier_forwards = self.num_rounds, self.num_forwards

    def deliver(self, delta: TokenDelta, now: float) -> None:
        """Takes one step's tokens."""
        if self.finish_reason is not None:
            return
        if delta.num_cached_tokens >= 0 and not self.token_ids:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.num_forwards:
            self.num_rounds = self._earlier_rounds + delta.num_rounds
            self.num_forwards = self._earlier_forwards + delta.num_forwards
        self.draft = delta.draft
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.token_ids:
            self._take_tokens(delta, now)
        if self._text.stop_reason is not None:
            self.stop_reason = self._text.stop_reason
            self._abort_worker()
            self._end("stop", now)
        elif delta.finish_reason is not None:
            self._new_text.append(self._text.flush())
            self.stop_reason = delta.stop_reason
            if delta.finish_reason == "error":
                self.error = delta.error or "the worker gave up the request"
                self.rejection = delta.rejection
                if delta.rejection is not None and delta.rejection.status == 429:
                    self.times.refused()
            self._end(delta.finish_reason, now)
        if self._stream or self.finish_reason is not None:
            self._notify()

    def lose(self, reason: str) -> None:
        """The worker is gone; the completion can continue elsewhere."""
        if self.finish_reason is None:
            self.num_losses += 1
            self.num_suspected += self._awaited
            self._owner.lost(self, reason)

    def fail(self, message: str) -> None:
        """Ends with an error that the client sees."""
        if self.finish_reason is None:
            self.error = message
            self._end("error", self.times.last_token_at)
            self._notify()

    def abort(self) -> None:
        """Ends at the client's wish; the worker is notified at once."""
        if self.finish_reason is None:
            self._abort_worker()
            self._end("abort", self.times.last_token_at)
            self._notify()

    def take(self) -> tuple[str, list[int]]:
        """Text and token ids since the last call."""
        self._dirty = False
        text = self._new_text[0] if len(self._new_text) == 1 else "".join(self._new_text)
        self._new_text.clear()
        token_ids = self.token_ids[self.num_taken :]
        self.num_taken += len(token_ids)
        return text, token_ids

    def take_draft(self) -> list[int] | None:
        """How the running block stands, if that is news."""
        draft, self.draft = self.draft, None
        return draft

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities since the last call, of tokens that `take` has returned."""
        start, self._logprobs_taken = self._logprobs_taken, self.num_taken
        return self.logprobs[start : self.num_taken]

    def _notify(self) -> None:
        if not self._dirty:
            self._dirty = True
            self._mailbox.put(self)

    def _take_tokens(self, delta: TokenDelta, now: float) -> None:
        before, token_ids = self._text.num_tokens, delta.token_ids
        text = self._text.push(token_ids, stopped=delta.ends_with_stop_token)
        if text:
            self._new_text.append(text)
        num_new = self._text.num_tokens - before
        self.token_ids += token_ids if num_new == len(token_ids) else token_ids[:num_new]
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs[:num_new]
        self.times.took_tokens(num_new, now, delta.times)
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
