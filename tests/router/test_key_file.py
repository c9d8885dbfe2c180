"""API keys in files that change at runtime, and their permissions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.keys import KeyFile, KeyRing, digest_of
from router.keys.entry import named
from router.keys.file import CHECK_INTERVAL_S, STABLE_S, parse_keys

TWO = """
# who asks
[search-team]
key = "sha256:{digest}"
expires = 2030-12-31
requests_per_minute = 600
tokens_per_minute = 100_000
max_concurrent_requests = 8
max_priority = 5
slo = false
models = ["demo"]

["batch.night"]
keys = ["old-key", "new-key"]
"""


class SteppedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def settle(self, keys: KeyFile) -> None:
        """Waits as long as a change may take to apply, with occasional requests."""
        for step_s in (CHECK_INTERVAL_S, STABLE_S):
            self.now += step_s
            keys.entries()


def digests(*keys: str) -> set[bytes]:
    return {digest_of(key.encode()) for key in keys}


def held(keys: KeyFile) -> set[bytes]:
    return {digest for entry in keys.entries() for digest in entry.digests}


def scope_of(key: str, scheme: str = "Bearer") -> dict[str, Any]:
    return {"headers": [(b"authorization", f"{scheme} {key}".encode())]}


def test_lines_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    hashed = f"sha256:{digest_of(b'three').hex()}"
    file.write_text(f"# three of them\n\n one \ntwo\n{hashed}\none\n")
    assert held(KeyFile(str(file))) == digests("one", "two", "three")


def test_tables_say_what_a_key_may_do() -> None:
    search, batch = parse_keys(TWO.format(digest=digest_of(b"sesame").hex()))
    assert (search.name, search.digests) == ("search-team", (digest_of(b"sesame"),))
    assert search.expires == 1924992000.0, "the last second of the day"
    assert (search.requests_per_minute, search.tokens_per_minute) == (600, 100_000)
    assert (search.max_concurrent_requests, search.max_priority, search.slo) == (8, 5, False)
    assert search.may_use("demo", "x")
    assert not search.may_use("other")
    assert set(batch.digests) == digests("old-key", "new-key")
    assert (batch.expires, batch.max_priority, batch.slo) == (math.inf, 9, True)
    assert batch.may_use("anything")
    for entry in (search, batch):
        assert "key" not in repr(entry.digests)
        assert "old-key" not in repr(entry)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "requires `key`"),
        ({"key": ""}, "requires `key`"),
        ({"keys": ["a", 5]}, "requires `key`"),
        ({"key": "sha256:beef"}, "64 hexadecimal digits"),
        ({"key": "a", "rate": 5}, "unknown options: rate"),
        ({"key": "a", "max_priority": 10}, r"max_priority of \[x\] must be an integer"),
        ({"key": "a", "requests_per_minute": -1}, "requests_per_minute"),
        ({"key": "a", "tokens_per_minute": True}, "tokens_per_minute"),
        ({"key": "a", "expires": "tomorrow"}, "must be a date"),
        ({"key": "a", "slo": 1}, "true or false"),
        ({"key": "a", "monitoring": "yes"}, r"monitoring of \[x\] must be true or false"),
        ({"key": "a", "models": "demo"}, "list of names"),
        ("key", "must be inside"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(table: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        named("x", table)
    assert "beef" not in str(raised.value)


@pytest.mark.parametrize("name", ["other", "default", "", "a b", "ä", "x" * 65])
def test_names_that_metrics_could_not_show_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid key name"):
        named(name, {"key": "a"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[a]\nkey = "k"\n[b]\nkey = "k"\n', "have the same key"),
        ('[a]\nkey = "k"\n[a]\nkey = "l"\n', "not valid TOML"),
        ("[a\nkey", "not valid TOML"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=says):
        KeyFile(str(tmp_path / "keys"))


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}").write_text(f'[team]\nkey = "k{number}"\n')
    with pytest.raises(ValueError, match=r"the name \[team\] is used more than once"):
        KeyFile(str(tmp_path))


def test_a_mounted_secret(tmp_path: Path) -> None:
    """The kubelet's layout: data behind symbolic links."""
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (data / "alice").write_text("key-a")
    (data / "bob").write_text('[bob]\nkey = "key-b"\n')
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("alice", "bob"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert held(KeyFile(str(tmp_path))) == digests("key-a", "key-b")


def test_a_change_is_noticed_and_what_is_wrong_keeps_the_keys(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", SteppedClock()
    file.write_text("old")
    keys = KeyFile(str(file), clock)
    file.write_text("new")
    assert held(keys) == digests("old")
    clock.settle(keys)
    assert held(keys) == digests("new")
    breakages: list[Callable[[], object]] = [
        lambda: file.write_text("\n"),
        lambda: file.write_bytes(b"key-\xff\xfe\n"),
        lambda: file.write_text('[team]\nkey = "half'),
        lambda: file.write_text("[team]\nkey = 5\n"),
        file.unlink,
    ]
    for breakage in breakages:
        breakage()
        clock.settle(keys)
        assert held(keys) == digests("new")
        assert keys.is_stale
    file.write_text("newest")
    clock.settle(keys)
    assert held(keys) == digests("newest")
    assert not keys.is_stale


def test_a_file_that_is_being_written_is_not_taken(tmp_path: Path) -> None:
    """Half a key would be a valid key that is easier to guess."""
    file, clock = tmp_path / "keys", SteppedClock()
    file.write_text("old")
    keys = KeyFile(str(file), clock)
    clock.now += CHECK_INTERVAL_S
    for length in range(1, 9):
        file.write_text("sesame-1"[:length])
        assert held(keys) == digests("old")
        clock.now += STABLE_S
    assert held(keys) == digests("sesame-1")


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"# none\n", "no API key"), (None, "cannot read"), (b"k\xff", "not UTF-8 text")],
)
def test_no_key_is_refused_at_the_start(tmp_path: Path, text: bytes | None, says: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ValueError, match=says):
        KeyFile(str(file))


def test_a_ring_finds_the_key_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(TWO.format(digest=digest_of(b"sesame").hex()))
    clock = SteppedClock()
    ring = KeyRing(("given", "given"), str(tmp_path / "keys"), clock)
    assert len(ring.entries) == 3
    names = {}
    for key in ("given", "sesame", "old-key", "new-key", "nobody", "", "sesam", "sesame1"):
        entry = ring.find(scope_of(key))
        names[key] = None if entry is None else entry.name
    assert names["sesame"] == "search-team"
    assert names["old-key"] == names["new-key"] == "batch.night"
    assert "given" not in str(names.pop("given"))
    assert [name for name in names.values() if name is None] == [None] * 4
    assert ring.find(scope_of("sesame", "Basic")) is None
    assert ring.find({"headers": []}) is None
    clock.now = 1924992000.0
    assert ring.find(scope_of("sesame")) is None, "expired"
    assert ring.find(scope_of("old-key")) is not None
