"""A gateway reads X-Forwarded-For of its fleet's HAProxy and of trusted proxies only."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cluster.forwarded import PROOF_HEADER, ForwardedClient, proxy_secret

PEER = "10.7.0.9"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


async def seen(
    headers: list[tuple[str, str]], *, secret: str = "s3", trusted: str = "", peer: str = PEER
) -> tuple[str, list[bytes]]:
    """Address of the client in the application's scope, and names of the headers there."""
    found: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.update(scope)

    networks = [ipaddress.ip_network(word) for word in trusted.split()]
    scope = {
        "type": "http",
        "client": (peer, 4711),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    middleware = ForwardedClient(app, secret=secret, trusted=networks)
    await middleware(scope, None, None)  # type: ignore[arg-type]  # the application uses neither
    return found["client"][0], [name for name, _ in found["headers"]]


def proven(*forwarded: str, secret: str = "s3") -> list[tuple[str, str]]:
    return [(PROOF_HEADER, secret), *(("x-forwarded-for", value) for value in forwarded)]


@pytest.mark.parametrize(
    "headers",
    [
        [("x-forwarded-for", "1.2.3.4")],
        proven("1.2.3.4", secret="s4"),
        proven("1.2.3.4", secret=""),
        [*proven("1.2.3.4"), (PROOF_HEADER, "s3")],
        proven(),
        proven(""),
        proven("somebody"),
        proven("1.2.3.4, unknown"),
        proven("1.2.3.4\xff"),
    ],
    ids=["none", "wrong", "empty", "twice", "nobody", "blank", "name", "last", "bytes"],
)
async def test_what_haproxy_has_not_said_is_not_the_client(headers: list[tuple[str, str]]) -> None:
    client, names = await seen(headers)
    assert client == PEER
    assert PROOF_HEADER.encode() not in names


async def test_a_fleet_without_a_secret_trusts_nobody() -> None:
    for sent in ("", "s3"):
        assert (await seen(proven("1.2.3.4", secret=sent), secret=""))[0] == PEER


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6", "1.2.3.4"], "1.2.3.4"),
        (["1.2.3.4:5678"], "1.2.3.4"),
        (["2001:DB8::1"], "2001:db8::1"),
        (["[2001:db8::1]:443"], "2001:db8::1"),
        (["6.6.6.6, 1.2.3.4, 10.1.0.1"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4, 10.1.0.1, 10.1.0.2:80"], "1.2.3.4"),
        (["10.1.0.1, 10.1.0.2"], "10.1.0.1"),
        (["somebody, 10.1.0.1"], "10.1.0.1"),
    ],
)
async def test_the_client_is_the_last_address_that_is_no_trusted_proxy(
    forwarded: list[str], client: str
) -> None:
    found, names = await seen(proven(*forwarded), trusted="10.1.0.0/16 fd00::/8")
    assert found == client
    assert names == [b"x-forwarded-for"] * len(forwarded)


async def test_a_trusted_proxy_may_connect_by_itself() -> None:
    """As to Serve's Python proxy, without HAProxy."""
    headers = [("x-forwarded-for", "6.6.6.6, 1.2.3.4")]
    assert (await seen(headers, peer="10.1.0.1", trusted="10.1.0.0/16"))[0] == "1.2.3.4"
    assert (await seen(headers, peer="10.2.0.1", trusted="10.1.0.0/16"))[0] == "10.2.0.1"


async def test_what_is_no_request_passes() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    await ForwardedClient(app, secret="s")({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert scopes == [{"type": "lifespan"}]


def test_all_nodes_derive_the_secret_from_ray_s_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert proxy_secret() == ""
    default = tmp_path / ".ray" / "auth_token"
    default.parent.mkdir()
    default.write_text("token of a fleet\n")
    secret = proxy_secret()
    assert len(secret) == 64
    assert "token" not in secret
    other = tmp_path / "ray-token"
    other.write_text("another")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    assert proxy_secret() not in ("", secret)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token of a fleet")
    assert proxy_secret() == secret
