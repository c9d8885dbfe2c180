"""KeyFile: API keys in files, such as a mounted Kubernetes Secret, that may change at any time."""

from __future__ import annotations

import logging
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from router.keys.entry import KeyEntry, named, unnamed

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 5.0
"""Seconds between checks for changed files."""
STABLE_S = 1.0
"""Seconds that changed files must be stable before they are used: a file written in place may be
read half-written."""


class KeyFile:
    """The API keys in a file, or in all files of a folder.

    A file has one key or `sha256:DIGEST` per line, or is TOML with one table per key, which has the
    fields of a KeyEntry:

        # a comment
        [search-team]
        key = "sha256:5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
        requests_per_minute = 600

    Files whose names start with a dot are ignored, since Kubernetes uses such names internally. If
    files become invalid, empty or unreadable, the previous keys stay valid and `is_stale` is set.

    Args:
        path: the file or folder.
        clock: time in seconds from an arbitrary epoch.

    Raises:
        ValueError: the path is unreadable, a file is invalid, or there is no key.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self.is_stale = False
        """Whether the files have become invalid or unreadable."""
        try:
            self._texts = self._read()
        except OSError as error:
            raise ValueError(f"cannot read the API keys in {path}: {error.strerror}") from error
        self._entries = self._parse(self._texts)
        self._next_check = clock() + CHECK_INTERVAL_S
        self._pending: dict[str, bytes] | None = None

    def entries(self) -> tuple[KeyEntry, ...]:
        """All keys of the files; the same tuple object until they change."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + (STABLE_S if self._has_changed() else CHECK_INTERVAL_S)
        return self._entries

    def _has_changed(self) -> bool:
        """Reads the files, and loads their keys if two consecutive reads agree; returns whether the
        content is still changing, so that it must be read again soon."""
        try:
            texts = self._read()
        except OSError as error:
            self._keep(f"{error}")
            return False
        is_stable, self._pending = texts == self._pending, texts
        if texts == self._texts:
            self.is_stale = False
            return False
        if not is_stable:
            return True
        try:
            self._entries = self._parse(texts)
        except ValueError as error:
            self._keep(f"{error}")
            return False
        self._texts, self.is_stale = texts, False
        logger.info("loaded %d API key(s) from %s", len(self._entries), self._path)
        return False

    def _keep(self, problem: str) -> None:
        if not self.is_stale:
            logger.warning("keeping the previous API keys: %s", problem)
        self.is_stale = True

    def _read(self) -> dict[str, bytes]:
        if not self._path.is_dir():
            return {self._path.name: self._path.read_bytes()}
        files = sorted(file for file in self._path.iterdir() if not file.name.startswith("."))
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def _parse(self, texts: dict[str, bytes]) -> tuple[KeyEntry, ...]:
        entries: list[KeyEntry] = []
        for name, text in texts.items():
            where = self._path / name if self._path.is_dir() else self._path
            try:
                entries += parse_keys(text.decode())
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where} is not UTF-8 text (byte {error.start}): save it as UTF-8"
                ) from error
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{where} is not valid TOML: {error}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        if not entries:
            raise ValueError(
                f"{self._path} contains no API keys: add one (`rayfleet keys new NAME` generates "
                "an entry)"
            )
        check_unique(entries)
        return tuple(entries)


def parse_keys(text: str) -> list[KeyEntry]:
    """The keys in the text of a file, without duplicates.

    Raises:
        ValueError: the text is invalid; the message does not contain keys.
    """
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    if kept and kept[0].startswith("["):
        return [named(name, table) for name, table in tomllib.loads(text).items()]
    return list({entry.digests: entry for entry in map(unnamed, kept)}.values())


def check_unique(entries: Sequence[KeyEntry]) -> None:
    """Raises ValueError if two entries have the same key or name."""
    names = Counter(entry.name for entry in entries if entry.is_named)
    doubles = [name for name, count in names.items() if count > 1]
    owners: dict[bytes, str] = {}
    for entry in entries:
        for digest in entry.digests:
            if owners.setdefault(digest, entry.name) != entry.name:
                raise ValueError(
                    f"[{owners[digest]}] and [{entry.name}] have the same key: remove one of them"
                )
    if doubles:
        raise ValueError(f"the name [{doubles[0]}] is used more than once: rename one key")
