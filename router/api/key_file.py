"""API keys that lie in files, such as a mounted Kubernetes Secret."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
"""How long a changed file may go unnoticed."""


class KeyFile:
    """The keys in `path`: one per line, `#` begins a comment; of a folder, those of all its files.

    Files whose names begin with a dot are left out: Kubernetes keeps its own there.

    Args:
        path: file or folder.
        clock: monotonic seconds.

    Raises:
        ValueError: it cannot be read, or holds no key.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        try:
            self._text = self._read()
        except OSError as error:
            raise ValueError(f"cannot read the API keys in {path}: {error.strerror}") from error
        self._digests = _digests_in(self._text)
        if not self._digests:
            raise ValueError(f"{path} holds no API key: put one per line, or leave it out")
        self._checked_at = clock()

    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of every key. What is unreadable or empty now leaves the former keys valid."""
        now = self._clock()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            self._reload()
        return self._digests

    def _reload(self) -> None:
        try:
            text = self._read()
        except OSError as error:
            logger.warning("API keys stay as they are: %s", error)
            return
        if text == self._text:
            return
        digests = _digests_in(text)
        if not digests:
            logger.warning("API keys stay as they are: %s holds none", self._path)
            return
        self._text, self._digests = text, digests
        logger.info("%d API key(s) read from %s", len(digests), self._path)

    def _read(self) -> str:
        if not self._path.is_dir():
            return self._path.read_text()
        files = sorted(file for file in self._path.iterdir() if not file.name.startswith("."))
        return "\n".join(file.read_text() for file in files if file.is_file())


def digest_of(key: bytes) -> bytes:
    """What is compared in place of a key."""
    return hashlib.sha256(key).digest()


def _digests_in(text: str) -> tuple[bytes, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(digest_of(line.encode()) for line in lines if line and not line.startswith("#"))
