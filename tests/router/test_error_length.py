"""Errors quote no more than a bit of what clients send, however long it is."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.protocol import ChatRequest, CompletionRequest
from router.api.responses.protocol import ResponsesRequest
from tests.support.router.rig import Rig

HUGE = "x" * 100_000
MAX_ERROR_BYTES = 2048
BODIES: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, ChatRequest),
    "/v1/completions": ({"prompt": "hi"}, CompletionRequest),
    "/v1/responses": ({"input": "hi"}, ResponsesRequest),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
        ChatRequest,
    ),
}
CASES = [
    (path, name)
    for path, (_, kind) in BODIES.items()
    for name in (*kind.__struct_fields__, HUGE, "system", "metadata", "thinking")
]


@pytest.mark.parametrize("path", BODIES)
async def test_a_huge_value_in_any_field_makes_no_huge_error(rig: Rig, path: str) -> None:
    await rig.start()
    num_errors = 0
    for name in dict.fromkeys(name for of, name in CASES if of == path):
        for value in (HUGE, [HUGE], {HUGE: HUGE}, {"type": HUGE}, [{"type": HUGE, "role": HUGE}]):
            body = {"model": "stub", **BODIES[path][0], name: value}
            response = await rig.client.post(path, json=body)
            if response.status_code != 200:
                num_errors += 1
                assert len(response.content) <= MAX_ERROR_BYTES, (name[:40], response.text[:80])
    assert num_errors > 10


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/{HUGE}"),
        ("GET", f"/v1/models/{HUGE}"),
        ("GET", f"/v1/responses/{HUGE}"),
        ("GET", f"/v1/responses/resp_0?starting_after={HUGE}&stream=true"),
        ("DELETE", f"/v1/responses/{HUGE}"),
    ],
    ids=["route", "model", "response", "query", "delete"],
)
async def test_a_huge_path_makes_no_huge_error(rig: Rig, method: str, path: str) -> None:
    await rig.start()
    # Beyond 64 KiB the client itself refuses a URL.
    response = await rig.client.request(method, path.replace(HUGE, "y" * 60_000))
    assert response.status_code >= 400
    assert len(response.content) <= MAX_ERROR_BYTES
