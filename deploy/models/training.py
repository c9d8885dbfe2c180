"""Training runs: Muon for matrices, AdamW for everything else, and bf16 autocast on CPU."""

from __future__ import annotations

import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Muon, Optimizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.models.batches import Batch, training_batches
from deploy.models.calling import tool_conversations, tool_questions
from deploy.models.checkpoint import demo_config, draft_config, save_checkpoint
from deploy.models.corpus import (
    Conversation,
    Question,
    heldout_questions,
    questions_path,
    tool_questions_path,
    training_conversations,
    write_questions,
)
from deploy.models.evaluate import accuracy_by_family
from deploy.models.tokenizer import MARKERS, TOOL_TEMPLATE, segments, train_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Size and schedule of a run; equal values give the same model on the same machine."""

    seed: int = 0
    num_steps: int = 4000
    num_threads: int = 2
    """Number of batches that are computed concurrently; each step sums their gradients."""
    vocab_size: int = 2560
    tokenizer_conversations: int = 20_000
    """Number of conversations from which the tokenizer's merges are learned."""
    batch_tokens: int = 1536
    """Positions per batch and thread, including padding."""
    max_length: int = 2048
    """Maximum number of tokens per conversation; longer ones are truncated."""
    matrix_lr: float = 5e-3
    """Muon's learning rate for weight matrices, scaled to the update size of AdamW."""
    other_lr: float = 3e-3
    """AdamW's learning rate for embeddings and norms."""
    weight_decay: float = 0.01
    warmup_steps: int = 100
    decay_from: float = 0.6
    """Fraction of the run after which the learning rate decays linearly to zero."""
    start: Path | None = None
    """Checkpoint to start from: the previous phase's, or an earlier draft model. None starts with
    random weights."""
    is_polishing: bool = False
    """Whether this is the third phase, which starts from ``start`` with other task shares."""
    teacher: Path | None = None
    """Checkpoint from which a draft model is distilled; None trains on text."""
    save_every: int = 200
    """Steps between checkpoints."""
    log_every: int = 100
    """Steps between log lines with the loss."""

    def lr_factor(self, step: int) -> float:
        """Learning rate at ``step``, relative to its peak."""
        decay_start = int(self.num_steps * self.decay_from)
        warm = min(1.0, (step + 1) / self.warmup_steps)
        left = (self.num_steps - step) / max(1, self.num_steps - decay_start)
        return warm * min(1.0, left)


class _Gradients(NamedTuple):
    loss: float
    gradients: tuple[Tensor, ...]
    """Gradients in the order of the model's parameters."""


class CountedBatch(Protocol):
    """Interface of a batch."""

    @property
    def num_targets(self) -> int:
        """Number of tokens that count in the loss."""
        ...


BatchT = TypeVar("BatchT", bound=CountedBatch)


