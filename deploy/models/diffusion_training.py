"""Training of the block-diffusion model."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config

from deploy.models.checkpoint import demo_diffusion_config, save_diffusion_checkpoint
from deploy.models.corpus import Question
from deploy.models.diffusion_batches import DiffusionBatch, diffusion_batches
from deploy.models.evaluate_diffusion import evaluate
from deploy.models.tokenizer import MASK
from deploy.models.training import Training

BLOCK_SIZE: Final = 16


class DiffusionTraining(Training[DiffusionBatch]):
    """Training of ``demo-diffusion``, which decodes blocks of tokens in several rounds."""

    def make_tokenizer(self) -> Tokenizer:
        """``demo``'s tokenizer with an added mask token."""
        tokenizer = super().make_tokenizer()
        tokenizer.add_special_tokens([AddedToken(MASK, special=True)])
        return tokenizer

    def model_config(self) -> Qwen3Config:
        """Configuration of ``demo-diffusion``."""
        return demo_diffusion_config(self.tokenizer)

    def batches(self, rng: Random) -> Iterator[DiffusionBatch]:
        """Infinite stream of batches with clean text and noisy copies of blocks."""
        config = self.config
        return diffusion_batches(
            rng, self.tokenizer, config.batch_tokens, config.max_length, BLOCK_SIZE
        )

    def summed_loss(self, batch: DiffusionBatch) -> Tensor:
        """Cross-entropy of masked tokens. A position's logits predict its own token."""
        with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            output = self.model.model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                attention_mask={"full_attention": batch.visible},
                use_cache=False,
            )
            logits = self.model.lm_head(output.last_hidden_state[batch.is_masked])
        labels = batch.labels[batch.is_masked]
        return functional.cross_entropy(logits.float(), labels, reduction="sum")

    def save_checkpoint(self) -> None:
        """Writes all files that are needed for serving, in the format of SDAR."""
        save_diffusion_checkpoint(self.model, self.tokenizer, self.output, BLOCK_SIZE)

    def accuracy(self, questions: list[Question]) -> dict[str, float]:
        """Accuracy of the saved checkpoint's greedy answers by task family."""
        results = evaluate(self.output, questions)
        return {family: result.accuracy for family, result in results.items()}
