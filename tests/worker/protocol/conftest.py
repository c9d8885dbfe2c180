"""Small tokenizers, built in memory."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "hello world, the quick brown fox jumps over the lazy dog; naïve café, 12345 tokens",
    "grüße aus köln: ein gruß, zwei füße, drei bücher. émile dit: déjà vu, garçon!",
    "привет мир и снова привет; 你好世界 你好 ☃ 🙂🙃 👩‍👩‍👧 done.",
]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("два слова")])
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Metaspace with byte fallback, as in Llama 2 and Mistral."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in ["▁", "▁hello", "▁world", "h", "e", "l", "o", "é", "▁gar", "ç", "on", "."]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
