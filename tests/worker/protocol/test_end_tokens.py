from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from worker.protocol.text.end_tokens import eos_token_ids, tokenizer_eos_token_id
from worker.protocol.text.tokenizer import load_tokenizer

NAMES = ["<unk>", "a", "</s>"]
MODELS: dict[str, Any] = {
    "BPE": lambda: models.BPE({name: i for i, name in enumerate(NAMES)}, []),
    "WordLevel": lambda: models.WordLevel({name: i for i, name in enumerate(NAMES)}, "<unk>"),
    "WordPiece": lambda: models.WordPiece({name: i for i, name in enumerate(NAMES)}),
    "Unigram": lambda: models.Unigram([(name, 0.0) for name in NAMES], 0),
}


def write(folder: Path, kind: str, **config: object) -> str:
    backend = Backend(MODELS[kind]())
    backend.add_special_tokens(["<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("kind", MODELS)
def test_the_tokenizers_own_end_token_is_found(tmp_path: Path, kind: str) -> None:
    """As an added token or as one of the vocabulary, by its name or as an object."""
    for token, token_id in (("<|im_end|>", 3), ("</s>", 2), ("missing", None)):
        for value in (token, {"content": token, "special": True}):
            model = write(tmp_path, kind, eos_token=value)
            assert tokenizer_eos_token_id(model) == token_id
            assert load_tokenizer(model).token_id(token) == token_id


def test_special_tokens_map_names_it_too(tmp_path: Path) -> None:
    model = write(tmp_path, "BPE")
    assert tokenizer_eos_token_id(model) is None
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert tokenizer_eos_token_id(model) == 3
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizer_eos_token_id(model)
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer_eos_token_id(model) is None


def test_end_tokens_of_a_config() -> None:
    assert eos_token_ids({}) == eos_token_ids({"eos_token_id": None}) == ()
    assert eos_token_ids({"eos_token_id": 2}) == (2,)
    assert eos_token_ids({"eos_token_id": [3, 2]}) == (3, 2)
    for value in ("</s>", [2, "3"], True, 2.0):
        with pytest.raises(ValueError, match="eos_token_id"):
            eos_token_ids({"eos_token_id": value})
