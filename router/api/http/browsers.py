"""BrowserGuard: rejects requests that browsers send on behalf of pages of other sites."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.errors import send_error
from router.errors import ApiError

ANY = "*"
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods without side effects. Browsers hide their responses from other origins' pages (CORS)."""
MAX_SHOWN = 100
"""Maximum number of characters of a header quoted in errors, since clients choose its length."""
_PORT = re.compile(r":\d*$")


class BrowserGuard:
    """ASGI middleware against cross-site request forgery and DNS rebinding.

    Browsers send some cross-origin requests without a preflight, and put the page's origin into
    `Origin` and `Sec-Fetch-Site`. Requests without these headers, which other clients send, pass. A
    page that rebinds its own name to this server's address counts as same-origin, so `Host` must be
    a known name; IP addresses cannot be rebound and always pass.

    Args:
        app: the wrapped application.
        allowed_hosts: host names allowed in `Host`; empty or `*` for any.
        allowed_origins: origins whose pages may send requests; `*` for all.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Sequence[str] = (),
        allowed_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._hosts = frozenset(map(str.lower, allowed_hosts))
        self._any_host = not self._hosts or ANY in self._hosts
        self._origins = frozenset(map(str.lower, allowed_origins))
        self._any_origin = ANY in self._origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request, or responds with 403."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await send_error(send, error, path=scope["path"])
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        host = origin = site = ""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").strip().lower()
            elif name == b"origin":
                origin = value.decode("latin-1").strip().lower()
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1").strip().lower()
        if not (self._any_host or self._is_known(host)):
            raise _rejected(f"unknown host {host[:MAX_SHOWN]!r}: add it to --allowed-hosts")
        if scope["method"] in SAFE_METHODS or self._any_origin:
            return
        if site in ("same-origin", "none") or origin in self._origins:
            return
        is_same = origin.partition("://")[2] == host
        if (origin and not is_same) or (site and not origin):
            shown = origin[:MAX_SHOWN] or "another site"
            raise _rejected(
                f"cross-origin request from a page of {shown}: add its origin to --allowed-origins"
            )

    def _is_known(self, host: str) -> bool:
        name = _PORT.sub("", host)
        return not name or name in self._hosts or _is_ip_address(name)


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _rejected(problem: str) -> ApiError:
    return ApiError(403, problem)
