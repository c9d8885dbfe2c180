"""KeyRing: finds the API key of a request among keys from options and files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from starlette.types import Scope

from router.keys.entry import KeyEntry, digest_of, unnamed
from router.keys.file import KeyFile


class KeyRing:
    """All API keys of one kind (for clients or for operators).

    Keys are looked up by their digests, which attackers cannot choose, so lookup times do not
    reveal keys.

    Args:
        keys: keys from options.
        path: file or folder of files with keys (see KeyFile); empty if there is none.
        clock: Unix time in seconds.

    Raises:
        ValueError: a file is unreadable, invalid or empty.
    """

    def __init__(
        self, keys: Sequence[str], path: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._given = tuple({e.digests: e for e in map(unnamed, keys)}.values())
        self._file = KeyFile(path) if path else None
        self._from_file: tuple[KeyEntry, ...] = ()
        self._by_digest: dict[bytes, KeyEntry] = {}
        self.entries: tuple[KeyEntry, ...] = ()
        """All keys as of the last lookup."""
        self._refresh()

    @property
    def is_empty(self) -> bool:
        """Whether neither keys nor a key file is configured."""
        return not self._given and self._file is None

    @property
    def is_stale(self) -> bool:
        """Whether a key file has become invalid or unreadable."""
        return self._file is not None and self._file.is_stale

    def find(self, scope: Scope) -> KeyEntry | None:
        """The entry of the key in a request's headers; None if it is unknown or has expired.

        The key is a bearer token or, as sent by Anthropic's clients, x-api-key; the former takes
        precedence.
        """
        self._refresh()
        key = _presented(scope["headers"])
        entry = self._by_digest.get(digest_of(key.strip()))
        return entry if entry is not None and self._clock() < entry.expires else None

    def _refresh(self) -> None:
        from_file = self._file.entries() if self._file is not None else ()
        if from_file is self._from_file and self.entries:
            return
        self._from_file = from_file
        self.entries = (*from_file, *self._given)
        # If a key is both in the options and in a file, the file's entry takes precedence.
        self._by_digest = {
            digest: entry for entry in reversed(self.entries) for digest in entry.digests
        }


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's headers; empty if there is none."""
    other = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            other = other or value
    return other
