"""Digests of files depend on their content, whatever is cached of earlier versions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from worker.models.config import digests as module
from worker.models.config.digests import digests


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches digests even of very recent files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SETTLED_S", -60.0)
    return tmp_path / "cache" / "rayfleet" / "digests"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were read."""
    paths: list[Path] = []
    compute = module._compute

    def watched(path: Path) -> str:
        paths.append(path)
        return compute(path)

    monkeypatch.setattr(module, "_compute", watched)
    return paths


@pytest.mark.usefixtures("kept")
def test_a_file_is_read_once(tmp_path: Path, computed: list[Path]) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    for _ in range(3):
        assert digests([first, second, first]) == [sha256(b"1"), sha256(b"2"), sha256(b"1")]
    assert sorted(computed) == [first, second]


@pytest.mark.usefixtures("kept")
def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12")
    assert digests([path]) == [sha256(b"12")]
    path.unlink()  # so that it differs in more than times, whose resolution is limited
    (tmp_path / "between").write_bytes(b"")
    path.write_bytes(b"21")
    assert digests([path]) == [sha256(b"21")]


def test_nothing_is_kept_of_a_file_that_was_just_written(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change could have the same timestamps."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a"
    for content in (b"12", b"21"):
        path.write_bytes(content)
        assert digests([path]) == [sha256(content)]
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"abc", b"\xff" * 64, b"0" * 65])
def test_what_is_damaged_is_computed_again(
    kept: Path, damage: bytes, tmp_path: Path, computed: list[Path]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    digests([path])
    (entry,) = kept.iterdir()
    entry.write_bytes(damage)
    for _ in range(2):
        assert digests([path]) == [sha256(b"1")]
    assert len(computed) == 2
    assert entry.read_text() == sha256(b"1")


def test_few_are_kept(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KEPT", 3)
    for number in range(6):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(bytes([number]))
        assert digests([path]) == [sha256(bytes([number]))]
    assert len(list(kept.iterdir())) == 3


def test_a_folder_that_others_may_write_is_not_used(
    kept: Path, tmp_path: Path, computed: list[Path]
) -> None:
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    path = tmp_path / "a"
    path.write_bytes(b"1")
    for _ in range(2):
        assert digests([path]) == [sha256(b"1")]
    assert len(computed) == 2
    assert list(kept.iterdir()) == []


def test_the_hubs_cache_has_digests_for_names(tmp_path: Path, computed: list[Path]) -> None:
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"1")
    (link := tmp_path / "model.safetensors").symlink_to(blob)
    assert digests([link]) == ["ab" * 32]
    assert computed == []
