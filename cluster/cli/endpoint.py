"""A client of one OpenAI endpoint, for commands: what goes wrong is told in one line."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from cluster.config import API_KEY

TIMEOUT_S = 600.0
"""Seconds without a byte: a request may wait long in a queue before its first token."""
DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """Which endpoint a command asks."""

    url: str = "http://127.0.0.1:8000"
    """URL of the endpoint, with or without /v1."""
    api_key: str = field(default="", repr=False)
    """Key to present. One given here stands on the process list; rather set RAYFLEET_API_KEY, of
    whose keys the first is taken."""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url must be as http://127.0.0.1:8000, got {self.url}")

    @property
    def key(self) -> str:
        """The key to present; empty for none."""
        return self.api_key or os.environ.get(API_KEY, "").partition(",")[0].strip()


class Endpoint:
    """Asks an endpoint. What cannot be had is a ValueError whose text is for the user.

    Args:
        url: of it, with or without /v1.
        key: that it wants; empty for none.
        timeout_s: for each byte of an answer.
    """

    def __init__(self, url: str, key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.base = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if is_loopback(urllib.parse.urlsplit(self.base).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with self._open(path) as answer:
            return json.loads(answer.read())

    def text(self, path: str) -> str:
        """The text at a path."""
        with self._open(path) as answer:
            return answer.read().decode()

    def models(self) -> list[str]:
        """Names of the models that the key may use."""
        return [str(card["id"]) for card in self.get("/v1/models")["data"]]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, as they come."""
        with self._open(path, {**body, "stream": True}) as answer:
            for line in _lines(answer):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == DONE:
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(_message_of(event))
                yield event
        raise ValueError("the connection was closed before the answer's end")

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> IO[bytes]:
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers)
        try:
            answer: IO[bytes] = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(self._refusal(path, error)) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(
                f"nothing answers at {self.base} ({reason}): start it with `rayfleet serve`, or "
                "name another --url"
            ) from error
        return answer

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        try:
            message = _message_of(json.loads(error.read()))
        except ValueError:
            message = f"{self.base}{path} answers {error.code} {error.reason}"
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            return f"{message}; here: set {API_KEY}, or give --api-key"
        return message


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """HAZARD: urllib would take the key along to wherever an answer points."""

    def redirect_request(self, *_: Any) -> None:
        """Follows nothing: the redirect is an error like others."""
        return None


def _lines(answer: IO[bytes]) -> Iterator[bytes]:
    try:
        yield from answer
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"the connection was lost ({error})") from error


def _message_of(body: Any) -> str:
    """The message in an error's body. Raises ValueError where it is of another form."""
    try:
        return str(body["error"]["message"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"an answer of another form: {body}") from error


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
