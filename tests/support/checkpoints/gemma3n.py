"""Checkpoints of Gemma 3n, and mutations that break each of its features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels import silu_and_mul
from tests.support.checkpoints.gemma4 import PER_LAYER_MUTATIONS, with_unused_keys
from tests.support.checkpoints.mutations import NO_EMBEDDING_SCALE, NO_HEAD_NORMS, NO_NAMES
from tests.support.checkpoints.specimen import VOCAB_SIZE, Patch, Specimen
from worker.models.architectures.gemma3n import AltUp
from worker.models.layers.per_layer_embedding import PerLayerEmbedding

_WINDOW = 21
_TURN = ["sliding_attention", "full_attention"]
_IN_TABLE = VOCAB_SIZE - 15
"""Number of tokens that have per-layer embeddings."""
_FULL, _SLIDING = ({"rope_type": "default", "rope_theta": theta} for theta in (100.0, 30.0))
_ROPE = {"full_attention": _FULL, "sliding_attention": _SLIDING}
_WINDOW_PLUS_1 = {"window of one more": {"sliding_window": _WINDOW + 1}}


def _altup(method: str, change: Any) -> Patch:
    return Patch(target=f"worker.models.architectures.gemma3n:AltUp.{method}", value=change)


def _with_transposed_mixture(self: AltUp) -> None:
    count = self._num_streams
    self._prediction = self._prediction.view(count, count, count).transpose(0, 1).flatten(0, 1)
    _PROCESS(self)


def _correcting_evenly(
    self: AltUp, predictions: torch.Tensor, computed: torch.Tensor
) -> torch.Tensor:
    return predictions + (computed - predictions[:, self._active])[:, None]


def _as_text_of_a_whole(tensors: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Adds the names of a multimodal model, and tensors of its encoders."""
    text = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in with_unused_keys(tensors, model).items()
    }
    parts = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    return {**text, **{f"model.{part}.weight": torch.zeros(1) for part in parts}}


_PROCESS, _EMBEDDED = AltUp.process_after_loading, PerLayerEmbedding.forward

_GEMMA3N = Specimen(
    name="Gemma3n",
    covers=("positions", "shards"),
    config="Gemma3nText",
    settings={
        "rope_parameters": _ROPE,
        "sliding_window": _WINDOW,
        "num_hidden_layers": 5,
        "layer_types": [*_TURN, "sliding_attention", *_TURN],
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": _IN_TABLE,
        "num_kv_shared_layers": 2,
        "laurel_rank": 12,
        "altup_active_idx": 1,
        "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0, 0.6],
        "final_logit_softcapping": 5.0,
    },
    rewrite=with_unused_keys,
    mutations={
        **PER_LAYER_MUTATIONS,
        "activation of embeddings": Patch(
            target="worker.models.architectures.gemma3n:gelu_and_mul", value=silu_and_mul
        ),
        "tokens without embeddings for layers": Patch(
            target="worker.models.layers.per_layer_embedding:PerLayerEmbedding.forward",
            value=lambda own, ids, x: _EMBEDDED(own, ids.clamp(max=_IN_TABLE - 1), x),
        ),
        "scale of embeddings": NO_EMBEDDING_SCALE,
        "norms of heads": NO_HEAD_NORMS,
        "predictions": _altup("predict", lambda _, streams: streams),
        "order of predictions": _altup("process_after_loading", _with_transposed_mixture),
        "corrections": _altup("correct", _correcting_evenly),
        "active stream": {"altup_active_idx": 0},
        "scale of the active stream": {"altup_correct_scale": False},
        "magnitude of streams": Patch(
            target="worker.models.architectures.gemma3n:_scaled_like", value=lambda x, _: x
        ),
        "low-rank residual": Patch(
            target="worker.models.architectures.gemma3n:Laurel.forward", value=lambda _, x: x
        ),
        "sparsity": {"activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0, 0.6]},
        "another": {"activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0, 0.5]},
        "cap of logits": {"final_logit_softcapping": None},
        "theta": {"rope_parameters": {**_ROPE, "full_attention": _SLIDING}},
        **_WINDOW_PLUS_1,
        "eps": {"rms_norm_eps": 0.1},
    },
)
GEMMA3N_SPECIMENS: dict[str, Specimen] = {
    "gemma3n": _GEMMA3N,
    "gemma3n-images": replace(
        _GEMMA3N,
        mutations={"names": NO_NAMES, **_WINDOW_PLUS_1},
        architecture="Gemma3nForConditionalGeneration",
        wrapper="gemma3n",
        rewrite=_as_text_of_a_whole,
        is_variant=True,
        covers=(),
    ),
    "gemma3n-without-sharing": replace(
        _GEMMA3N,
        settings={**_GEMMA3N.settings, "num_kv_shared_layers": 0},
        rewrite=None,
        mutations=_WINDOW_PLUS_1,
        is_variant=True,
        covers=(),
    ),
}
