"""Tokenizers of words that add special tokens as BERT, XLM-RoBERTa and Qwen3-Embedding do."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import PostProcessor, RobertaProcessing, TemplateProcessing

CLS, SEP = 2, 3
SPECIAL = [("[CLS]", CLS), ("[SEP]", SEP)]
KINDS: dict[str, PostProcessor | None] = {
    "bert": TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIAL
    ),
    "roberta": RobertaProcessing(SPECIAL[1], SPECIAL[0]),
    "qwen3": TemplateProcessing(single="$A [SEP]", pair="$A $B [SEP]", special_tokens=SPECIAL),
    "plain": None,
}


def build_pair_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer whose words are letters."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": CLS, "[SEP]": SEP}
    words |= {letter: len(words) + index for index, letter in enumerate(string.ascii_lowercase)}
    backend = Tokenizer(WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken(name, special=True) for name in list(words)[:4]])
    if (processor := KINDS[kind]) is not None:
        backend.post_processor = processor
    return backend


def save_pair_tokenizer(kind: str, folder: Path) -> None:
    """Writes the tokenizer's files."""
    build_pair_tokenizer(kind).save(str(folder / "tokenizer.json"))
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
