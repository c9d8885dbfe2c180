"""Trains a multi-token prediction (MTP) head for a trained model.

    python -m deploy.models.mtp_training deploy/models/demo

The head is distilled from the model's own next-token distributions, because a draft is accepted if
head and model sample the same token. The head's tensors, in the format of Qwen3.5's heads, are
written to ``mtp.safetensors`` in the model's folder, next to an index of all weight files.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Muon
from transformers import Qwen3Config, Qwen3ForCausalLM

from cluster.cli.parser import CommandParser
from deploy.models.batches import Batch, training_batches
from deploy.models.calling import tool_conversations

logger = logging.getLogger(__name__)

_NICENESS: Final = 5
_BATCH_TOKENS: Final = 1536
_MAX_LENGTH: Final = 512
_MATRIX_LR: Final = 4e-3
_NORM_LR: Final = 3e-3
_WARMUP_STEPS: Final = 20
_DECAY_FROM: Final = 0.3
_SAVE_EVERY: Final = 50
_FURTHER_WEIGHT: Final = 0.5
"""Loss weight of the second draft, which starts from the head's own output."""
_STATE_WEIGHT: Final = 4.0
"""Loss weight of the difference between the head's outputs and the model's states at the next
position, relative to their magnitude. It applies at all positions: later drafts start from these
outputs, as the first draft starts from the model's state."""
HEAD_FILE: Final = "mtp.safetensors"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Pairs(NamedTuple):
    """Keys and values of a layer at all positions, [batch, heads, length, head_dim] each."""

    keys: Tensor
    values: Tensor


class HeadModule(torch.nn.Module):
    """MTP head: a projection of the next token's embedding and the model's last hidden state,
    followed by one layer of the model's kind."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        inner, eps = config.intermediate_size, config.rms_norm_eps
        self.dim, self.theta = dim, float(config.rope_parameters["rope_theta"])
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        shapes = {
            "fc": (size, 2 * size),
            "layers.0.self_attn.q_proj": (self.num_heads * dim, size),
            "layers.0.self_attn.k_proj": (self.num_kv * dim, size),
            "layers.0.self_attn.v_proj": (self.num_kv * dim, size),
            "layers.0.self_attn.o_proj": (size, self.num_heads * dim),
            "layers.0.mlp.gate_proj": (inner, size),
            "layers.0.mlp.up_proj": (inner, size),
            "layers.0.mlp.down_proj": (size, inner),
        }
        norms = {
            "pre_fc_norm_embedding": size,
            "pre_fc_norm_hidden": size,
            "norm": size,
            "layers.0.input_layernorm": size,
            "layers.0.post_attention_layernorm": size,
            "layers.0.self_attn.q_norm": dim,
            "layers.0.self_attn.k_norm": dim,
        }
        self.weights = torch.nn.ParameterDict()
        for name, (rows, columns) in shapes.items():
            values = torch.randn(rows, columns) * columns**-0.5
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(values)
        for name, count in norms.items():
            self.weights[name.replace(".", "/")] = torch.nn.Parameter(torch.ones(count))
        self.eps = eps

    def start_from(self, model: Qwen3ForCausalLM) -> None:
        """Initializes the head with the model's last layer and norm, and its projection so that it
        returns the sum of the embedding and the hidden state."""
        last = f"model.layers.{model.config.num_hidden_layers - 1}."
        size = model.config.hidden_size
        with torch.no_grad():
            for name, values in model.state_dict().items():
                own = name.removeprefix(last).removesuffix(".weight")
                if name.startswith(last):
                    self.weights[f"layers/0/{own.replace('.', '/')}"].copy_(values)
            self.weights["norm"].copy_(model.model.norm.weight)
            self.weights["fc"].copy_(torch.eye(size).repeat(1, 2))

    def load(self, file: Path) -> None:
        """Loads a head written by `save_head`."""
        with torch.no_grad():
            for name, values in load_file(file).items():
                own = name.removeprefix("mtp.").removesuffix(".weight")
                self.weights[own.replace(".", "/")].copy_(values)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in bfloat16, keyed by their checkpoint names."""
        return {
            f"mtp.{name.replace('/', '.')}.weight": weight.detach().bfloat16().contiguous()
            for name, weight in self.weights.items()
        }

    def forward(
        self, embedded: Tensor, hidden: Tensor, first: int, context: _Pairs | None
    ) -> tuple[Tensor, _Pairs]:
        """Returns outputs [batch, length, hidden] after the final norm, and the layer's keys and
        values.

        Args:
            embedded: embeddings of the tokens after the positions, [batch, length, hidden].
            hidden: hidden states at the positions, [batch, length, hidden]: the model's, or the
                head's outputs.
            first: first position.
            context: keys and values of all positions, starting at 0. A position attends to the
                earlier ones and to its own key and value. None uses those of this pass.
        """
        mixed = torch.cat(
            (
                self._norm(embedded, "pre_fc_norm_embedding"),
                self._norm(hidden, "pre_fc_norm_hidden"),
            ),
            dim=-1,
        )
        x = self._product(mixed, "fc")
        attended, pairs = self._attend(self._norm(x, "layers.0.input_layernorm"), first, context)
        x = x + attended
        inner = self._norm(x, "layers.0.post_attention_layernorm")
        gate = functional.silu(self._product(inner, "layers.0.mlp.gate_proj"))
        up = self._product(inner, "layers.0.mlp.up_proj")
        x = x + self._product(gate * up, "layers.0.mlp.down_proj")
        return self._norm(x, "norm"), pairs

    def _attend(self, x: Tensor, first: int, context: _Pairs | None) -> tuple[Tensor, _Pairs]:
        name, length = "layers.0.self_attn.", x.shape[1]
        q = self._norm(self._heads(x, f"{name}q_proj", self.num_heads), f"{name}q_norm")
        k = self._norm(self._heads(x, f"{name}k_proj", self.num_kv), f"{name}k_norm")
        v = self._heads(x, f"{name}v_proj", self.num_kv)
        q, k = self._rotate(q, first), self._rotate(k, first)
        group = self.num_heads // self.num_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        own = _Pairs(k, v)
        earlier = context or own
        scores = (q @ earlier.keys.transpose(-1, -2)).float() * self.dim**-0.5
        num_earlier = earlier.keys.shape[2]
        before = torch.ones(length, num_earlier, dtype=torch.bool).tril(num_earlier - length - 1)
        scores = scores.masked_fill(~before, -torch.inf)
        itself = (q * k).sum(-1, keepdim=True).float() * self.dim**-0.5
        shares = torch.cat((scores, itself), dim=-1).softmax(-1).to(v.dtype)
        out = shares[..., :-1] @ earlier.values + shares[..., -1:] * v
        return self._product(out.transpose(1, 2).flatten(2), f"{name}o_proj"), own

    def _heads(self, x: Tensor, name: str, count: int) -> Tensor:
        return self._product(x, name).unflatten(-1, (count, self.dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        half = self.dim // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = (first + torch.arange(x.shape[2]))[:, None] * frequencies
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name.replace(".", "/")]
        return functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[name.replace(".", "/")])


