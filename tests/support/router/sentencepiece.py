"""Checkpoints with a SentencePiece vocabulary: words start with a space, and bytes represent other
characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

WORDS = (
    "▁The",
    "▁capital",
    "▁of",
    "▁France",
    "▁is",
    "▁Paris",
    "▁",
    ".",
    "[",
    "]",
    "INST",
    "/",
    "▁[",
)
DECODERS: dict[str, Any] = {
    "Llama 2": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    ),
    "Gemma": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ),
    "Metaspace": decoders.Metaspace(),
}
"""Decoders of such vocabularies, keyed by origin."""
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} "
    "[/INST]{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)


def build_sentencepiece(folder: Path, kind: str) -> None:
    """Writes tokenizer files with one of DECODERS."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(letter, -10.0) for letter in "abcdefghijklmnopqrstuvwxyzTFPINS"]
    vocab += [(word, -2.0) for word in WORDS]
    backend = Backend(models.Unigram(vocab, 0, True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = DECODERS[kind]
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
