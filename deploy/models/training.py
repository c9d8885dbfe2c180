"""The training run: Muon for the matrices, AdamW for the rest, bf16 autocast on CPU."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Muon, Optimizer
from transformers import Qwen3ForCausalLM

from deploy.models.batches import Batch, training_batches
from deploy.models.checkpoint import demo_config, draft_config, save_checkpoint
from deploy.models.corpus import heldout_questions, training_conversations, write_questions
from deploy.models.evaluate import accuracy_by_family
from deploy.models.tokenizer import segments, train_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Size and pace of the run; equal values give the same model on the same machine."""

    seed: int = 0
    num_steps: int = 4000
    num_threads: int = 2
    """Batches worked on at the same time; each step is the sum over that many batches."""
    vocab_size: int = 2560
    tokenizer_conversations: int = 20_000
    """Conversations from which the merges are learnt."""
    batch_tokens: int = 1536
    """Places in the batch of one thread, padding included."""
    max_length: int = 2048
    """Longer conversations are cut."""
    matrix_lr: float = 5e-3
    """Muon's rate for the weight matrices, scaled to the update size of AdamW."""
    other_lr: float = 3e-3
    """AdamW's rate for embeddings and norms."""
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_from: float = 0.6
    """Part of the run after which the rate falls linearly to zero."""
    teacher: Path | None = None
    """Checkpoint whose next-token distributions a draft model learns; None trains on the text."""
    save_every: int = 200
    """Steps between checkpoints."""

    def lr_factor(self, step: int) -> float:
        """The learning rate at ``step`` relative to its peak."""
        decay_start = int(self.num_steps * self.decay_from)
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.num_steps - step) / max(1, self.num_steps - decay_start)
        return warm * min(1.0, left)


class _Gradients(NamedTuple):
    loss: float
    gradients: tuple[Tensor, ...]
    """In the order of the model's parameters."""


class Training:
    """One run, from the corpus to the checkpoint in ``output``.

    With ``state`` the run keeps all it needs to go on in that file and resumes from it.
    """

    def __init__(self, config: TrainingConfig, output: Path, state: Path | None = None) -> None:
        self.config = config
        self.output = output
        self.state_path = state
        # Threads meet once a step rather than in every operator, which would stall them whenever
        # another process takes one of the cores.
        torch.set_num_threads(1)
        self.threads = ThreadPoolExecutor(config.num_threads)
        # For short rows on a CPU, attention as plain bf16 products is half again as quick as the
        # fused kernel, whose backward pass alone takes a third of a step.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        torch.manual_seed(config.seed)
        self.tokenizer = _tokenizer(config)
        self.teacher: Qwen3ForCausalLM | None = None
        if config.teacher is None:
            self.model = Qwen3ForCausalLM(demo_config(self.tokenizer))
        else:
            self.teacher = Qwen3ForCausalLM.from_pretrained(config.teacher, dtype=torch.float32)
            self.model = Qwen3ForCausalLM(draft_config(self.tokenizer))
        self.optimizers = _optimizers(self.model, config)
        self.first_step = self._resume()

    def run(self) -> None:
        """Train, write the checkpoint and the held-out questions, and report the accuracy."""
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        logger.info("%d parameters, %d steps", num_parameters, self.config.num_steps)
        self.output.mkdir(parents=True, exist_ok=True)
        questions = heldout_questions()
        if self.teacher is None:
            write_questions(self.output.with_name(f"{self.output.name}_heldout.jsonl"), questions)
        self._train()
        save_checkpoint(self.model, self.tokenizer, self.output)
        for family, accuracy in accuracy_by_family(self.output, questions).items():
            logger.info("%-12s %.3f", family, accuracy)

    def _train(self) -> None:
        config = self.config
        rng = Random(config.seed + 1)
        batches = training_batches(rng, self.tokenizer, config.batch_tokens, config.max_length)
        started, losses = time.perf_counter(), []
        for step in range(config.num_steps):
            step_batches = list(islice(batches, config.num_threads))
            # The steps before a resumed one only move the random stream to its place.
            if step < self.first_step:
                continue
            losses.append(self._step(step, step_batches))
            if (step + 1) % 100 == 0:
                seconds = time.perf_counter() - started
                logger.info(
                    "step %d loss %.3f %.0f s", step + 1, sum(losses) / len(losses), seconds
                )
                losses.clear()
            if (step + 1) % config.save_every == 0:
                save_checkpoint(self.model, self.tokenizer, self.output)
                self._save(step + 1)

    def _step(self, step: int, batches: list[Batch]) -> float:
        num_targets = sum(int(batch.is_target.sum()) for batch in batches)
        parts = list(self.threads.map(lambda batch: self._gradients(batch, num_targets), batches))
        for parameter, *gradients in zip(
            self.model.parameters(), *(part.gradients for part in parts), strict=True
        ):
            parameter.grad = torch.stack(gradients).sum(0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = self.config.lr_factor(step)
        list(self.threads.map(lambda optimizer: _update(optimizer, factor), self.optimizers))
        return sum(part.loss for part in parts)

    def _gradients(self, batch: Batch, num_targets: int) -> _Gradients:
        loss = _summed_loss(self.model, batch, self.teacher) / num_targets
        return _Gradients(loss.item(), torch.autograd.grad(loss, tuple(self.model.parameters())))

    def _save(self, next_step: int) -> None:
        if self.state_path is None:
            return
        state = {
            "next_step": next_step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, self.state_path)

    def _resume(self) -> int:
        if self.state_path is None or not self.state_path.exists():
            return 0
        state = torch.load(self.state_path)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        logger.info("resuming at step %d from %s", state["next_step"], self.state_path)
        return int(state["next_step"])


def _update(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    optimizer.step()


def _summed_loss(model: Qwen3ForCausalLM, batch: Batch, teacher: Qwen3ForCausalLM | None) -> Tensor:
    """Cross-entropy against the text, or against what the teacher expects in its place."""
    labels = batch.input_ids[:, 1:][batch.is_target[:, 1:]]
    if teacher is not None:
        with torch.no_grad():
            labels = _target_logits(teacher, batch).softmax(dim=-1)
    return functional.cross_entropy(_target_logits(model, batch), labels, reduction="sum")


def _target_logits(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, :-1][batch.is_target[:, 1:]])
    return logits.float()


def _tokenizer(config: TrainingConfig) -> Tokenizer:
    if config.teacher is not None:
        return Tokenizer.from_file(str(config.teacher / "tokenizer.json"))
    conversations = training_conversations(Random(config.seed))
    texts = (
        text
        for conversation in islice(conversations, config.tokenizer_conversations)
        for text, _ in segments(conversation)
    )
    return train_tokenizer(texts, config.vocab_size)


def _optimizers(model: Qwen3ForCausalLM, config: TrainingConfig) -> list[Optimizer]:
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    # Every matrix is updated on its own, so they can be dealt out to the threads.
    muons = [
        Muon(
            [{"params": matrices[thread :: config.num_threads], "peak_lr": config.matrix_lr}],
            lr=config.matrix_lr,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        for thread in range(config.num_threads)
    ]
    adamw = AdamW(
        [{"params": others, "peak_lr": config.other_lr}],
        lr=config.other_lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    return [*muons, adamw]
