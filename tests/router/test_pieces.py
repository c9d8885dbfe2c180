"""Chats tokenized in pieces have the same tokens as when tokenized as a whole."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from router.tokens.pieces import PieceMemo, _size
from tests.support.effort import cases
from worker.protocol.text.tokenizer import SHORT_TEXT, Tokenizer

_CORPUS = ["Tell me of the ferry, and the old harbour: hello <world>!  2 x 3\n\n"] * 4
_START, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = f"{{% for m in messages %}}{_START}{{{{ m.content }}}}{_END}{{% endfor %}}"


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _metaspace(scheme: str) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _prepended() -> Backend:
    """As in the first Llama checkpoints."""
    backend = _metaspace("never")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte level": _byte_level,
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "prepended": _prepended,
}
_TOKENS: dict[str, list[AddedToken | str]] = {
    "plain": [_START, _END],
    "greedy for space": [
        AddedToken(_START, lstrip=True, special=True, normalized=False),
        AddedToken(_END, rstrip=True, special=True, normalized=False),
    ],
    "whole words": [
        _END,
        AddedToken("ferry", single_word=True, normalized=False),
        AddedToken("s>", special=True, normalized=False),
    ],
    "overlapping": [
        _START,
        AddedToken("me<|im", normalized=False),
        AddedToken("<|im_end|><|", special=True, normalized=False),
        _END,
        AddedToken("<old>", special=True, normalized=True),
    ],
}
_FRAGMENTS = [_START, _END, "<|", "|>", "<|im", "me", "ferry", "s>", "<old>", " ", "  ", "\n", "é"]


@pytest.mark.parametrize("tokens", _TOKENS)
@pytest.mark.parametrize("kind", _BACKENDS)
def test_tokens_are_those_of_the_whole(kind: str, tokens: str) -> None:
    backend = _BACKENDS[kind]()
    backend.add_special_tokens([token for token in _TOKENS[tokens] if _is_special(token)])
    backend.add_tokens([token for token in _TOKENS[tokens] if not _is_special(token)])
    contents = [str(getattr(token, "content", token)) for token in _TOKENS[tokens]]
    tokenizer = Tokenizer(backend, chat_template="".join(contents))
    memo = PieceMemo(tokenizer, max_bytes=8000)
    words = st.sampled_from([*_FRAGMENTS, "Tell me of the ferry", "old harbour"])

    @settings(max_examples=cases(40), deadline=None)
    @given(st.lists(words, max_size=12).map("".join), st.integers(0, 3))
    def same(text: str, turns: int) -> None:
        filling = f"{_START}user\nTell me of the ferry, and <old> harbours{_END}\n" * 16
        for turn in range(turns + 1):
            whole = text + filling + text * turn
            assert len(whole) > SHORT_TEXT
            expected = tokenizer.encode(whole, add_special_tokens=False)
            assert memo.encode(whole).tolist() == expected
        assert "".join(tokenizer.pieces(whole)) == whole

    same()


def test_a_longer_conversation_is_tokenized_from_where_it_grew() -> None:
    backend = _byte_level()
    backend.add_special_tokens([_START, _END])
    tokenized: list[str] = []

    class Watched(Tokenizer):
        def encode_pieces(self, pieces: list[str]) -> list[list[int]]:  # type: ignore[override]
            tokenized.extend(pieces)
            return super().encode_pieces(pieces)

    memo = PieceMemo(Watched(backend, chat_template=_TEMPLATE))
    text = "".join(f"{_START}user\n{'the ferry ' * 40}{turn}{_END}\n" for turn in range(5))
    memo.encode(text)
    assert len(tokenized) == 6, "five messages, and one end of all of them"
    tokenized.clear()
    memo.encode(f"{text}{_START}assistant\nIt left.{_END}\n")
    assert tokenized == [f"{_START}assistant\nIt left."]
    tokenized.clear()
    memo.encode(text, "another tenant's")
    assert len(tokenized) == 6, "scopes do not learn from each other"


def test_cuts_are_before_what_the_template_writes_alone() -> None:
    backend = _byte_level()
    backend.add_special_tokens([_START, _END, *(f"<|place_{n}|>" for n in range(1000))])
    tokenizer = Tokenizer(backend, chat_template=_TEMPLATE)
    message = f"{_START}user\n<|place_17|>the ferry"
    assert tokenizer.pieces(f"{message}{_END}\n" * 2) == [message, f"{_END}\n"] * 2
    assert Tokenizer(backend).pieces(message * 2) == [message * 2]


def test_what_is_remembered_is_bounded() -> None:
    backend = _byte_level()
    backend.add_special_tokens([_START, _END])
    tokenizer = Tokenizer(backend, chat_template=_TEMPLATE)
    memo = PieceMemo(tokenizer, max_bytes=9000)
    texts = [f"{_START}user\n{turn}{'the ferry ' * size}" for turn, size in enumerate([200] * 9)]
    texts += [f"{_START}user\n{'too much ' * 400}"]

    def encode(text: str) -> bool:
        expected = tokenizer.encode(text, add_special_tokens=False)
        return memo.encode(text).tolist() == expected

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(encode, texts * 8))
    kept = memo._pieces
    assert len(kept) > 1
    assert memo._num_bytes == sum(_size(key, tokens) for key, tokens in kept.items()) <= 9000


@pytest.mark.parametrize("content", ["ab", "ä🙂", "the ferry and the old harbour " * 100])
def test_memory_is_what_is_counted(content: str) -> None:
    """For many small pieces, most of the memory is object overhead."""
    backend = _byte_level()
    backend.add_special_tokens([_START, _END])
    limit = 1 << 18
    memo = PieceMemo(Tokenizer(backend, chat_template=_TEMPLATE), limit)
    chats = [
        "".join(f"{_START}{chat}.{n}{content}" for n in range(512 if len(content) < 9 else 16))
        for chat in range(8)
    ]
    memo.encode("".join(chats[-1]))  # creates threads and tables
    memo = PieceMemo(memo._tokenizer, limit)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for chat in chats:
            memo.encode(chat)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert limit / 1.5 < held < limit * 1.5


def _is_special(token: AddedToken | str) -> bool:
    return isinstance(token, str) or token.special