class Training(ABC, Generic[BatchT]):
    """One run, from the corpus to the checkpoint in ``output``.

    If ``state`` is set, the run saves its state to that file and resumes from it.
    """

    def __init__(self, config: TrainingConfig, output: Path, state: Path | None = None) -> None:
        self.config = config
        self.output = output
        self.state_path = state
        # Threads synchronize only once per step. If they synchronized in every operator, they would
        # stall whenever another process uses one of the cores.
        torch.set_num_threads(1)
        self.threads = ThreadPoolExecutor(config.num_threads)
        # For short rows on CPU, attention with plain bf16 matmuls is 1.5x as fast as the fused
        # kernel, whose backward pass alone takes 1/3 of a step.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        torch.manual_seed(config.seed)
        self.tokenizer = self.make_tokenizer()
        self.model = self.make_model()
        self.optimizers = _optimizers(self.model, config)
        self.first_step = self._resume()

    markers: Sequence[str] = ()
    """Tokens at the end of the vocabulary, which do not come from merges."""

    def make_tokenizer(self) -> Tokenizer:
        """Creates the tokenizer and learns its merges."""
        config = self.config
        conversations = training_conversations(Random(config.seed))
        texts = (
            text
            for conversation in islice(conversations, config.tokenizer_conversations)
            for text, _ in segments(conversation)
        )
        return train_tokenizer(texts, config.vocab_size, self.markers)

    def make_model(self) -> Qwen3ForCausalLM:
        """A model with random weights."""
        return Qwen3ForCausalLM(self.model_config())

    @abstractmethod
    def model_config(self) -> Qwen3Config:
        """Configuration of the model."""

    @abstractmethod
    def batches(self, rng: Random) -> Iterator[BatchT]:
        """Infinite stream of batches."""

    @abstractmethod
    def summed_loss(self, batch: BatchT) -> Tensor:
        """Sum of the losses over the batch's targets."""

    def questions(self) -> list[Question]:
        """Held-out questions for evaluation."""
        return heldout_questions()

    def write_questions(self) -> None:
        """Writes the questions next to the checkpoint."""
        write_questions(questions_path(self.output), heldout_questions())

    @abstractmethod
    def save_checkpoint(self) -> None:
        """Writes all files that are needed for serving."""

    @abstractmethod
    def accuracy(self, questions: list[Question]) -> dict[str, float]:
        """Accuracy of the saved checkpoint by task family."""

    def run(self) -> None:
        """Trains the model, writes the checkpoint and (except for a draft model) the held-out
        questions, and logs the accuracy."""
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        logger.info("%d parameters, %d steps", num_parameters, self.config.num_steps)
        self.output.mkdir(parents=True, exist_ok=True)
        questions = self.questions()
        if self.config.teacher is None:
            self.write_questions()
        self._train()
        self.save_checkpoint()
        for family, accuracy in self.accuracy(questions).items():
            logger.info("%-12s %.3f", family, accuracy)

    def _train(self) -> None:
        config = self.config
        rng = Random(config.seed + 1)
        batches = self.batches(rng)
        started, losses = time.perf_counter(), []
        for step in range(config.num_steps):
            step_batches = list(islice(batches, config.num_threads))
            # Steps before the resumed one only advance the random generator.
            if step < self.first_step:
                continue
            losses.append(self._step(step, step_batches))
            if (step + 1) % config.log_every == 0:
                seconds = time.perf_counter() - started
                logger.info(
                    "step %d loss %.3f %.0f s", step + 1, sum(losses) / len(losses), seconds
                )
                losses.clear()
            if (step + 1) % config.save_every == 0:
                self.save_checkpoint()
                self._save(step + 1)

    def _step(self, step: int, batches: list[BatchT]) -> float:
        num_targets = sum(batch.num_targets for batch in batches)
        parts = list(self.threads.map(lambda batch: self._gradients(batch, num_targets), batches))
        for parameter, *gradients in zip(
            self.model.parameters(), *(part.gradients for part in parts), strict=True
        ):
            parameter.grad = torch.stack(gradients).sum(0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = self.config.lr_factor(step)
        list(self.threads.map(lambda optimizer: _update(optimizer, factor), self.optimizers))
        return sum(part.loss for part in parts)

    def _gradients(self, batch: BatchT, num_targets: int) -> _Gradients:
        loss = self.summed_loss(batch) / num_targets
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


class CausalTraining(Training[Batch]):
    """Training of ``demo``, which generates one token at a time."""

    markers = MARKERS

    def model_config(self) -> Qwen3Config:
        """Configuration of ``demo``."""
        return demo_config(self.tokenizer)

    def batches(self, rng: Random) -> Iterator[Batch]:
        """Infinite stream of batches of training conversations."""
        config = self.config
        return training_batches(
            rng, self.conversations(rng), self.tokenizer, config.batch_tokens, config.max_length
        )

    def conversations(self, rng: Random) -> Iterator[Conversation]:
        """Infinite stream of training conversations."""
        return training_conversations(rng)

    def summed_loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropy over the batch's targets."""
        logits = _target_logits(self.model, batch)
        return functional.cross_entropy(logits, self.labels(batch), reduction="sum")

    def labels(self, batch: Batch) -> Tensor:
        """Training targets: the text."""
        return batch.input_ids[:, 1:][batch.is_target[:, 1:]]

    def save_checkpoint(self) -> None:
        """Writes all files that are needed for serving."""
        save_checkpoint(self.model, self.tokenizer, self.output)

    def accuracy(self, questions: list[Question]) -> dict[str, float]:
        """Accuracy of the saved checkpoint's greedy answers by task family."""
        return accuracy_by_family(self.output, questions)


class ToolTraining(CausalTraining):
    """Training of ``demo`` in its later phases, with conversations that declare functions."""

    def __init__(self, config: TrainingConfig, output: Path, state: Path | None = None) -> None:
        assert config.start is not None, "there is no checkpoint to continue from"
        self.start = config.start
        super().__init__(config, output, state)

    def make_tokenizer(self) -> Tokenizer:
        """The previous phase's tokenizer."""
        return Tokenizer.from_file(str(self.start / "tokenizer.json"))

    def make_model(self) -> Qwen3ForCausalLM:
        """The previous phase's model."""
        return _loaded(self.start)

    def conversations(self, rng: Random) -> Iterator[Conversation]:
        """Infinite stream of training conversations, with and without functions."""
        return tool_conversations(rng, is_polishing=self.config.is_polishing)

    def save_checkpoint(self) -> None:
        """Saves the checkpoint with the chat template that renders functions."""
        save_checkpoint(self.model, self.tokenizer, self.output, TOOL_TEMPLATE)

    def questions(self) -> list[Question]:
        """Held-out questions with and without functions."""
        return [*heldout_questions(), *tool_questions()]

    def write_questions(self) -> None:
        """Writes the questions with and without functions to one file each, next to the
        checkpoint."""
        write_questions(questions_path(self.output), heldout_questions())
        write_questions(tool_questions_path(self.output), tool_questions())


class DraftTraining(CausalTraining):
    """Training of ``demo-draft``, a small model distilled from a trained one."""

    def __init__(self, config: TrainingConfig, output: Path, state: Path | None = None) -> None:
        assert config.teacher is not None, "distillation requires a teacher"
        self.teacher_path = config.teacher
        self.teacher = _loaded(config.teacher)
        super().__init__(config, output, state)

    def make_tokenizer(self) -> Tokenizer:
        """The teacher's tokenizer."""
        return Tokenizer.from_file(str(self.teacher_path / "tokenizer.json"))

    def make_model(self) -> Qwen3ForCausalLM:
        """An earlier draft model, or a new one."""
        start = self.config.start
        return super().make_model() if start is None else _loaded(start)

    def model_config(self) -> Qwen3Config:
        """Configuration of ``demo-draft``."""
        return draft_config(self.tokenizer)

    def conversations(self, rng: Random) -> Iterator[Conversation]:
        """Conversations of the second phase or, with `is_polishing`, of the third."""
        return tool_conversations(rng, is_polishing=self.config.is_polishing)

    def save_checkpoint(self) -> None:
        """Saves the checkpoint with the teacher's chat template."""
        save_checkpoint(self.model, self.tokenizer, self.output, TOOL_TEMPLATE)

    def labels(self, batch: Batch) -> Tensor:
        """Training targets: the teacher's distributions."""
        with torch.no_grad():
            return _target_logits(self.teacher, batch).softmax(dim=-1)


def _loaded(checkpoint: Path) -> Qwen3ForCausalLM:
    """Loads a model for training. It is compiled if a compiler is available, which halves the step
    time."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if shutil.which("g++") is not None:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    return model


def _update(optimizer: Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    optimizer.step()


def _target_logits(model: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, :-1][batch.is_target[:, 1:]])
    return logits.float()


def _optimizers(model: Qwen3ForCausalLM, config: TrainingConfig) -> list[Optimizer]:
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    others = [p for p in model.parameters() if p.ndim != 2 or p is embedding]
    # Matrices are updated independently, so the work is split over the threads.
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
