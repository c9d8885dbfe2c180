"""The gateway's span of a completion request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from worker.wire.tracing import Tracing, fail, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from router.serving import Generation


class RequestSpan:
    """From a request's arrival to its last byte, by OpenTelemetry's names for generative AI."""

    def __init__(self, span: Span) -> None:
        self.traceparent = traceparent_of(span)
        """For the worker, and for the client's own records."""
        self._span = span

    @staticmethod
    def begin(
        tracing: Tracing, traceparent: str, *, path: str, model: str, elapsed_s: float
    ) -> RequestSpan | None:
        """The span of a request; None where its trace is not kept.

        Args:
            tracing: makes spans.
            traceparent: the client's, or empty.
            path: of the request.
            model: that it names.
            elapsed_s: since it arrived.
        """
        operation = "chat" if path.endswith("/chat/completions") else "text_completion"
        span = tracing.start(
            f"{operation} {model}",
            traceparent,
            start_ns=time.time_ns() - int(elapsed_s * 1e9),
            server=True,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "rayfleet",
                "gen_ai.request.model": model,
                "http.request.method": "POST",
                "url.path": path,
            },
        )
        return None if span is None else RequestSpan(span)

    def end(self, generation: Generation, problem: str | None) -> None:
        """The response has ended, by an error where there is a `problem`."""
        span, completions = self._span, generation.completions
        span.set_attribute("gen_ai.usage.input_tokens", generation.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", generation.num_completion_tokens)
        reasons = [completion.finish_reason or "abort" for completion in completions]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("rayfleet.worker_id", generation.workers)
        span.set_attribute("rayfleet.cached_tokens", generation.num_cached_tokens)
        span.set_attribute("rayfleet.attempts", 1 + max(c.attempt for c in completions))
        if completions[0].first_token_s >= 0.0:
            first_s = completions[0].first_token_s
            span.set_attribute("rayfleet.time_to_first_token_s", first_s)
        if problem is not None:
            fail(span, problem)
        span.end()
