"""All keys of one kind: some were given, the rest are in files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from starlette.types import Scope

from router.keys.entry import KeyEntry, digest_of, unnamed
from router.keys.file import KeyFile


class KeyRing:
    """Finds who presents a key.

    A key is looked up by its digest, which nobody can choose: the time of it tells nothing.

    Args:
        keys: given.
        path: of a file, or folder of files; empty for none. See KeyFile.
        clock: Unix seconds.

    Raises:
        ValueError: the file cannot be read, is wrong, or holds no key.
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
        """All of them, as of the last look-up."""
        self._refresh()

    @property
    def is_empty(self) -> bool:
        """Whether there are none, and will be none."""
        return not self._given and self._file is None

    @property
    def is_stale(self) -> bool:
        """Whether a file says something that could not be taken."""
        return self._file is not None and self._file.is_stale

    def find(self, scope: Scope) -> KeyEntry | None:
        """The entry whose bearer token a request presents; None where it is nobody's, or has
        expired.

        Anthropic's clients present it as x-api-key; a request that has both means the bearer token.
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
        # Of a key that was given and is in a file too, the file knows more.
        self._by_digest = {
            digest: entry for entry in reversed(self.entries) for digest in entry.digests
        }


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in a request's headers; empty for none."""
    other = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key if scheme.lower() == b"bearer" else b""
        if name == b"x-api-key":
            other = other or value
    return other
