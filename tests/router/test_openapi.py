"""The OpenAPI document matches the routes."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from router.api.anthropic.protocol import COUNTED, KNOWN, CountTokensRequest, MessagesRequest
from router.api.openai.fields import IGNORED
from router.api.openai.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from router.api.responses.protocol import KNOWN as RESPONSES
from router.api.responses.protocol import ResponsesRequest

UNDOCUMENTED = {
    *("/metrics", "/openapi.json", "/admin/admission", "/admin/lora_adapters", "/", "/ui/{name}"),
}
"""Not JSON, the document itself, not for clients, and the page."""


async def document_of(rig: Any) -> dict[str, Any]:
    await rig.start()
    response = await rig.client.get("/openapi.json")
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


async def test_every_route_is_in_it(rig: Any) -> None:
    document = await document_of(rig)
    routes = {
        route.path.replace(":path", "") for route in rig.app.routes if isinstance(route, Route)
    }
    assert set(document["paths"]) == routes - UNDOCUMENTED
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references == set(document["components"]["schemas"])


async def test_every_field_is_in_it(rig: Any) -> None:
    schemas = (await document_of(rig))["components"]["schemas"]
    for kind, others in (
        (ChatRequest, IGNORED),
        (CompletionRequest, IGNORED),
        (MessagesRequest, KNOWN.ignored),
        (CountTokensRequest, COUNTED.ignored),
        (ResponsesRequest, RESPONSES.ignored),
        (TokenizeRequest, ()),
    ):
        assert set(schemas[kind.__name__]["properties"]) == {*kind.__struct_fields__, *others}


async def test_streams_have_no_schema(rig: Any) -> None:
    paths = (await document_of(rig))["paths"].values()
    answers = [
        operation["responses"]["200"]["content"] for path in paths for operation in path.values()
    ]
    streams = [
        content["text/event-stream"] for content in answers if "text/event-stream" in content
    ]
    assert len(streams) >= 4
    # The reader limits would count each event, which is an object, with its data.
    assert not any("schema" in stream for stream in streams)


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("ChatRequest", {"messages": [{"role": "user", "content": "x"}], "store": True}, 200),
        ("ChatRequest", {"messages": [], "stop": ["a", "b"], "n": 2, "seed": None}, 400),
        ("ChatRequest", {"messages": "x"}, None),
        ("ChatRequest", {"messages": [], "n": 1000}, None),
        ("ChatRequest", {"messages": [], "temperatures": 1}, None),
        ("CompletionRequest", {"prompt": "x", "logit_bias": {"5": 1.5}, "max_tokens": 3}, 200),
        ("CompletionRequest", {}, None),
        ("MessagesRequest", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}, 200),
        ("MessagesRequest", {"messages": []}, None),
        ("CountTokensRequest", {"messages": [], "thinking": {"type": "adaptive"}}, 400),
        ("CountTokensRequest", {"messages": [], "thinking": {"type": "deep"}}, None),
        ("ResponsesRequest", {"input": "x", "metadata": {"a": "b"}}, 200),
        ("ResponsesRequest", {"input": 3}, None),
        ("TokenizeRequest", {"prompt": "x"}, 200),
        ("TokenizeRequest", {"prompt": 5}, None),
    ],
)
async def test_what_it_refuses_is_refused(
    rig: Any, kind: str, body: dict[str, Any], status: int | None
) -> None:
    """Accepted bodies are compared too: None is the status of rejected ones."""
    document = await document_of(rig)
    schema = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(body) == (status is not None)
    [path] = [p for p, methods in document["paths"].items() if kind in str(methods)]
    response = await rig.client.post(path, json=body)
    assert response.status_code == (status or 400), response.text


async def test_other_methods_are_rejected_with_the_allowed_ones(rig: Any) -> None:
    document = await document_of(rig)
    for path, methods in document["paths"].items():
        response = await rig.client.request("TRACE", path)
        assert response.status_code == 405
        allowed = {method.strip().lower() for method in response.headers["allow"].split(",")}
        assert allowed - {"head"} == set(methods), path


async def test_routes_without_a_key_are_marked(rig: Any) -> None:
    await rig.start(api_keys=("secret",))
    key = {"authorization": "Bearer secret"}
    document = (await rig.client.get("/openapi.json", headers=key)).json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            response = await rig.client.request(method, path)
            security = operation.get("security", document["security"])
            assert (response.status_code in (401, 403)) == bool(security), (method, path)
