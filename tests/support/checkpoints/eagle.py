"""EAGLE-3 heads of random models, and EAGLE-3's forward pass in plain torch.

By construction, a head of `write_predicting` predicts nearly as well as its model. The model's
embeddings and all layers except the last add little to the residual stream, and the head repeats
the last layer, which reads the next token's embedding. Except for the first token, the head
therefore computes at each position what the model computes at the next one, and its predictions
depend on its own KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.support.checkpoints.families import SPECIMENS
from tests.support.checkpoints.latents import LATENTS
from tests.support.checkpoints.specimen import VOCAB_SIZE, Model, Specimen, write

Tensors = dict[str, torch.Tensor]
TAPS = (2, 1, 0)
"""Default taps of a model with three layers: layer 2, the middle layer, and the third from last."""
DRAFT_VOCAB_SIZE = 90
_SMALL = 1e-4
"""Factor for the outputs of all layers before the last."""
_THETA = 500.0
_EPS = 1e-5
_MLP: Mapping[str, tuple[int, ...]] = {
    "mlp.gate_proj": (48, 64),
    "mlp.up_proj": (48, 64),
    "mlp.down_proj": (64, 48),
}
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": _EPS,
    "rope_theta": _THETA,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "tie_word_embeddings": False,
}
LATENT: Mapping[str, Any] = {
    **LATENTS,
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "head_dim": None,
}
"""Keys of a head with latent attention (MLA)."""
_PLAIN = Specimen(
    name="Llama",
    settings={"rope_parameters": {"rope_type": "default", "rope_theta": _THETA}},
)
_DENSE_LATENTS = replace(
    SPECIMENS["deepseek-v3"],
    settings={**SPECIMENS["deepseek-v3"].settings, **_PLAIN.settings, "first_k_dense_replace": 3},
)
"""A model with the attention of DeepSeek-V3 and an MLP in each of its three layers."""
SPECULATORS: Mapping[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "model_type": None,
    "transformer_layer_config": dict(_CONFIG) | {"architectures": None, "draft_vocab_size": None},
}


def write_model(name: str, folder: Path) -> Model:
    """Writes a random model without windows; returns the transformers model."""
    return write(_PLAIN if name == "plain" else SPECIMENS[name], folder)


def write_head(folder: Path, keys: Mapping[str, Any] = {}, *, prefix: str = "midlayer.") -> Tensors:
    """Writes a random head with additional keys in its config.json; returns its tensors, with names
    that start with `midlayer.`."""
    config = {**_CONFIG, **keys}
    generator = torch.Generator().manual_seed(11)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    taps = config.get("eagle_aux_hidden_state_layer_ids", TAPS)
    shapes = {**_MLP, **_attention(config), **dict.fromkeys(_NORMS, (64,))}
    tensors = {
        f"midlayer.{name}.weight": drawn(*shape) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    tensors |= {"fc.weight": drawn(64, len(taps) * 64), "norm.weight": 1 + drawn(64)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + drawn(len(taps) * 64)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{n}.weight": 1 + drawn(64) for n in range(len(taps))}
    if config["draft_vocab_size"] is not None:
        tensors["lm_head.weight"] = drawn(config["draft_vocab_size"], 64)
    if config["draft_vocab_size"] == DRAFT_VOCAB_SIZE:
        kept = torch.arange(VOCAB_SIZE - DRAFT_VOCAB_SIZE, VOCAB_SIZE)
        kept[:7] = torch.arange(7)
        tensors["d2t"] = kept - torch.arange(DRAFT_VOCAB_SIZE)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True)
    _save(folder, config, tensors, prefix)
    return tensors


def _attention(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a head's attention, by name."""
    heads = config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        shapes = {"q": (16 * heads, 128), "o": (64, 16 * heads)}
        shapes |= dict.fromkeys("kv", (16 * config["num_key_value_heads"], 128))
        return {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    rank, kv_rank, plain, rotary, value = (
        config[key]
        for key in (
            *("q_lora_rank", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )
    )
    queries = heads * (plain + rotary)
    latent: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (kv_rank + rotary, 128),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (plain + value), kv_rank),
        "o_proj": (64, heads * value),
    }
    if rank is None:
        latent["q_proj"] = queries, 128
    else:
        latent |= {"q_a_proj": (rank, 128), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    return {f"self_attn.{name}": shape for name, shape in latent.items()}


def _save(folder: Path, config: Mapping[str, Any], tensors: Tensors, prefix: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in renamed.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_predicting(folder: Path, keys: Mapping[str, Any] = {}) -> tuple[Path, Path]:
    """Writes a model and a head that predicts nearly as well; returns their folders."""
    model, head = folder / "model", folder / "head"
    plain = _DENSE_LATENTS if "kv_lora_rank" in keys else _PLAIN
    write(replace(plain, settings={**plain.settings, "rms_norm_eps": _EPS}), model)
    tensors, last = load_file(model / "model.safetensors"), "model.layers.2."
    for key, tensor in tensors.items():
        if key.endswith(("o_proj.weight", "down_proj.weight")) and not key.startswith(last):
            tensor *= _SMALL
    embedding = tensors["model.embed_tokens.weight"]
    embedding *= 0.01 / embedding.square().mean(-1, keepdim=True).sqrt()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    drafting = write_head(head, keys)
    for name, random in drafting.items():
        own = tensors.get(name.replace("midlayer.", last))
        if own is not None and own.shape != random.shape:  # reads two inputs
            own = torch.cat((own, 0.001 * torch.randn_like(own)), dim=1)
        drafting[name] = random if own is None else own
    drafting["midlayer.hidden_norm.weight"].fill_(0.01)
    drafting["fc.weight"] *= 0.01
    drafting["norm.weight"] = tensors["model.norm.weight"]
    kept = drafting["d2t"] + torch.arange(DRAFT_VOCAB_SIZE)
    drafting["lm_head.weight"] = tensors["lm_head.weight"][kept]
    _save(head, {**_CONFIG, **keys}, drafting, "midlayer.")
    return model, head


class ReferenceHead:
    """EAGLE-3's forward pass, implemented from its formulas, and greedy drafts.

    Args:
        tensors: the head's tensors.
        keys: flags of its config.json.
        model: transformers' model, whose hidden states are the taps.
    """

    def __init__(self, tensors: Tensors, keys: Mapping[str, Any], model: Any) -> None:
        self._tensors, self._keys, self._model = tensors, keys, model
        self._embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight)
        self._head = tensors.get("lm_head.weight", model.get_output_embeddings().weight)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Drafts that follow these tokens."""
        ids = torch.tensor([list(tokens)])
        states = self._model(ids, output_hidden_states=True).hidden_states
        taps = [states[tap][0, :-1] for tap in self._keys.get("taps", TAPS)]
        if self._keys.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{n}") for n, tap in enumerate(taps)]
        joined = torch.cat(taps, dim=-1)
        if self._keys.get("norm_before_fc"):
            joined = self._norm(joined, "input_norm")
        hidden, following = joined @ self._tensors["fc.weight"].T, list(tokens[1:])
        found = list[int]()
        for _ in range(count):
            total = self._layer(self._embedding[following], hidden)[-1:]
            normed = self._norm(total, "norm")
            best = int((normed @ self._head.T).argmax())
            if "d2t" in self._tensors:
                best += int(self._tensors["d2t"][best])
            found.append(best)
            following.append(best)
            recycled = normed if self._keys.get("norm_output") else total
            hidden = torch.cat((hidden, recycled))
        return found

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Sum of the layer's output and residual, [T, 64]."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if self._keys.get("norm_before_residual") else hidden
        both = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normed), dim=-1)
        is_latent = "midlayer.self_attn.kv_b_proj.weight" in self._tensors
        q, k, v = self._latent_heads(both) if is_latent else self._heads(both)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = attended.transpose(0, 1).flatten(1) @ self._weight("self_attn.o_proj").T
        total = out + residual
        normed = self._norm(total, "midlayer.post_attention_layernorm")
        gate, up = (normed @ self._weight(f"mlp.{name}_proj").T for name in ("gate", "up"))
        return total + (silu(gate) * up) @ self._weight("mlp.down_proj").T

    def _heads(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all heads, [heads, T, 16]."""
        q, k, v = (
            (both @ self._weight(f"self_attn.{name}_proj").T).unflatten(1, (-1, 16)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
        return q, k, v

    def _latent_heads(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all heads from latents, [4, T, size]; rotary embedding pairs
        adjacent dimensions."""
        plain, rotary, value = (
            LATENTS[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        first = "q_proj" if "midlayer.self_attn.q_proj.weight" in self._tensors else "q_a_proj"
        queries = both @ self._weight(f"self_attn.{first}").T
        if first == "q_a_proj":
            normed = self._norm(queries, "midlayer.self_attn.q_a_layernorm")
            queries = normed @ self._weight("self_attn.q_b_proj").T
        latents, rotating = (both @ self._weight("self_attn.kv_a_proj_with_mqa").T).split(
            [LATENTS["kv_lora_rank"], rotary], dim=-1
        )
        normed = self._norm(latents, "midlayer.self_attn.kv_a_layernorm")
        up = (normed @ self._weight("self_attn.kv_b_proj").T).unflatten(1, (4, -1)).transpose(0, 1)
        keys, values = up.split([plain, value], dim=-1)
        q, q_rotating = queries.unflatten(1, (4, -1)).transpose(0, 1).split([plain, rotary], dim=-1)
        q_rotating, rotating = (_rotated(_halves(one)) for one in (q_rotating, rotating[None]))
        rotating = rotating.expand(len(keys), -1, -1)
        return torch.cat((q, q_rotating), -1), torch.cat((keys, rotating), -1), values

    def _weight(self, name: str) -> torch.Tensor:
        return self._tensors[f"midlayer.{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        return x * scale * self._tensors[f"{name}.weight"]


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Reorders pairs of adjacent dimensions into two halves, which leaves dot products equal."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [heads, T, size]."""
    size = x.shape[2]
    frequencies = 1.0 / _THETA ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
