"""RequestSpan: the gateway's OpenTelemetry span of a completion request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from worker.protocol.tracing import Tracing, fail, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Value = int | float | str | Sequence[str]
"""Type of a span attribute's value."""
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""Operations by path, as in OpenTelemetry's conventions; others are "chat"."""


class RequestSpan:
    """Span of a request from its arrival to its last byte.

    Attributes follow OpenTelemetry's semantic conventions for generative AI.
    """

    def __init__(self, span: Span) -> None:
        self.traceparent = traceparent_of(span)
        """W3C trace context of the span, for the worker and for the client."""
        self._span = span

    @staticmethod
    def begin(
        tracing: Tracing, traceparent: str, *, path: str, model: str, elapsed_s: float
    ) -> RequestSpan | None:
        """Starts the span of a request; None if its trace is not sampled.

        Args:
            tracing: creates spans.
            traceparent: the client's trace context; empty if there is none.
            path: path of the request.
            model: name of the model.
            elapsed_s: seconds since the request arrived.
        """
        operation = _OPERATIONS.get(path, "chat")
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

    def end(self, attributes: Mapping[str, Value], problem: str | None) -> None:
        """Ends the span with additional attributes, and with an error if there is a `problem`."""
        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        if problem is not None:
            fail(self._span, problem)
        self._span.end()
