"""Client addresses behind HAProxy: gateways use X-Forwarded-For only if its sender is trusted.

HAProxy and a gateway may be on different nodes, so a gateway cannot recognize HAProxy by its
address. Instead, HAProxy sends the fleet's secret, which every node derives from Ray's
authentication token, in PROOF_HEADER. Imports only the standard library, since HAProxy's wrapper
imports this module.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PROOF_HEADER = "x-rayfleet-proxy"
"""Request header in which HAProxy sends the secret. HAProxy overwrites it in clients' requests."""
SECRET_VARIABLE = "RAYFLEET_PROXY_SECRET"
"""Environment variable of the HAProxy process with the secret, so that it is not in any file."""
TRUSTED_PROXIES_VARIABLE = "RAYFLEET_HAPROXY_TRUSTED_PROXIES"
"""Environment variable with the addresses and networks, separated by commas, of reverse proxies
whose X-Forwarded-For is kept. From other senders, it is replaced by the sender's address."""
FORWARDED_FOR = "x-forwarded-for"

_PURPOSE = b"rayfleet: HAProxy to gateways"
_TOKEN_FILE = Path("~/.ray/auth_token")
"""File that Ray reads the token from by default."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def proxy_secret() -> str:
    """The secret that proves to gateways that a request comes from their fleet's HAProxy.

    It is derived from Ray's token, which all nodes share, and does not reveal the token. Empty if
    there is no token: gateways then log HAProxy's address as the client's.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        try:
            path = os.environ.get("RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE.expanduser()
            token = Path(path).read_text()
        except (OSError, RuntimeError):  # RuntimeError: no home directory
            return ""
    token = token.strip()
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest() if token else ""


def trusted_proxies() -> list[Network]:
    """Networks in TRUSTED_PROXIES_VARIABLE. Raises ValueError if one is malformed."""
    networks: list[Network] = []
    for word in os.environ.get(TRUSTED_PROXIES_VARIABLE, "").split(","):
        try:
            networks += [ipaddress.ip_network(word.strip())] if word.strip() else []
        except ValueError as error:
            raise ValueError(
                f"invalid {TRUSTED_PROXIES_VARIABLE} ({error}): use addresses or networks, such as "
                "10.0.0.7,10.1.0.0/16"
            ) from error
    return networks


class ForwardedClient:
    """ASGI middleware that sets a request's client to the address in X-Forwarded-For if HAProxy or
    a trusted proxy has sent it, and removes PROOF_HEADER.

    Args:
        app: the wrapped application.
        secret: secret of the fleet; empty if there is none. None derives it from Ray's token.
        trusted: networks of reverse proxies in front of HAProxy; None reads
            TRUSTED_PROXIES_VARIABLE.

    Raises:
        ValueError: TRUSTED_PROXIES_VARIABLE is malformed.
    """

    def __init__(
        self, app: ASGIApp, secret: str | None = None, trusted: Iterable[Network] | None = None
    ) -> None:
        self._app = app
        self._secret = (proxy_secret() if secret is None else secret).encode()
        self._trusted = tuple(trusted_proxies() if trusted is None else trusted)
        self._proof = PROOF_HEADER.encode()
        self._forwarded = FORWARDED_FOR.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request with its client's address."""
        if scope["type"] in ("http", "websocket"):
            scope = self._resolved(scope)
        await self._app(scope, receive, send)

    def _resolved(self, scope: Scope) -> Scope:
        proofs = [value for name, value in scope["headers"] if name == self._proof]
        host = (scope.get("client") or ("", 0))[0]
        if proofs:
            headers = [header for header in scope["headers"] if header[0] != self._proof]
            scope = {**scope, "headers": headers}
        if not (self._is_haproxy(proofs) or self._is_trusted(host)):
            return scope
        values = [value for name, value in scope["headers"] if name == self._forwarded]
        client = self._first_untrusted(b",".join(values).decode("latin-1").split(","), host)
        return scope if client == host else {**scope, "client": (client, 0)}

    def _is_haproxy(self, proofs: list[bytes]) -> bool:
        is_one = len(proofs) == 1 and bool(self._secret)
        return is_one and hmac.compare_digest(proofs[0], self._secret)

    def _first_untrusted(self, hops: list[str], peer: str) -> str:
        """The last address that does not belong to a trusted proxy. An entry that is not an address
        ends the search, since no trusted proxy has added it."""
        client = peer
        for hop in reversed(hops):
            address = _address(hop)
            if address is None:
                return client
            client = address
            if not self._is_trusted(address):
                return client
        return client

    def _is_trusted(self, host: str) -> bool:
        if not self._trusted:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._trusted)


def _address(hop: str) -> str | None:
    """An entry of X-Forwarded-For without its port; None if it is not an IP address."""
    host = hop.strip()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None
