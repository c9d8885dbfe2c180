"""Output buffer: token deltas since the last report, by gateway."""

from __future__ import annotations

from worker.core.request import Request, RequestState
from worker.protocol.messages import TokenDelta


class OutputBuffer:
    """Collects token deltas by gateway."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[TokenDelta]] = {}
        """Deltas since the last report, by gateway."""

    def put(
        self,
        request: Request,
        stop_reason: int | None = None,
        draft: list[int] | None = None,
    ) -> None:
        """Adds a delta of a request: unsent tokens, and the finish reason if it has ended.

        The first delta includes the number of cached prompt tokens. Log-probabilities of prompt
        tokens are included in the next delta after their chunk is computed.

        Args:
            stop_reason: stop token that ended the request; None if none did.
            draft: the request's running block, if requested (block diffusion).
        """
        sent = request.delivery
        start = sent.num_sent
        token_ids = request.token_ids[start:].tolist()
        sent.num_sent = start + len(token_ids)
        num_cached = -1
        if not sent.cached_sent:
            sent.cached_sent = True
            num_cached = request.num_cached
        delta = TokenDelta(request.request_id, request.attempt, token_ids)
        delta.num_cached_tokens = num_cached
        if request.state is not RequestState.RUNNING:
            delta.finish_reason, delta.stop_reason = request.finish_reason, stop_reason
            delta.error, delta.rejection = request.error, request.rejection
            delta.ended_by_grammar = request.ended_by_grammar
        if request.block_size > 1:
            blocks = request.blocks
            delta.num_rounds, delta.num_forwards = blocks.num_rounds, blocks.num_forwards
            delta.draft = draft
        if sent.pooled is not None:
            delta.pooled, sent.pooled = sent.pooled, None
            delta.times = request.times.first_token
        if token_ids and not sent.times_sent:
            sent.times_sent = True
            delta.times = request.times.first_token
        if sent.logprobs:
            delta.logprobs, sent.logprobs = sent.logprobs, []
        if sent.prompt_logprobs is not None and (token_ids or sent.prompt_logprobs):
            delta.prompt_logprobs = sent.prompt_logprobs
            sent.prompt_logprobs = None if token_ids else []
        deltas = self.deltas.get(request.gateway_id)
        if deltas is None:
            self.deltas[request.gateway_id] = [delta]
        else:
            deltas.append(delta)
