"""KeyEntry: an API key with its name, permissions and limits."""

from __future__ import annotations

import datetime
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

MAX_PRIORITY = 9
"""Maximum priority of a request."""
PREFIX = "sha256:"
"""Prefix of a SHA-256 digest in hexadecimal, which can be given in place of the key."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of key names."""
RESERVED_NAMES = frozenset(("default", "other"))
"""Metric labels of requests without a key, and of tenants without a separate label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """An API key with its permissions and limits. 0 disables a limit on rates or concurrency."""

    name: str
    """Name of the key in metrics and the audit log; not secret."""
    digests: tuple[bytes, ...] = field(repr=False)
    """SHA-256 of the key, or of several keys during a rotation."""
    is_named: bool = True
    """Whether the name is from a key file, not derived from the key."""
    expires: float = math.inf
    """Unix time in seconds at which the key expires; infinite if it does not expire."""
    requests_per_minute: float = 0.0
    """Maximum requests per minute."""
    tokens_per_minute: float = 0.0
    """Maximum tokens per minute, prompt and generated tokens together."""
    max_concurrent_requests: int = 0
    """Maximum number of concurrent requests."""
    max_priority: int = MAX_PRIORITY
    """Maximum `priority` of the key's requests."""
    slo: bool = True
    """Whether requests with the key may set an SLO."""
    models: frozenset[str] = frozenset()
    """Names of the models that the key may use; empty for all."""
    monitoring: bool = False
    """Whether the key has access to /sessions, and to the /metrics series of all tenants (with key
    names) and all models. Other keys get only their own series."""

    def may_use(self, *names: str) -> bool:
        """Whether the key may use a model with these names."""
        return not self.models or not self.models.isdisjoint(names)


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key, used to compare keys."""
    return hashlib.sha256(key).digest()


def unnamed(key: str) -> KeyEntry:
    """The entry of a key without a name, given as the key or as `sha256:DIGEST`.

    Raises:
        ValueError: the digest is malformed.
    """
    digest = _digest(key)
    # Hashed again: the name is public and must not reveal the digest.
    return KeyEntry(name=hashlib.sha256(digest).hexdigest()[:16], digests=(digest,), is_named=False)


def named(name: str, table: object) -> KeyEntry:
    """The entry of a table `[name]` in a key file.

    Raises:
        ValueError: the name or an option is invalid; the message does not contain the key.
    """
    if not NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise ValueError(
            f"[{name}] is not a valid key name: use up to 64 letters, digits, '.', '_' or '-', but "
            f"not {', '.join(sorted(RESERVED_NAMES))}"
        )
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} must be inside a [NAME] table")
    options = {f.name for f in fields(KeyEntry)} - {"name", "digests", "is_named"}
    unknown = sorted(set(table) - options - {"key", "keys"})
    if unknown:
        known = ", ".join(["key", "keys", *sorted(options)])
        raise ValueError(f"[{name}] has unknown options: {', '.join(unknown)} (supported: {known})")
    keys = [table["key"]] if "key" in table else table.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(k, str) and k for k in keys):
        raise ValueError(
            f"[{name}] requires `key` (a non-empty string) or `keys` (a list of such strings)"
        )
    values = {option: _value(name, option, table[option]) for option in options & set(table)}
    return KeyEntry(name=name, digests=tuple(map(_digest, keys)), **values)


def _digest(key: str) -> bytes:
    if not key.startswith(PREFIX):
        return digest_of(key.encode())
    try:
        digest = bytes.fromhex(key.removeprefix(PREFIX))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"{PREFIX} must be followed by 64 hexadecimal digits")
    return digest


def _value(name: str, option: str, value: object) -> Any:
    where = f"{option} of [{name}]"
    if option == "expires":
        if isinstance(value, datetime.datetime):
            return (value if value.tzinfo else value.replace(tzinfo=datetime.UTC)).timestamp()
        if isinstance(value, datetime.date):
            day = datetime.datetime.combine(value, datetime.time(), datetime.UTC)
            return (day + datetime.timedelta(days=1)).timestamp()  # valid until the end of the day
        raise ValueError(f"{where} must be a date or time, such as 2030-12-31")
    if option == "models":
        if not isinstance(value, list) or not all(isinstance(model, str) for model in value):
            raise ValueError(f"{where} must be a list of names")
        return frozenset(value)
    if option in ("slo", "monitoring"):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false")
        return value
    highest = MAX_PRIORITY if option == "max_priority" else 10**12
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        raise ValueError(f"{where} must be an integer in [0, {highest}]")
    return value
