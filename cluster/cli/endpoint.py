"""Client of an OpenAI-compatible endpoint for the CLI, with one-line error messages."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from cluster.config import API_KEY
from cluster.ports import is_loopback

TIMEOUT_S = 600.0
"""Timeout in seconds for the next byte: a request may wait in a queue for a long time before its
first token."""
DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """Options of commands that connect to an endpoint: URL and API key."""

    url: str = "http://127.0.0.1:8000"
    """URL of the endpoint, with or without /v1."""
    api_key: str = field(default="", repr=False)
    """API key. The flag is visible in the process list: prefer the environment variable
    RAYFLEET_API_KEY, whose first key is used."""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url must be a URL such as http://127.0.0.1:8000, got {self.url}")

    @property
    def key(self) -> str:
        """API key to send; empty if there is none."""
        return self.api_key or os.environ.get(API_KEY, "").partition(",")[0].strip()


class Endpoint:
    """Client of one endpoint. All errors are ValueErrors with messages for the user.

    Args:
        url: URL of the endpoint, with or without /v1.
        key: API key to send; empty if there is none.
        timeout_s: timeout in seconds for the next byte of a response.
        variable: environment variable with the key, for messages.
    """

    def __init__(
        self, url: str, key: str = "", timeout_s: float = TIMEOUT_S, variable: str = API_KEY
    ) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_s, self._variable = timeout_s, variable
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if is_loopback(urllib.parse.urlsplit(self.base).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        """JSON response to a GET request for a path."""
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """Text response to a GET request for a path."""
        with self._open(path) as response, _lost_connections():
            return response.read().decode()

    def post(self, path: str, body: Mapping[str, Any]) -> str:
        """Text response to a POST request with a JSON body."""
        with self._open(path, body) as response, _lost_connections():
            return response.read().decode()

    def models(self) -> list[str]:
        """Names of the models available to the API key."""
        return [str(card["id"]) for card in self.get("/v1/models")["data"]]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """POSTs `body`; yields the events of the streamed response."""
        with self._open(path, {**body, "stream": True}) as response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == DONE:
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(_message_of(event))
                yield event
        raise ValueError("connection closed before the end of the response")

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> IO[bytes]:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers)
        try:
            response: IO[bytes] = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(self._error_message(path, error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(
                f"cannot connect to {self.base} ({reason}): start a server with `rayfleet serve`, "
                "or set --url"
            ) from error
        return response

    def _error_message(self, path: str, error: urllib.error.HTTPError) -> str:
        try:
            message = _message_of(json.loads(error.read()))
        except ValueError:
            message = f"{self.base}{path} returned HTTP {error.code} {error.reason}"
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            return f"{message} (set {self._variable} or --api-key)"
        return message


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that does not follow redirects.

    HAZARD: urllib would send the API key to the host of the redirect.
    """

    def redirect_request(self, *_: Any) -> None:
        """Returns None, so that urllib raises HTTPError."""
        return None


def _lines(response: IO[bytes]) -> Iterator[bytes]:
    with _lost_connections():
        yield from response


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Context manager that converts errors while reading a response to ValueErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"connection lost ({error})") from error


def _message_of(body: Any) -> str:
    """Message of an OpenAI error body. Raises ValueError for other bodies."""
    try:
        return str(body["error"]["message"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"unexpected response: {body}") from error
