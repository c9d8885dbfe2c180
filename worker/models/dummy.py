"""Random weights in place of a checkpoint's: for measuring speed, which does not depend on them."""

from __future__ import annotations

import torch

from worker.models.decoder import DecoderModel
from worker.models.linear import WeightSlot
from worker.models.native import NativeOptions, pack_weights

_SEED = 0
_SPREAD = 0.02
"""Standard deviation of matrices, as models are commonly initialised."""


def draw_weights(model: DecoderModel, native: NativeOptions | None = None) -> None:
    """Fills every slot on its device, then packs the weights as `load_weights` does."""
    generator = torch.Generator(device=model.options.device).manual_seed(_SEED)
    with torch.inference_mode():
        for slot in model.weight_slots():
            _fill(slot, generator)
        pack_weights(model, native)


def _fill(slot: WeightSlot, generator: torch.Generator) -> None:
    if len(slot.full_shape) > 1:
        slot.destination.normal_(0.0, _SPREAD, generator=generator)
    else:  # scales of norms, and biases
        slot.destination.fill_(0.0 if slot.name.endswith("bias") else 1.0)
