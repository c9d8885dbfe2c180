"""A client of one OpenAI endpoint, for commands: errors are told to the user in one line."""

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
"""Seconds to wait for the next byte: a request may be queued for long before its first token."""
DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """Options of commands that ask an endpoint: its URL and a key."""

    url: str = "http://127.0.0.1:8000"
    """URL of the endpoint, with or without /v1."""
    api_key: str = field(default="", repr=False)
    """Key to present. A key given by this flag is visible in the list of processes; rather set
    RAYFLEET_API_KEY, whose first key is taken."""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url must be as http://127.0.0.1:8000, got {self.url}")

    @property
    def key(self) -> str:
        """The key to present; empty for none."""
        return self.api_key or os.environ.get(API_KEY, "").partition(",")[0].strip()


class Endpoint:
    """Client of one endpoint. All errors are ValueErrors whose text is for the user.

    Args:
        url: URL of the endpoint, with or without /v1.
        key: API key to present; empty for none.
        timeout_s: seconds to wait for the next byte of an answer.
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
        """The JSON answer to GET at a path."""
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """The text answer to GET at a path."""
        with self._open(path) as answer, _lost_connections():
            return answer.read().decode()

    def models(self) -> list[str]:
        """Names of the models that the key may use."""
        return [str(card["id"]) for card in self.get("/v1/models")["data"]]

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Sends `body` by POST and yields the events of the streamed answer."""
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
    """Handler that follows no redirect.

    HAZARD: urllib would send the key to whatever host the redirect names.
    """

    def redirect_request(self, *_: Any) -> None:
        """Returns no request to follow: urllib then raises HTTPError."""
        return None


def _lines(answer: IO[bytes]) -> Iterator[bytes]:
    with _lost_connections():
        yield from answer


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Context that turns errors of reading an answer into ValueErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"the connection was lost ({error})") from error


def _message_of(body: Any) -> str:
    """The message in the body of an OpenAI error. Raises ValueError for a body of another form."""
    try:
        return str(body["error"]["message"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"an answer of another form: {body}") from error
