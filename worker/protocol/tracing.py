"""Tracing: OpenTelemetry spans with W3C trace context. The library is imported only if tracing is
enabled.

Tracing is enabled by an endpoint in the configuration, or by OpenTelemetry's standard environment
variables OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT. OTEL_TRACES_SAMPLER and
OTEL_TRACES_SAMPLER_ARG configure which traces are sampled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACEPARENT = "traceparent"

Attributes = Mapping[str, str | int | float | bool]


def create_tracing(process: str, endpoint: str = "") -> Tracing | None:
    """Creates the tracing of a process; None if tracing is disabled.

    Args:
        process: name of the process.
        endpoint: URL to which spans are exported (OTLP over HTTP); empty to use the environment
            variables.

    Raises:
        ValueError: tracing is enabled, but its packages are missing.
    """
    if not endpoint and not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(
            f"tracing needs {error.name}, which is not installed: pip install 'rayfleet[tracing]'"
        ) from error
    return Tracing(process, BatchSpanProcessor(OTLPSpanExporter(endpoint or None)))


class Tracing:
    """Creates spans for one process.

    Args:
        process: name of the process.
        processor: exports finished spans.
    """

    def __init__(self, process: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "rayfleet"),
                "service.instance.id": process,
            }
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rayfleet")

    def start(
        self, name: str, parent: str, *, start_ns: int, server: bool, attributes: Attributes
    ) -> Span | None:
        """Starts a span; returns None if its trace is not sampled.

        Args:
            name: name of the span.
            parent: W3C traceparent; any other text starts a new trace.
            start_ns: start time, as Unix time in nanoseconds.
            server: whether the span is the server side of a call from another process.
            attributes: attributes known at the start.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            name,
            context=TraceContextTextMapPropagator().extract({TRACEPARENT: parent}),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            attributes=dict(attributes),
            start_time=start_ns,
        )
        return span if span.is_recording() else None

    def close(self) -> None:
        """Exports all remaining spans."""
        self._provider.shutdown()


def traceparent_of(span: Span) -> str:
    """W3C traceparent of a span, for processes that are called within the span."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier[TRACEPARENT]


def fail(span: Span, problem: str) -> None:
    """Sets a span's status to error, with a message."""
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, problem))
