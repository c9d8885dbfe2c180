"""Long strings of a body are decoded in pieces, with the result of decoding it at once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.openai import long_strings, structured
from router.api.openai.completions import CompletionRequest
from router.api.openai.long_strings import CUT_BYTES, LONG_BYTES, CutJson
from router.api.openai.protocol import parse_body
from router.errors import ApiError
from worker.protocol.structured import MAX_GRAMMAR_BYTES

WHOLE = msgspec.json.decode
CHARACTERS = st.sampled_from(["a", '"', "\\", "u", "d", "8", "é", "€", "🙂", "\n", "\x01", "/"])
UNITS = st.sampled_from(
    [
        *(c.encode() for c in 'au8 é€🙂"\\'),
        *rb"\n \\ \" \u00e9 \ud83d\ude00 \ud83d \ude00 \u12".split(),
    ]
)
VALUES = st.recursive(
    st.none() | st.integers() | st.text(CHARACTERS, max_size=60),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(CHARACTERS, max_size=40), inner),
)


def small_pieces(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(long_strings, "CUT_BYTES", 8)
    patch.setattr(long_strings, "LONG_BYTES", 5)
    patch.setattr(long_strings, "CHUNK_BYTES", 16)
    patch.setattr(long_strings, "_PIECE_BYTES", 17)


@given(value=VALUES, ascii_only=st.booleans())
def test_valid_texts_are_decoded_as_at_once(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        assert CutJson(body).decode() == value


@given(units=st.lists(UNITS, max_size=40))
def test_any_text_is_decoded_or_rejected_as_at_once(units: list[bytes]) -> None:
    body = b'{"a":["' + b"".join(units) + b'"]}'
    try:
        expected = WHOLE(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        try:
            decoded = CutJson(bytearray(body)).decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            decoded = None
    assert decoded == expected


def filled(unit: bytes) -> bytes:
    return b'{"prompt":"hi","user":"' + unit * (2 * CUT_BYTES // len(unit)) + b'"}'


@pytest.mark.parametrize(
    "unit", [b"a", b'\\"', b"\\\\", b"\\u0041", b"\\ud83d\\ude00", "🙂".encode()]
)
def test_no_call_decodes_much(monkeypatch: pytest.MonkeyPatch, unit: bytes) -> None:
    sizes: list[int] = []

    def decode(text: bytes, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(text))
        return WHOLE(text, *args, **kwargs)

    body = filled(unit)
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "decode", decode)
        fields = parse_body(body, CompletionRequest)
    assert fields.user == WHOLE(body)["user"]
    assert max(sizes) < LONG_BYTES


def test_grammars_are_measured_with_their_long_strings() -> None:
    grammar = b"a" * (2 * MAX_GRAMMAR_BYTES)
    padding = b" " * CUT_BYTES
    body = b'{"structured_outputs":{"regex":"' + grammar + b'"}' + padding + b"}"
    with pytest.raises(ApiError, match="the maximum for a grammar"):
        structured.check_grammar_sizes(CutJson(body))


def test_a_text_cannot_refer_to_its_own_long_strings() -> None:
    body = filled(b"a")
    assert CutJson(body).skeleton != CutJson(body).skeleton
