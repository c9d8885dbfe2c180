"""Options of the comparisons of engine variants; does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from worker.config import EngineConfig

_COMMAS: dict[str, Any] = {"separator": ","}
"""Metadata of fields with comma-separated values."""
SPECULATIVE_KINDS = ("heldout", "copy", "random")
FDFO_KINDS = ("questions", "long")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Options of all comparisons. Each field is a flag of the same name."""

    engine: EngineConfig
    """Engine options of all variants."""
    pairs: int = 10
    """Number of measured runs per variant."""

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """Options from flags: `engine` contains options of EngineConfig, `own` other options of
        this class."""
        return cls(engine=EngineConfig.of(**engine), **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapOptions(Comparison):
    """Options of benchmark `overlap`."""

    running: tuple[int, ...] = field(default=(1, 8, 32), metadata=_COMMAS)
    """Numbers of requests that decode concurrently."""
    steps: int = 100
    """Number of measured steps per run."""
    input_len: int = 16
    """Tokens per prompt."""
    plot: str = ""
    """PNG file for the timelines at overlap depths 0 and 1; default: no plot."""

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.steps < 5 or self.input_len < 1:
            raise ValueError(
                "--pairs must be at least 1, --steps at least 5, --input-len at least 1, got "
                f"{self.pairs}, {self.steps} and {self.input_len}"
            )
        if not self.running or min(self.running) < 1:
            raise ValueError(
                "--running must be a comma-separated list of positive integers, such as 1,8,32, "
                f"got {list(self.running)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions(Comparison):
    """Options of benchmark `admission`."""

    pairs: int = 5
    """Number of measured runs per policy and setting."""
    num_prompts: int = 128
    """Number of requests, all queued at once."""
    base_len: int = 1
    """Tokens per short prompt; long prompts are 512 times as long."""
    output_len: int = 32
    """Tokens per completion."""
    budget: int = 256
    """Maximum number of prompt tokens per step."""
    force_fifo_every: int = 8
    """Under pack, one in this many admission rounds uses fifo (`prefill_force_fifo_every`)."""
    seed: int = 0
    """Random seed of the prompts."""

    def __post_init__(self) -> None:
        for name in ("pairs", "base_len", "output_len", "budget", "num_prompts"):
            minimum = 4 if name == "num_prompts" else 1
            if (value := getattr(self, name)) < minimum:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} must be at least {minimum}, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions(Comparison):
    """Options of benchmark `structured`."""

    streams: int = 16
    """Number of concurrent requests."""
    max_tokens: int = 128
    """Maximum number of tokens per answer."""
    input_len: int = 32
    """Tokens per prompt."""

    def __post_init__(self) -> None:
        counts = (self.streams, self.pairs, self.max_tokens, self.input_len)
        if min(counts) < 1:
            raise ValueError(
                "--streams, --pairs, --max-tokens and --input-len must be at least 1, got "
                f"{', '.join(map(str, counts))}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeOptions(Comparison):
    """Options of benchmark `speculative`.

    Unless --speculative-method or --speculative-config sets a method, drafts come from n-grams.
    Held-out prompts use a draft model instead if there is one: a folder next to the model's, with
    "-draft" appended to its name.
    """

    questions: str = ""
    """JSON Lines file of held-out questions; default: demo_heldout.jsonl next to the model."""
    running: tuple[int, ...] = field(default=(1, 4, 16, 32), metadata=_COMMAS)
    """Numbers of concurrent requests."""
    kinds: tuple[str, ...] = field(default=SPECULATIVE_KINDS, metadata=_COMMAS)
    """Kinds of prompts to measure: heldout (questions), copy (text to repeat) and random (random
    tokens)."""
    per_stream: int = 4
    """Minimum number of requests per run, as a multiple of the number of concurrent requests."""
    turn_s: float = field(default=0.8, metadata={"flag": "--turn-seconds"})
    """Approximate duration of a run without drafts, in seconds; doubled with one request at a
    time."""
    draft_model: str = field(default="", metadata={"flag": None})
    """Draft model for held-out prompts, which n-grams cannot predict. If empty, held-out prompts
    use the engine's method, like all other prompts."""

    def __post_init__(self) -> None:
        if self.engine.speculative is None:
            raise ValueError(
                "--speculative-method none disables drafts: choose ngram, draft, mtp or eagle3"
            )
        if self.turn_s < 0.0:
            raise ValueError(f"--turn-seconds must not be negative, got {self.turn_s}")
        if self.pairs < 1 or self.per_stream < 1 or not self.running or min(self.running) < 1:
            raise ValueError(
                "--pairs, --per-stream and all of --running must be at least 1, got "
                f"{self.pairs}, {self.per_stream} and {list(self.running)}"
            )
        unknown = [kind for kind in self.kinds if kind not in SPECULATIVE_KINDS]
        if unknown:
            raise ValueError(
                f"--kinds: unknown kind {unknown[0]!r}: choose from {', '.join(SPECULATIVE_KINDS)}"
            )

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """Options from flags, with the defaults described by the class."""
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
    """JSON Lines file with `messages` and `answer`. Default: MODEL_heldout.jsonl or, if it does not
    exist and MODEL is NAME-SUFFIX, NAME_heldout.jsonl."""
    num_questions: int = 0
    """Number of questions to use from the file; 0 uses all."""
    repeats: int = 2
    """Number of times that the set of questions is repeated. Higher values reduce the fraction of
    the time at the end in which too few requests are left to fill the engine."""
    running: tuple[int, ...] = field(default=(4, 16), metadata=_COMMAS)
    """Numbers of concurrent requests."""
    max_tokens: int = 128
    """Maximum number of tokens per answer."""
    kinds: tuple[str, ...] = field(default=FDFO_KINDS, metadata=_COMMAS)
    """Workloads: questions, or long uncached prompts."""
    long_prompt_blocks: int = 20
    """Number of blocks in the longest uncached prompt; the shortest has 1/5 of them."""
    num_long: int = 32
    """Number of long prompts."""
    replay_rounds: str = ""
    """Histogram of rounds per block, as ROUNDS:BLOCKS,..., to replay instead of questions. Works
    with any weights, including random ones (--load-format dummy)."""
    shares: bool = False
    """Also measure `full` with each feature disabled in turn."""

    def __post_init__(self) -> None:
        counts = (self.pairs, self.repeats, self.max_tokens, *self.running)
        if not self.running or min(counts) < 1:
            raise ValueError(
                "--pairs, --repeats, --max-tokens and all of --running must be at least 1, got "
                f"{self.pairs}, {self.repeats}, {self.max_tokens} and {list(self.running)}"
            )
        if not self.kinds or not set(self.kinds) <= set(FDFO_KINDS):
            raise ValueError(
                f"--kinds must be one or more of {', '.join(FDFO_KINDS)}, got "
                f"{', '.join(self.kinds) or 'none'}"
            )
        if self.long_prompt_blocks < 5 or self.num_long < 1 or self.num_questions < 0:
            raise ValueError(
                "--long-prompt-blocks must be at least 5, --num-long at least 1, and "
                f"--num-questions at least 0, got {self.long_prompt_blocks}, {self.num_long} and "
                f"{self.num_questions}"
            )
        rounds_of_blocks(self.replay_rounds)


def rounds_of_blocks(text: str) -> dict[int, int]:
    """Parses text such as `1:151,2:39`: number of blocks, keyed by number of rounds.

    Raises:
        ValueError: the text has a different format.
    """
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair]
        found = {int(rounds): int(blocks) for rounds, blocks in pairs}
    except ValueError as error:
        raise ValueError(
            f"invalid --replay-rounds {text!r}: the format is ROUNDS:BLOCKS,..."
        ) from error
    if any(rounds < 1 or blocks < 1 for rounds, blocks in found.items()):
        raise ValueError(f"--replay-rounds must contain positive integers only, got {text}")
    return found
