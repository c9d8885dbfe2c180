"""Incremental detokenization after a prompt equals decoding as a whole, for every decoder of the
library."""

from __future__ import annotations

import codecs
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend

from tests.support.effort import cases
from worker.protocol.text.tokenizer import Tokenizer

LLAMA = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)
DECODERS: dict[str, Any] = {
    "none": None,
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "Metaspace first": decoders.Metaspace("▁", prepend_scheme="first"),
    "Metaspace never": decoders.Metaspace("▁", prepend_scheme="never"),
    "WordPiece": decoders.WordPiece(),
    "WordPiece kept": decoders.WordPiece(cleanup=False),
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "CTC kept": decoders.CTC(cleanup=False),
    "ByteFallback": decoders.ByteFallback(),
    "Fuse": decoders.Fuse(),
    "Strip": decoders.Strip(" ", 1, 0),
    "Strip right": decoders.Strip("a", 0, 1),
    "Replace": decoders.Replace("▁", " "),
    "Replace by pattern": decoders.Replace(Regex("[▁ab]"), " "),
    "Llama": decoders.Sequence(list(LLAMA)),
    "Gemma": decoders.Sequence(list(LLAMA[:3])),
    "strips two": decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "nested": decoders.Sequence([decoders.Sequence(list(LLAMA[:2])), decoders.Fuse()]),
    "bytes, fused": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "bytes, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "bytes, replaced": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "  ")]),
}
"""A decoder of each kind, alone and in sequences used by checkpoints. None strips the end of a
whole text: the library panics if that is shorter than what it strips."""

NAMES = (
    *("▁", "▁▁", "▁a", "a", "b", "ab", "▁b▁", "##a", "##b", "a</w>", "b</w>", ".", "'s", " ", "|"),
    *("<pad>", "é", "Ġ", "Ġa", "Ċ", "\ufffd", "ï¿½", "ðŁ", "ĻĤ", "âľ", "ĵ", "ÿ", "aâ"),
    *(f"<0x{byte:02X}>" for byte in b"\xe2\x9c\x93\xf0\x9f\x99\x82\xff\x20a"),
)
SPECIAL = ("<s>", "</s>")
CHARACTERS = ([b"\xe2", b"\x9c", b"\x93"], [b"\xf0", b"\x9f", b"\x99", b"\x82"])
"""Bytes of characters, one token each."""


def tokenizer_of(decoder: Any) -> Tokenizer:
    vocab = {name: number for number, name in enumerate((*SPECIAL, *NAMES))}
    backend = Backend(models.WordLevel(vocab, unk_token="<s>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend)


TOKENIZERS = {name: tokenizer_of(decoder) for name, decoder in DECODERS.items()}

FALLBACKS = [t for name, t in TOKENIZERS.items() if "ByteFallback" in repr(DECODERS[name])]


def test_no_decoder_of_the_library_is_left_out() -> None:
    kinds = {kind for kind in vars(decoders) if kind[0].isupper()} - {"Decoder", "DecodeStream"}
    assert kinds == {type(decoder).__name__ for decoder in DECODERS.values()} - {"NoneType"}


def token_lists(tokenizer: Tokenizer, max_size: int) -> st.SearchStrategy[list[int]]:
    """Any tokens, including ids without a token; among them whole or cut characters as byte
    tokens."""
    size = tokenizer.vocab_size
    characters = [
        [token for byte in character if (token := tokenizer.token_id(f"<0x{byte.hex().upper()}>"))]
        for character in CHARACTERS
    ]
    run = st.one_of(
        st.integers(0, size + 1).map(lambda token: [token]), st.sampled_from(characters)
    )
    lists = st.lists(run, max_size=max_size).map(lambda runs: list(chain.from_iterable(runs)))
    return st.tuples(lists, st.integers(0, 3)).map(lambda drawn: drawn[0][: -drawn[1] or None])


def completion_text(
    tokenizer: Tokenizer, prompt: list[int], completion: list[int], **options: Any
) -> str:
    context = tokenizer.context(prompt, **options)
    detokenizer = tokenizer.detokenizer(context=context, **options)
    pieces = [detokenizer.push([token_id]) for token_id in completion]
    return "".join([*pieces, detokenizer.flush()])


def certain(tokenizer: Tokenizer, token_ids: list[int], options: dict[str, bool]) -> str:
    """Text that later tokens do not change, without an incomplete character."""
    context = tokenizer.context(token_ids, **options)
    rest = tokenizer.detokenizer(context=context, **options).flush()
    return tokenizer.decode(token_ids, **options).removesuffix(rest)


def last_bytes(token_ids: list[int], options: dict[str, bool]) -> bytes:
    """Bytes of the byte tokens at the end, of which skipped tokens are no end."""
    names = dict(enumerate((*SPECIAL, *NAMES)))
    run = bytearray()
    for token_id in reversed(token_ids):
        name = names.get(token_id, "")
        if name.startswith("<0x"):
            run.append(int(name[3:5], 16))
        elif name and not (name in SPECIAL and options["skip_special_tokens"]):
            break
    return bytes(reversed(run))


def is_stable(tokenizer: Tokenizer, token_ids: list[int], options: dict[str, bool]) -> bool:
    """Whether the text of the tokens only grows with each of them.

    ByteFallback decodes no character of a run of byte tokens if any of them is invalid.
    """
    whole = tokenizer.decode(token_ids, **options)
    if tokenizer in FALLBACKS:
        if "\ufffd" in whole.rstrip("\ufffd"):
            return False
        try:  # the last run of byte tokens, which may end within a character
            codecs.getincrementaldecoder("utf-8")().decode(last_bytes(token_ids, options))
        except UnicodeDecodeError:
            return False
    texts = [tokenizer.decode(token_ids[:end], **options) for end in range(len(token_ids))]
    return all(whole.startswith(text.rstrip("\ufffd")) for text in texts)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data())
@settings(max_examples=cases(200, 20), deadline=None)
def test_prompt_and_completion_decode_as_a_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    options = {"skip_special_tokens": data.draw(st.booleans())}
    prompt = data.draw(token_lists(tokenizer, max_size=20))
    completion = data.draw(token_lists(tokenizer, max_size=30))
    text = completion_text(tokenizer, prompt, completion, **options)
    if is_stable(tokenizer, prompt + completion, options):
        before = certain(tokenizer, prompt, options)
        whole = tokenizer.decode(prompt + completion, **options)
        if tokenizer in FALLBACKS and "\ufffd" in before:
            # A prompt that ends within a character: alone, its last run of bytes has no text.
            assert whole.endswith(text)
        else:
            assert before + text == whole


@pytest.mark.parametrize("tokenizer", FALLBACKS)
@given(garbage=st.lists(st.sampled_from(["<0xFF>", "<0xE2>", "<0x9C>"]), max_size=20))
@settings(max_examples=cases(100), deadline=None)
def test_text_behind_invalid_bytes_is_right(tokenizer: Tokenizer, garbage: list[str]) -> None:
    def ids(*names: str) -> list[int]:
        found = map(tokenizer.token_id, names)
        return [token_id for token_id in found if token_id is not None]

    text = completion_text(tokenizer, ids("a"), ids("▁b", *garbage, "▁a", "b", "▁ab"))
    assert text.startswith(tokenizer.decode(ids("a", "▁b"))[1:])
    assert text.endswith(tokenizer.decode(ids("a", "▁a", "b", "▁ab"))[1:])
    assert len(text) <= len(tokenizer.decode(ids("a", "▁b", *garbage, "▁a", "b", "▁ab")))
