"""Frames on a stream that is cut anywhere."""

from __future__ import annotations

import pytest

from worker.wire.frames import CALL, ITEM, MAX_PAYLOAD_BYTES, REPLY, FrameReader, frame

FRAMES = [(ITEM, 0, b"abc"), (REPLY, 7, b""), (CALL, 2**32 - 1, bytes(range(256)) * 3)]
STREAM = b"".join(frame(*parts) for parts in FRAMES)


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 11, 12, 13, 100, len(STREAM)])
def test_frames_come_out_whole_however_they_arrive(size: int) -> None:
    reader = FrameReader()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [found for piece in pieces for found in reader.feed(piece)] == FRAMES


def test_a_frame_comes_with_the_piece_that_completes_it() -> None:
    reader = FrameReader()
    assert reader.feed(STREAM[:20]) == FRAMES[:1]
    assert reader.feed(STREAM[20:22]) == FRAMES[1:2]
    assert reader.feed(STREAM[22:-1]) == []
    assert reader.feed(STREAM[-1:] + STREAM) == [FRAMES[2], *FRAMES]


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", (MAX_PAYLOAD_BYTES + 1).to_bytes(4, "little") + bytes(5)]
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ConnectionError, match="a frame of kind"):
        FrameReader().feed(data)
