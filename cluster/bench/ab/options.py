"""The options of the comparisons of engines, which are flags; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from worker.config import EngineConfig

_COMMAS: dict[str, Any] = {"separator": ","}
"""Metadata of fields whose values stand in one argument."""
SPECULATIVE_KINDS = ("heldout", "copy", "random")
FDFO_KINDS = ("questions", "long")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Options that every comparison has. Field names are the flags."""

    SET_HERE: ClassVar[frozenset[str]] = frozenset({"model", "max_num_seqs"})
    """Options of the engine that the comparison sets itself, so that they are no flags."""

    engine: EngineConfig
    """The engine options that all variants have in common."""
    pairs: int = 10
    """Turns of each variant."""

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """The comparison that flags ask for: those of its engine, and its own."""
        return cls(engine=EngineConfig(**engine), **own)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapOptions(Comparison):
    """Steps at overlap depth 0 and 1."""

    SET_HERE: ClassVar[frozenset[str]] = Comparison.SET_HERE | {"overlap_depth"}

    running: tuple[int, ...] = field(default=(1, 8, 32), metadata=_COMMAS)
    """Numbers of requests that decode at once."""
    steps: int = 100
    """Steps per turn."""
    input_len: int = 16
    """Prompt tokens."""
    plot: str = ""
    """PNG file of both timelines."""

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.steps < 5 or self.input_len < 1:
            raise ValueError("--pairs must be at least 1, --steps 5, --input-len 1")
        if not self.running or min(self.running) < 1:
            raise ValueError("--running needs numbers of at least 1, such as 1,8,32")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionOptions(Comparison):
    """Requests, all at once, under admission policies fifo and pack."""

    SET_HERE: ClassVar[frozenset[str]] = (
        Comparison.SET_HERE
        | {f.name for f in fields(EngineConfig) if f.name.startswith("prefill_")}
        | {"max_num_batched_tokens", "enable_chunked_prefill", "max_queued_requests"}
        | {"enable_prefix_caching"}
    )

    pairs: int = 5
    """Turns per policy and setting."""
    num_prompts: int = 128
    """Requests, all at once."""
    base_len: int = 1
    """Tokens of a short prompt; long ones have 512 times as many."""
    output_len: int = 32
    """Tokens per completion."""
    budget: int = 256
    """Prompt tokens of a step."""
    force_fifo_every: int = 8
    """Under pack: every so many rounds are fifo."""
    seed: int = 0
    """Seed of the prompts."""

    def __post_init__(self) -> None:
        sizes = (self.pairs, self.base_len, self.output_len, self.budget)
        if min(sizes) < 1 or self.num_prompts < 4:
            raise ValueError("sizes must be at least 1, --num-prompts at least 4")


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOptions(Comparison):
    """Requests under a grammar, and free ones of the same lengths."""

    streams: int = 16
    """Requests at once."""
    max_tokens: int = 128
    """Most tokens per request."""
    input_len: int = 32
    """Prompt tokens."""

    def __post_init__(self) -> None:
        if min(self.streams, self.pairs, self.max_tokens, self.input_len) < 1:
            raise ValueError("--streams, --pairs, --max-tokens and --input-len must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeOptions(Comparison):
    """Requests with drafts and without.

    Unless --speculative-method is given each kind of prompts has the method that suits it: held-out
    ones the draft model in the folder beside the model's, named as it is with "-draft", if there is
    one; others n-grams.
    """

    questions: str = ""
    """JSON lines with held-out questions; demo_heldout.jsonl beside the model unless given."""
    running: tuple[int, ...] = field(default=(1, 4, 16, 32), metadata=_COMMAS)
    """Numbers of requests at once."""
    kinds: tuple[str, ...] = field(default=SPECULATIVE_KINDS, metadata=_COMMAS)
    """Kinds of prompts."""
    per_stream: int = 4
    """Least requests of a turn, for each that runs at once."""
    turn_s: float = field(default=0.8, metadata={"flag": "--turn-seconds"})
    """Seconds that turns without drafts take, about; twice that with one request at a time."""
    draft_model: str = field(default="", metadata={"flag": None})
    """Draft model for held-out prompts, which n-grams cannot guess; empty drafts for all by
    `engine`'s method.
    """

    def __post_init__(self) -> None:
        if self.engine.speculative_method == "none":
            raise ValueError("--speculative-method none drafts nothing: give another one")
        if self.turn_s < 0.0:
            raise ValueError("--turn-seconds must not be negative")
        if self.pairs < 1 or self.per_stream < 1 or not self.running or min(self.running) < 1:
            raise ValueError("--pairs, --per-stream and all of --running must be at least 1")
        unknown = [kind for kind in self.kinds if kind not in SPECULATIVE_KINDS]
        if unknown:
            raise ValueError(f"--kinds: {unknown[0]} is none of {', '.join(SPECULATIVE_KINDS)}")

    @classmethod
    def from_flags(cls, engine: Mapping[str, Any], own: Mapping[str, Any]) -> Self:
        """See the class for what is chosen where no flag says so."""
        model = Path(engine["model"]).resolve()
        chosen = {"questions": str(model.with_name("demo_heldout.jsonl")), **own}
        if "speculative_method" in engine:
            return cls(engine=EngineConfig(**engine), **chosen)
        draft_model = model.with_name(f"{model.name}-draft")
        return cls(
            engine=EngineConfig(speculative_method="ngram", **engine),
            draft_model=str(draft_model) if draft_model.is_dir() else "",
            **chosen,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FdfoOptions(Comparison):
    """Ways to run the blocks of a block-diffusion model."""

    SET_HERE: ClassVar[frozenset[str]] = Comparison.SET_HERE | {
        "dllm_fdfo",
        "dllm_disable",
        "enable_prefix_caching",
    }

    questions: str = ""
    """JSON lines with `messages` and `answer`; MODEL_heldout.jsonl unless given, or for a MODEL
    named demo-x the questions of demo."""
    num_questions: int = 0
    """Questions of the file; 0 takes all."""
    repeats: int = 2
    """Times that each is asked, one set after another: the fewer requests there are, the more of
    the time the last ones have the engine to themselves."""
    running: tuple[int, ...] = field(default=(4, 16), metadata=_COMMAS)
    """Numbers of requests at once."""
    max_tokens: int = 128
    """Most tokens per answer."""
    kinds: tuple[str, ...] = field(default=FDFO_KINDS, metadata=_COMMAS)
    """Workloads: the questions, or prompts that are long and uncached."""
    long_prompt_blocks: int = 20
    """Blocks of the longest uncached prompt; the shortest has a fifth."""
    num_long: int = 32
    """Long prompts."""
    replay_rounds: str = ""
    """Instead of questions, blocks that take so many rounds, whatever the weights (random ones:
    --load-format dummy): ROUNDS:BLOCKS,..."""
    shares: bool = False
    """Compare `full` with itself without each of its refinements, too."""

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
    """`1:151,2:39` as how many blocks take how many rounds.

    Raises:
        ValueError: it is of another form.
    """
    try:
        pairs = [pair.split(":") for pair in text.split(",") if pair]
        found = {int(rounds): int(blocks) for rounds, blocks in pairs}
    except ValueError as error:
        raise ValueError(f"--replay-rounds {text}: give ROUNDS:BLOCKS,...") from error
    if any(rounds < 1 or blocks < 1 for rounds, blocks in found.items()):
        raise ValueError("--replay-rounds needs numbers of at least 1")
    return found
