"""A checkpoint of DiffusionGemma, the canvases that transformers generates, and mutations that
break each of its features."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

from kernels import Activation, gumbel_noise
from kernels.attention import AttentionMetadata
from tests.support.checkpoints.mutations import NO_EMBEDDING_SCALE, NO_HEAD_NORMS
from tests.support.checkpoints.specimen import Mutation, Patch, draw
from tests.support.engines.block_oracle import Processors, process_block
from worker.models.architectures.decoder import DecoderModel
from worker.models.architectures.diffusion_gemma import DiffusionGemmaLayer
from worker.models.architectures.gemma4 import Gemma4Layer
from worker.models.config.canvas_config import CanvasConfig
from worker.models.layers.self_conditioning import SelfConditioning
from worker.rank.diffusion.canvas import random_tokens

LENGTH = 8
"""Number of tokens per canvas."""
VOCAB_SIZE = 96
_WINDOW = 11
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "sliding_window": _WINDOW,
    "final_logit_softcapping": 9.0,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
    "bos_token_id": 1,
    "eos_token_id": 7,
}
CANVAS_CONFIG: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": LENGTH,
    "text_config": {**_TEXT, "model_type": "diffusion_gemma_text"},
}
"""config.json of the checkpoint, in the format of released checkpoints."""
_VISION = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
GENERATION: dict[str, Any] = {
    "max_denoising_steps": 7,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.0},
    "t_min": 0.05,
    "t_max": 0.5,
    "stability_threshold": 1,
    "confidence_threshold": 0.3,
}
_DAMPED = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
_ROUND_STRIDE = 0x9E3779B97F4A7C15
"""Difference between the sampling keys of successive rounds."""


@dataclass(frozen=True)
class Answer:
    """Canvases of one request."""

    token_ids: list[int]
    drafts: list[list[int]]
    """Most likely tokens in each round that does not finish its canvas."""
    rounds: list[int]
    """Number of rounds per canvas."""
    logprobs: list[float]
    """Log-probability of each token, in the raw distribution of its canvas's last round."""


@dataclass(frozen=True)
class CanvasCheckpoint:
    """A saved checkpoint."""

    folder: Path
    model: Any

    def answer(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        canvases: int,
        greedy: bool = False,
        processors: Processors | None = None,
        ends: Sequence[int] = (),
    ) -> Answer:
        """What transformers generates with the random numbers of the request's seed. `min_tokens`
        excludes the tokens `ends`."""
        reference = _Reference(seed, list(prompt), greedy, processors, ends)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.model, "_prepare_sampler", reference.sampler)
            patch.setattr(generation.torch, "multinomial", reference.multinomial)
            output = self.model.generate(
                torch.tensor([list(prompt)]),
                max_new_tokens=canvases * LENGTH,
                streamer=reference,
                logits_processor=transformers.LogitsProcessorList([reference.process]),
            )
        rounds = [len(one) for one in reference.canvases]
        return Answer(
            token_ids=output.sequences[0, len(prompt) :].tolist(),
            drafts=[draft for one in reference.canvases for draft in one[:-1]],
            rounds=rounds,
            logprobs=torch.cat(reference.logprobs).tolist(),
        )


@dataclass
class _Reference:
    """Random numbers of a request, in place of transformers', and its rounds."""

    seed: int
    prompt: list[int]
    greedy: bool
    processors: Processors | None
    ends: Sequence[int]
    canvases: list[list[list[int]]] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.zeros(1, LENGTH))
    """[1, C]: tokens of the canvas before its next round."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """[C] per canvas: log-probabilities of the most likely tokens in its last round."""

    def sampler(self, config: Any) -> Any:
        """transformers' sampler with the request's random numbers."""
        parts = {"initialize_canvas": self._begin, "renoise_canvas": self._renoise}
        kind = type("KeyedSampler", (generation.EntropyBoundSampler,), {})
        self._sampler = kind(config.sampler_config, LENGTH, VOCAB_SIZE, 0)
        for name, method in parts.items():
            setattr(self._sampler, name, method)
        return self._sampler

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """A round's logits [1, C, vocab] after logits processors."""
        processed = scores.clone()
        process_block(
            *(self.processors, self.prompt, input_ids[0].tolist(), 0, self.ends),
            *(processed[0], self.tokens[0].tolist()),
        )
        best = processed[0].argmax(dim=-1, keepdim=True)
        del self.logprobs[len(self.canvases) - 1 :]
        self.logprobs.append(scores[0].log_softmax(dim=-1).gather(1, best).squeeze(1))
        return processed

    def multinomial(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        if self.greedy:
            return probs.argmax(dim=-1, keepdim=True)
        key = (self.seed + len(self.canvases[-1]) * _ROUND_STRIDE + 2**63) % 2**64 - 2**63
        noise = gumbel_noise(
            torch.full((LENGTH,), key), torch.from_numpy(self._positions()), VOCAB_SIZE
        )
        return (probs.log() + noise).argmax(dim=-1, keepdim=True)

    def put(self, value: torch.Tensor) -> None:
        """Part of transformers' streamer interface."""

    def end(self) -> None:
        """Part of transformers' streamer interface."""

    def put_draft(self, value: torch.Tensor) -> None:
        self.canvases[-1].append(value[0].tolist())

    def _begin(self, batch_size: int, device: torch.device) -> torch.Tensor:
        self.canvases.append([])
        self.tokens = self._noise(0)
        return self.tokens

    def _renoise(self, accepted: torch.Tensor, cur_step: Any) -> torch.Tensor:
        noise = self._noise(len(self.canvases[-1]) + 1)
        self.tokens = torch.where(self._sampler.accepted_token_mask, accepted, noise)
        return self.tokens

    def _noise(self, index: int) -> torch.Tensor:
        tokens = random_tokens(
            np.array([self.seed]), self._positions(), np.array([index]), vocab_size=VOCAB_SIZE
        )
        return torch.from_numpy(tokens)[None]

    def _positions(self) -> Any:
        return len(self.prompt) + (len(self.canvases) - 1) * LENGTH + np.arange(LENGTH)


def write_canvases(folder: Path) -> CanvasCheckpoint:
    """Saves the checkpoint."""
    torch.manual_seed(5)
    config = transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(**_TEXT),
        vision_config=transformers.Gemma4VisionConfig(**_VISION),
        canvas_length=LENGTH,
    )
    model = transformers.DiffusionGemmaForBlockDiffusion(config).float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            draw(key, tensor)
            if key.endswith(_DAMPED):
                tensor *= 0.3  # so that canvases become stable
    model.generation_config = generation.DiffusionGemmaGenerationConfig(**deepcopy(GENERATION))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return CanvasCheckpoint(folder=folder, model=model)


