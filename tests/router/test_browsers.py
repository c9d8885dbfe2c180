"""Requests of browsers for pages of other sites are rejected; other clients are unaffected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.config import EndpointConfig, known_hosts
from router.api.http.browsers import MAX_SHOWN
from router.config import AccessConfig

BODY = json.dumps({"prompt": "hi", "max_tokens": 1})
ROUTES = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/ping"),
    ("POST", "/admin/admission"),
)
FOREIGN = (
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "https://evil.example"},
    {"origin": "http://gateway.evil.example"},
    {"origin": "http://gateway:1"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://gateway:81", "sec-fetch-site": "same-site"},
)
"""Headers of requests for pages of origins other than `http://gateway`."""
OWN: tuple[dict[str, str], ...] = (
    {},
    {"origin": "http://gateway"},
    {"origin": "http://gateway", "sec-fetch-site": "same-origin"},
    {"origin": "https://llm.example", "sec-fetch-site": "same-origin"},  # a proxy rewrote Host
    {"sec-fetch-site": "none"},
)
"""Headers of requests by the server's own page and by clients that are not browsers."""


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_pages_of_other_origins_change_nothing(rig: Any, headers: dict[str, str]) -> None:
    await rig.start(admin_api_key="admin")
    for method, path in ROUTES:
        response = await rig.client.request(method, path, content=BODY, headers=headers)
        assert response.status_code == 403, (path, response.text)
        assert "--allowed-origins" in response.json()["error"]["message"]
    assert not rig.submits()
    assert (await rig.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", OWN, ids=str)
async def test_own_page_and_other_clients_may_omit_the_content_type(
    rig: Any, headers: dict[str, str]
) -> None:
    await rig.start()
    response = await rig.client.post("/v1/completions", content=BODY, headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("allowed", ["*", "https://evil.example", "chrome-extension://abc"])
async def test_allowed_origins_may_send_requests(rig: Any, allowed: str) -> None:
    await rig.start(allowed_origins=(allowed,))
    origin = "https://evil.example" if allowed == "*" else allowed
    headers = {"origin": origin, "sec-fetch-site": "cross-site"}
    response = await rig.client.post("/v1/completions", content=BODY, headers=headers)
    assert response.status_code == 200, response.text


LOOPBACK = known_hosts(EndpointConfig(access=AccessConfig(allowed_hosts=("llm.example",))))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.0.7", 200),
        ("llm.example:443", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("x" * 60_000, 403),
    ],
)
async def test_on_loopback_only_known_hosts_are_answered(rig: Any, host: str, status: int) -> None:
    await rig.start(known_hosts=LOOPBACK)
    for path in ("/", "/health", "/v1/models"):
        response = await rig.client.get(path, headers={"host": host})
        assert response.status_code == status, response.text
        if status == 403:
            assert "--allowed-hosts" in response.text
            assert len(response.text) < MAX_SHOWN + 200


@pytest.mark.parametrize(
    ("endpoint", "hosts"),
    [
        (EndpointConfig(), ("localhost", "127.0.0.1")),
        (EndpointConfig(host="0.0.0.0"), ()),
        (EndpointConfig(host="llm.example"), ()),
        (
            EndpointConfig(host="0.0.0.0", access=AccessConfig(allowed_hosts=("a.example",))),
            ("localhost", "0.0.0.0", "a.example"),
        ),
        (
            EndpointConfig(access=AccessConfig(allowed_hosts=("*",))),
            ("localhost", "127.0.0.1", "*"),
        ),
    ],
)
def test_known_hosts_of_an_endpoint(endpoint: EndpointConfig, hosts: tuple[str, ...]) -> None:
    assert known_hosts(endpoint) == hosts


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", ""])
def test_allowed_hosts_are_names(name: str) -> None:
    with pytest.raises(ValueError, match="--allowed-hosts"):
        AccessConfig(allowed_hosts=(name,))
