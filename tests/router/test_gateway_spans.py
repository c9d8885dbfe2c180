"""The gateway's span: context in, context out, and nothing if nothing is traced."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from worker.protocol.tracing import Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KEPT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
DROPPED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@pytest.fixture
def spans(rig) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    rig.tracing = Tracing("gateway", SimpleSpanProcessor(exporter))
    return exporter


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_span_between_client_and_worker(rig, spans, stream):
    await rig.start()
    rig.client.headers.update(KEPT)
    response = await rig.chat("hello", stream=stream)
    [span] = spans.get_finished_spans()
    [submit] = rig.submits()
    assert (span.name, span.kind) == ("chat stub", SpanKind.SERVER)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}" == f"{TRACE}-{SPAN}"
    gateway_context = f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert submit.traceparent == gateway_context
    assert response.headers["traceresponse"] == gateway_context
    assert span.attributes["gen_ai.usage.output_tokens"] == len(rig.script(None))
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["rayfleet.worker_id"] == response.headers["x-rayfleet-worker"]
    length_s = (span.end_time - span.start_time) / 1e9
    assert 0.0 < span.attributes["rayfleet.time_to_first_token_s"] <= length_s
    assert span.status.status_code is StatusCode.UNSET


async def test_without_a_parent_a_trace_begins(rig, spans):
    await rig.start()
    await rig.complete()
    [span] = spans.get_finished_spans()
    assert span.parent is None
    assert span.name == "text_completion stub"
    assert rig.submits()[0].traceparent.startswith(f"00-{span.context.trace_id:032x}-")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}),
    ],
)
async def test_conversations_of_other_apis_are_chats(rig, spans, path, body):
    await rig.start()
    response = await rig.client.post(path, json={"model": "stub", **body})
    assert response.status_code == 200, response.text
    [span] = spans.get_finished_spans()
    assert (span.name, span.attributes["url.path"]) == ("chat stub", path)


async def test_what_the_client_does_not_keep_costs_no_span(rig, spans):
    await rig.start()
    rig.client.headers.update(DROPPED)
    response = await rig.chat("hello")
    assert not spans.get_finished_spans()
    assert rig.submits()[0].traceparent == ""
    assert "traceresponse" not in response.headers


async def test_errors_are_marked(rig, spans):
    await rig.start()
    for worker in rig.workers:
        worker.rejection, worker.rejection_status = "all full", 429
    assert (await rig.chat()).status_code == 429
    [span] = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "all full" in span.status.description


async def test_off_by_default(rig):
    await rig.start()
    rig.client.headers.update(KEPT)
    response = await rig.chat("hello")
    assert rig.submits()[0].traceparent == ""
    assert "traceresponse" not in response.headers