def _encoding(self: DiffusionGemmaLayer, *args: Any) -> Any:
    assert self._encoder is not None
    return Gemma4Layer.forward(self._encoder, *args)


def _conditioned(change: Callable[..., torch.Tensor]) -> Patch:
    return Patch(
        target="worker.models.layers.self_conditioning:SelfConditioning.forward", value=change
    )


def _without_first_norm(
    self: SelfConditioning, embedded: torch.Tensor, signal: torch.Tensor
) -> torch.Tensor:
    return self._post_norm.forward_add(self._mlp.forward(signal), embedded)[0]


def _without_last_norm(
    self: SelfConditioning, embedded: torch.Tensor, signal: torch.Tensor
) -> torch.Tensor:
    return embedded + self._mlp.forward(self._pre_norm.forward(signal))


def _attended(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Patch:
    return Patch(
        target="worker.rank.canvas_rows:AttentionMetadata",
        value=lambda **options: AttentionMetadata(**{**options, **change(options)}),
    )


def _narrow(options: dict[str, Any]) -> Mapping[str, Any]:
    is_canvas = options.get("is_bidirectional", False) and options["window"]
    return {"window": _WINDOW} if is_canvas else {}


def _generated(**change: Any) -> Patch:
    """Changed values of generation_config.json."""
    return Patch(
        target="worker.models.config.canvas_config:CanvasConfig.of",
        value=staticmethod(lambda length, raw: replace(_OF(length, raw), **change)),
    )


_OF, _CONDITION = CanvasConfig.of, SelfConditioning.forward
MUTATIONS: Mapping[str, Mutation] = {
    "factor of known tokens": Patch(
        target="worker.models.architectures.diffusion_gemma:DiffusionGemmaLayer.forward",
        value=Gemma4Layer.forward,
    ),
    "factor of canvases": Patch(
        target="worker.models.architectures.diffusion_gemma:DiffusionGemmaLayer.forward",
        value=_encoding,
    ),
    "self-conditioning": _conditioned(lambda own, x, signal: _CONDITION(own, x, signal * 0)),
    "embeddings": _conditioned(lambda own, x, signal: x),
    "norm of the signal": _conditioned(_without_first_norm),
    "norm of embeddings": _conditioned(_without_last_norm),
    "scale of the signal": Patch(
        target="worker.models.architectures.gemma:GemmaForCausalLM.embed_shares",
        value=DecoderModel.embed_shares,
    ),
    "activation": Patch(
        target="worker.models.layers.self_conditioning:GELU", value=Activation("silu")
    ),
    "scale of embeddings": NO_EMBEDDING_SCALE,
    "norms of heads": NO_HEAD_NORMS,
    "both directions": _attended(lambda options: {"is_bidirectional": False}),
    "window of canvases": _attended(_narrow),
    "window of one more": {"sliding_window": _WINDOW + 1},
    "cap of logits": {"final_logit_softcapping": 5.0},
    "number of experts": {"top_k_experts": 1},
    "length of canvases": {"canvas_length": LENGTH // 2},
    "heads": {"per_layer_config": None},
    "number of rounds": _generated(max_rounds=6),
    "first temperature": _generated(first_temperature=0.9),
    "last temperature": _generated(last_temperature=0.2),
    "bound of entropies": _generated(entropy_bound=3.0),
    "stable rounds": _generated(stable_rounds=0),
    "mean entropy": _generated(max_entropy=0.01),
}
"""Mutations by feature."""
