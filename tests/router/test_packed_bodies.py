"""Bodies compressed with gzip: the decompressed size is limited, piece by piece."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api.http import body as body_module

BODY = json.dumps({"prompt": "hi", "max_tokens": 5, "user": "x" * 3000}).encode()
PACKED = gzip.compress(BODY, mtime=0)
PATH = "/v1/completions"


async def post(rig: Any, content: Any, encoding: str = "gzip") -> httpx.Response:
    return await rig.client.post(PATH, content=content, headers={"content-encoding": encoding})


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", True), ("GZip ", True), ("identity", False)]
)
async def test_a_packed_body_is_that_body(rig: Any, encoding: str, pack: bool) -> None:
    await rig.start()
    response = await post(rig, gzip.compress(BODY) if pack else BODY, encoding)
    assert response.status_code == 200, response.text
    assert rig.submits()[0].sampling.max_tokens == 5


@pytest.mark.parametrize("piece", [1, 7, 1 << 18])
async def test_in_whatever_parts_it_comes_and_is_unpacked(
    rig: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    await rig.start()
    monkeypatch.setattr(body_module, "PIECE_BYTES", piece)
    packed = gzip.compress(BODY)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), 5):
            yield packed[start : start + 5]

    response = await post(rig, parts())
    assert response.status_code == 200, response.text


async def test_a_small_body_that_unpacks_to_much_is_refused_early(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.start()
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES", 2**20)
    unpacked = 0
    decompress = body_module._Gunzip.pieces

    def counted(self: Any, part: bytes) -> Any:
        nonlocal unpacked
        for piece in decompress(self, part):
            unpacked += len(piece)
            yield piece

    monkeypatch.setattr(body_module._Gunzip, "pieces", counted)
    response = await post(rig, gzip.compress(bytes(20 * 2**20)))
    assert response.status_code == 413
    assert unpacked <= 2**20 + body_module.PIECE_BYTES
    assert rig.app is not None


async def test_what_is_unpacked_is_in_flight(rig: Any) -> None:
    rig.body_limits = body_module.BodyLimits(bytes_in_flight=2**20)
    await rig.start()
    response = await post(rig, gzip.compress(bytes(2**21)))
    assert response.status_code == 503


@pytest.mark.parametrize(
    "content",
    [
        BODY,
        PACKED[:-4],
        PACKED[:30],
        PACKED[:-8] + b"\0" * 8,
        PACKED + b"more",
        PACKED * 2,
        zlib.compress(BODY),
        b"",
    ],
    ids=["plain", "no size", "half", "wrong sum", "more after it", "two", "zlib", "nothing"],
)
async def test_what_is_no_gzip_is_a_bad_request(rig: Any, content: bytes) -> None:
    await rig.start()
    response = await post(rig, content)
    assert response.status_code == 400, response.text
    assert "gzip" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "x" * 1000])
async def test_other_encodings_are_refused(rig: Any, encoding: str) -> None:
    await rig.start()
    response = await post(rig, gzip.compress(BODY), encoding)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (415, "invalid_request_error")
    assert "gzip" in error["message"]
    assert len(error["message"]) < 100
