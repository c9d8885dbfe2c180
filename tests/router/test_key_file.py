"""API keys that lie in files and change while the gateway serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.api.key_file import CHECK_INTERVAL_S, KeyFile, digest_of


class SteppedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_interval(self) -> None:
        self.now += CHECK_INTERVAL_S


def digests(*keys: str) -> tuple[bytes, ...]:
    return tuple(digest_of(key.encode()) for key in keys)


def test_lines_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# two of them\n\n one \ntwo\n")
    assert KeyFile(str(file)).digests() == digests("one", "two")


def test_a_mounted_secret(tmp_path: Path) -> None:
    """As the kubelet lays it out: the data behind links, the links in the folder."""
    data = tmp_path / "..2026_01_01"
    data.mkdir()
    (data / "alice").write_text("key-a")
    (data / "bob").write_text("key-b\n")
    (tmp_path / "..data").symlink_to(data.name)
    for name in ("alice", "bob"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert KeyFile(str(tmp_path)).digests() == digests("key-a", "key-b")


def test_a_change_is_noticed_and_an_empty_file_keeps_the_keys(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", SteppedClock()
    file.write_text("old")
    keys = KeyFile(str(file), clock)
    file.write_text("new")
    assert keys.digests() == digests("old")
    clock.pass_interval()
    assert keys.digests() == digests("new")
    for breakage in (lambda: file.write_text("\n"), file.unlink):
        breakage()
        clock.pass_interval()
        assert keys.digests() == digests("new")


@pytest.mark.parametrize(("text", "says"), [("# none\n", "no API key"), (None, "cannot read")])
def test_no_key_is_refused_at_the_start(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=says):
        KeyFile(str(file))


async def test_a_gateway_lets_in_both_kinds(rig, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n")
    await rig.start(api_keys=("given",), api_key_file=str(tmp_path / "keys"))
    statuses = {}
    for key in ("given", "from-file", "neither"):
        headers = {"authorization": f"Bearer {key}"}
        statuses[key] = (await rig.client.get("/v1/models", headers=headers)).status_code
    assert statuses == {"given": 200, "from-file": 200, "neither": 401}