def head_loss(model: Qwen3ForCausalLM, head: HeadModule, batch: Batch) -> Tensor:
    """Loss of the head's first and second drafts: the cross-entropy with the model's distributions
    at tokens that the model must generate, plus the difference from the model's states."""
    ids = batch.input_ids
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        embedded = model.get_input_embeddings()(ids).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Pair i predicts token i + 2, as the model does from its state at i + 1.
        first, pairs = head(embedded[:, 1:], states[:, :-1], 0, None)
        second, _ = head(embedded[:, 2:], first[:, :-1], 1, pairs)
        targets = batch.is_target
        losses = [
            _cross_entropy(*(model, outputs[:, :-1], states[:, order:-1], targets[:, order + 1 :]))
            for order, outputs in ((1, first), (2, second))
        ]
    distance = (first[:, :-1].float() - states[:, 1:-1].float()).square().mean()
    distance = distance / states.float().square().mean()
    return losses[0] + _FURTHER_WEIGHT * losses[1] + _STATE_WEIGHT * distance


def _cross_entropy(
    model: Qwen3ForCausalLM, outputs: Tensor, states: Tensor, is_target: Tensor
) -> Tensor:
    with torch.no_grad():
        labels = model.lm_head(states[is_target]).float().softmax(-1)
    return functional.cross_entropy(model.lm_head(outputs[is_target]).float(), labels)


def train(folder: Path, *, num_steps: int, seed: int) -> None:
    """Trains a head for the model in `folder` and saves it there every 50 steps. Continues from the
    head in the folder if there is one."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    head = HeadModule(model.config)
    if (folder / HEAD_FILE).is_file():
        head.load(folder / HEAD_FILE)
    else:
        head.start_from(model)
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    norms = [weight for weight in head.parameters() if weight.ndim == 1]
    muon = Muon(matrices, lr=_MATRIX_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(norms, lr=_NORM_LR, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = ((muon, _MATRIX_LR), (adamw, _NORM_LR))
    batches = _batches(folder, seed)
    started, total = time.perf_counter(), 0.0
    for step in range(num_steps):
        loss = head_loss(model, head, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        left = (num_steps - step) / (num_steps * (1.0 - _DECAY_FROM))
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, left, (step + 1) / _WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % _SAVE_EVERY == 0 or step + 1 == num_steps:
            seconds = time.perf_counter() - started
            logger.info("step %d loss %.3f %.0f s", step + 1, total / _SAVE_EVERY, seconds)
            total = 0.0
            save_head(head, folder)


def _batches(folder: Path, seed: int) -> Iterator[Batch]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = Random(seed + 1)
    conversations = tool_conversations(rng, is_polishing=True)
    return (
        batch
        for batch in training_batches(rng, conversations, tokenizer, _BATCH_TOKENS, _MAX_LENGTH)
        if batch.is_target[:, 3:].any()
    )


def save_head(head: HeadModule, folder: Path) -> None:
    """Writes the head and the index of all weight files; replaces an earlier head."""
    tensors = head.tensors()
    save_file(tensors, folder / HEAD_FILE, metadata={"format": "pt"})
    with safe_open(folder / _WEIGHTS, framework="pt") as weights:
        files = dict.fromkeys(weights.keys(), _WEIGHTS) | dict.fromkeys(tensors, HEAD_FILE)
    index = {"metadata": {}, "weight_map": dict(sorted(files.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    """Parses the command line and runs the training."""
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.mtp_training")
    parser.add_argument("folder", type=Path, help="checkpoint folder to add the head to")
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args: argparse.Namespace = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    os.nice(_NICENESS)
    torch.set_num_threads(1)
    train(args.folder, num_steps=args.num_steps, seed=args.seed)


if __name__ == "__main__":
    main()
