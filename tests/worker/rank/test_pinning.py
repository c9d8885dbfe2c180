"""Host memory is pinned in pieces that no row crosses, all of which are unpinned."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from worker.rank import pinning
from worker.rank.cpu import lazy_zeros
from worker.rank.pinning import PinnedRows


class FakeDriver:
    def __init__(self, num_pinnable: int) -> None:
        self.num_pinnable = num_pinnable
        self.pinned: dict[int, int] = {}
        self.num_pinned = 0

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        if self.num_pinned == self.num_pinnable:
            return 2
        self.num_pinned += 1
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def make_driver(monkeypatch: pytest.MonkeyPatch, num_pinnable: int = 1000) -> FakeDriver:
    driver = FakeDriver(num_pinnable)
    fake = SimpleNamespace(cudart=lambda: driver, set_device=lambda _: None)
    monkeypatch.setattr(pinning.torch, "cuda", fake)
    monkeypatch.setattr(pinning, "_PIECE_BYTES", 3 * mmap.PAGESIZE)
    return driver


@pytest.mark.parametrize("row_bytes", [100, 4096, 12288, 40000])
def test_pieces_begin_and_end_with_rows(monkeypatch: pytest.MonkeyPatch, row_bytes: int) -> None:
    driver = make_driver(monkeypatch)
    tensor = lazy_zeros((6_000_000 // row_bytes, row_bytes), torch.uint8)
    tensor[-1] = 7
    pinned = PinnedRows(tensor, torch.device("cpu"))
    assert len(driver.pinned) == 1
    pinned.start()
    assert pinned._thread is not None
    pinned._thread.join()
    at = tensor.data_ptr()
    for address, num_bytes in sorted(driver.pinned.items()):
        assert address == at
        assert address % mmap.PAGESIZE == 0
        assert num_bytes % row_bytes == 0
        at += num_bytes
    assert at == tensor.data_ptr() + tensor.nbytes
    assert tensor[-1, 0] == 7
    pinned.close()
    assert not driver.pinned


def test_what_cannot_be_pinned_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = lazy_zeros((100, 4096), torch.uint8)
    make_driver(monkeypatch, 0)
    with pytest.raises(ValueError, match="lower --host-cache-gib"):
        PinnedRows(tensor, torch.device("cpu"))
    driver = make_driver(monkeypatch, 4)
    pinned = PinnedRows(tensor, torch.device("cpu"))
    pinned.start()
    pinned.close()
    assert not driver.pinned
    assert driver.num_pinned <= 4
