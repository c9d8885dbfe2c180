"""Options of the comparisons of engine variants, as flags; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from worker.config import EngineConfig

_COMMAS: dict[str, Any] = {"separator": ","}
"""Metadata of fields with several values in one argument."""
SPECULATIVE_KINDS = ("heldout", "copy", "random")
FDFO_KINDS = ("questions", "long")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Options that every comparison has. Field names are the flags."""

    engine: EngineConfig
    """Engine options that all variants share."""
    pairs: int = 10
    """Measured turns of each variant."""

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """Options from given flags: `engine` those of EngineConfig, `own` those of this class."""
        return cls(engine=EngineConfig.of(**engine), **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapOptions(Comparison):
    """Options of benchmark `overlap`."""

    running: tuple[int, ...] = field(default=(1, 8, 32), metadata=_COMMAS)
    """Numbers of requests that decode concurrently."""
    steps: int = 100
    """Measured steps per turn."""
    input_len: int = 16
    """Tokens of a prompt."""
    plot: str = ""
    """PNG file to write, with the timelines of both depths."""

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.steps < 5 or self.input_len < 1:
            raise ValueError(
                "--pairs must be at least 1, --steps at least 5, --input-len at least 1"
            )
        if not self.running or min(self.running) < 1:
            raise ValueError("--running must be numbers of at least 1, for example 1,8,32")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions(Comparison):
    """Options of benchmark `admission`."""

    pairs: int = 5
    """Measured turns per policy and setting."""
    num_prompts: int = 128
    """Number of requests, all queued at once."""
    base_len: int = 1
    """Tokens of a short prompt; long ones are 512 times as long."""
    output_len: int = 32
    """Tokens of a completion."""
    budget: int = 256
    """Maximum prompt tokens per step."""
    force_fifo_every: int = 8
    """Interval of admission rounds that are fifo under pack (`prefill_force_fifo_every`)."""
    seed: int = 0
    """Seed of the prompts."""

    def __post_init__(self) -> None:
        sizes = (self.pairs, self.base_len, self.output_len, self.budget)
        if min(sizes) < 1 or self.num_prompts < 4:
            raise ValueError("sizes must be at least 1, --num-prompts at least 4")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions(Comparison):
    """Options of benchmark `structured`."""

    streams: int = 16
    """Number of concurrent requests."""
    max_tokens: int = 128
    """Maximum tokens per answer."""
    input_len: int = 32
    """Tokens of a prompt."""

    def __post_init__(self) -> None:
        if min(self.streams, self.pairs, self.max_tokens, self.input_len) < 1:
            raise ValueError("--streams, --pairs, --max-tokens and --input-len must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeOptions(Comparison):
    """Options of benchmark `speculative`.

    Unless --speculative-method or --speculative-config gives a method, drafts come from n-grams,
    except for held-out prompts if there is a draft model: a folder next to the model's, with
    "-draft" added to its name.
    """

    questions: str = ""
    """JSON lines with held-out questions; demo_heldout.jsonl next to the model unless given."""
    running: tuple[int, ...] = field(default=(1, 4, 16, 32), metadata=_COMMAS)
    """Numbers of concurrent requests."""
    kinds: tuple[str, ...] = field(default=SPECULATIVE_KINDS, metadata=_COMMAS)
    """Kinds of prompts."""
    per_stream: int = 4
    """Minimum number of requests per turn, per running request."""
    turn_s: float = field(default=0.8, metadata={"flag": "--turn-seconds"})
    """Approximate seconds of a turn without drafts; twice that with one request at a time."""
    draft_model: str = field(default="", metadata={"flag": None})
    """Draft model for held-out prompts, which n-grams cannot predict; without one they are
    drafted by the engine's method, like all others."""

    def __post_init__(self) -> None:
        if self.engine.speculative is None:
            raise ValueError(
                "--speculative-method none has no drafts: choose ngram, draft, mtp or eagle3"
            )
        if self.turn_s < 0.0:
            raise ValueError("--turn-seconds must not be negative")
        if self.pairs < 1 or self.per_stream < 1 or not self.running or min(self.running) < 1:
            raise ValueError("--pairs, --per-stream and all of --running must be at least 1")
        unknown = [kind for kind in self.kinds if kind not in SPECULATIVE_KINDS]
        if unknown:
            raise ValueError(
                f"--kinds: unknown kind {unknown[0]!r}, choose from {', '.join(SPECULATIVE_KINDS)}"
            )

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """Options from given flags, with the defaults that the class describes."""
        model = Path(engine["model"]).resolve()
        chosen = {"questions": str(model.with_name("demo_heldout.jsonl")), **own}
        if "speculative_method" in engine:
            return cls(engine=EngineConfig.of(**engine), **chosen)
        draft_model = model.with_name(f"{model.name}-draft")
        return cls(
            engine=EngineConfig.of(speculative_method="ngram", **engine),
            draft_model=str(draft_model) if draft_model.is_dir() else "",
            **chosen,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FdfoOptions(Comparison):
    """Options of benchmark `fdfo`."""

    questions: str = ""
    """JSON lines with `messages` and `answer`; MODEL_heldout.jsonl unless given, or for a MODEL
    named demo-x the questions of demo."""
    num_questions: int = 0
    """Number of questions of the file to use; 0 for all."""
    repeats: int = 2
    """Number of repetitions of the set of questions. With more requests, the last ones, which do
    not fill the engine, take a smaller fraction of the time."""
    running: tuple[int, ...] = field(default=(4, 16), metadata=_COMMAS)
    """Numbers of concurrent requests."""
    max_tokens: int = 128
    """Maximum tokens per answer."""
    kinds: tuple[str, ...] = field(default=FDFO_KINDS, metadata=_COMMAS)
    """Workloads: questions, or long uncached prompts."""
    long_prompt_blocks: int = 20
    """Blocks of the longest uncached prompt; the shortest has a fifth of them."""
    num_long: int = 32
    """Number of long prompts."""
    replay_rounds: str = ""
    """Histogram of rounds per block, as ROUNDS:BLOCKS,..., to replay instead of questions, with
    any weights (--load-format dummy for random ones)."""
    shares: bool = False
    """Also compare `full` with variants that each lack one of its features."""

    def __post_init__(self) -> None:
        counts = (self.pairs, self.repeats, self.max_tokens, *self.running)
        if not self.running or min(counts) < 1:
            raise ValueError("--pairs, --repeats, --running and --max-tokens must be at least 1")
        if not self.kinds or not set(self.kinds) <= set(FDFO_KINDS):
            raise ValueError(f"--kinds: choose from {', '.join(FDFO_KINDS)}")
        if self.long_prompt_blocks < 5 or self.num_long < 1 or self.num_questions < 0:
            raise ValueError("--long-prompt-blocks must be at least 5, --num-long at least 1")
        rounds_of_blocks(self.replay_rounds)


def rounds_of_blocks(text: str) -> dict[int, int]:
    """Number of blocks by number of rounds, from text such as `1:151,2:39`.

    Raises:
        ValueError: the text has another form.
    """
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair]
        found = {int(rounds): int(blocks) for rounds, blocks in pairs}
    except ValueError as error:
        raise ValueError(
            f"invalid --replay-rounds {text!r}: the format is ROUNDS:BLOCKS,..."
        ) from error
    if any(rounds < 1 or blocks < 1 for rounds, blocks in found.items()):
        raise ValueError("--replay-rounds must be numbers of at least 1")
    return found
