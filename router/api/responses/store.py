"""ResponseStore: responses stored by a gateway process, within limits, per API key."""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from router.errors import ApiError
from router.peers import ID_PREFIX

MAX_ENTRIES = 4096
"""Maximum number of responses of all keys together."""
OVERHEAD = 1024
"""Bytes of overhead per response that are counted in addition to the response's size."""
PREFIX = "resp_"
"""Prefix of response ids."""
_ID = re.compile(PREFIX + r"([a-z0-9]{1,32})[0-9a-f]{32}")
"""Format of response ids: the gateway that stores the response, and 128 random bits."""


@dataclass(kw_only=True, slots=True)
class Stored:
    """A response and its conversation."""

    response: bytes
    """The response as JSON."""
    messages: bytes
    """Messages of the conversation including the response's, without `instructions`, as JSON."""
    events: bytes | None = None
    """Server-sent events of the response; None if they are not stored."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that count against the store's limit."""
        return len(self.response) + len(self.messages) + len(self.events or b"") + OVERHEAD


@dataclass(kw_only=True, slots=True)
class _KeyResponses:
    """Responses of one API key, least recently used first."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """Stored responses of one gateway process, by API key and id. Thread-safe.

    Above the limit on bytes, the key with the most bytes loses its least recently used response;
    above the limit on entries, the key with the most entries does. Responses of a key are never
    evicted because another key uses more.

    Args:
        gateway_id: id of this gateway, which is part of response ids.
        max_bytes: maximum total size of all responses in bytes; 0 disables the store.
        max_entries: maximum number of responses of all keys together.
    """

    def __init__(self, gateway_id: str, max_bytes: int, max_entries: int = MAX_ENTRIES) -> None:
        self._gateway = gateway_id.removeprefix(ID_PREFIX)
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._by_key: dict[str, _KeyResponses] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Total size of all responses in bytes, including OVERHEAD."""
        self.num_entries = 0
        """Number of responses of all keys."""

    @property
    def is_open(self) -> bool:
        """Whether responses are stored at all."""
        return self._max_bytes > 0

    def new_id(self) -> str:
        """A new response id, which contains this gateway's id and cannot be guessed."""
        return f"{PREFIX}{self._gateway}{secrets.token_hex(16)}"

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Stores a response of a key, replacing one with the same id."""
        with self._lock:
            self._remove(owner, response_id)
            responses = self._by_key.setdefault(owner, _KeyResponses())
            responses.entries[response_id] = stored
            self._count(responses, stored.num_bytes, 1)
            while self.num_bytes > self._max_bytes:
                self._evict_from(max(self._by_key, key=lambda name: self._by_key[name].num_bytes))
            while self.num_entries > self._max_entries:
                self._evict_from(
                    max(self._by_key, key=lambda name: len(self._by_key[name].entries))
                )

    def get(self, owner: str, response_id: str, field: str | None = None) -> Stored:
        """Returns a response of a key.

        Args:
            owner: name of the key.
            response_id: id of the response.
            field: body field that contains the id, named in the error; None if the id is in the
                path.

        Raises:
            ApiError: 404 if the key has no such response in this store.
        """
        with self._lock:
            responses = self._by_key.get(owner)
            stored = responses.entries.get(response_id) if responses is not None else None
            if responses is None or stored is None:
                raise self._unknown(response_id, field)
            responses.entries.move_to_end(response_id)
            return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Deletes a response of a key. Raises ApiError (404) if the key has no such response."""
        with self._lock:
            if not self._remove(owner, response_id):
                raise self._unknown(response_id, None)

    def _evict_from(self, owner: str) -> None:
        self._remove(owner, next(iter(self._by_key[owner].entries)))

    def _remove(self, owner: str, response_id: str) -> bool:
        responses = self._by_key.get(owner)
        stored = responses.entries.pop(response_id, None) if responses is not None else None
        if responses is None or stored is None:
            return False
        self._count(responses, -stored.num_bytes, -1)
        if not responses.entries:
            del self._by_key[owner]
        return True

    def _count(self, responses: _KeyResponses, num_bytes: int, number: int) -> None:
        responses.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self.num_entries += number

    def _unknown(self, response_id: str, field: str | None) -> ApiError:
        why = "it was never stored, was deleted or evicted, or belongs to another API key"
        if not self.is_open:
            why = "this server does not store responses (--responses-store-mib is 0)"
        return _not_found(response_id, why, field)


def gateway_of(response_id: str) -> str | None:
    """Gateway id within a response id; None if the id has another format."""
    match = _ID.fullmatch(response_id)
    return None if match is None else ID_PREFIX + match[1]


def response_gone(response_id: str, field: str | None = None) -> ApiError:
    """A 404 error: the gateway that stored the response has exited.

    Args:
        response_id: id of the response.
        field: body field that contains the id; None if the id is in the path.
    """
    why = "the gateway that stored it has exited"
    return _not_found(response_id, why, field)


def _not_found(response_id: str, why: str, field: str | None) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:80]!r} not found: {why}. Send the whole conversation as "
        "input instead.",
        param=field,
        code="response_not_found",
    )
