"""Frames on a stream that is split anywhere."""

from __future__ import annotations

import pytest

from worker.protocol.frames import MAX_PAYLOAD_BYTES, FrameReader, frame

PAYLOADS = [b"abc", b"", bytes(range(256)) * 3]
STREAM = b"".join(map(frame, PAYLOADS))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 100, len(STREAM)])
def test_frames_come_out_whole_however_they_arrive(size: int) -> None:
    reader = FrameReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [found for piece in pieces for found in reader.feed(piece)] == PAYLOADS


def test_a_frame_comes_with_the_piece_that_completes_it() -> None:
    reader = FrameReader()
    assert reader.feed(STREAM[:9]) == PAYLOADS[:1]
    assert reader.feed(STREAM[9:13]) == PAYLOADS[1:2]
    assert reader.feed(STREAM[13:-1]) == []
    assert reader.feed(STREAM[-1:] + STREAM) == [PAYLOADS[2], *PAYLOADS]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little") + bytes(5)]
)
def test_invalid_frames_are_rejected(data: bytes) -> None:
    with pytest.raises(ConnectionError, match="corrupt stream: frame of"):
        FrameReader().feed(data)
