"""What `rayfleet bench fdfo` compares, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, get_args

from worker.config import EngineConfig
from worker.wire.diffusion import DllmFeature


class Arm(NamedTuple):
    """How an engine runs blocks."""

    first_out: bool
    features: tuple[str, ...]
    """Refinements that are on."""
    caches: bool
    """Whether it has a prefix cache."""
    overlaps: bool = False
    """Whether `--overlap-depth` counts; otherwise no step leaves before a result is reported."""


ARMS: Final[Mapping[str, Arm]] = {
    "synchronous": Arm(False, ("inplace", "mixed_rounds"), False),
    "fdfo": Arm(True, ("inplace", "mixed_rounds"), False),
    "fused": Arm(True, ("inplace", "mixed_rounds", "fused_commit", "skip_last_commit"), False),
    "full": Arm(True, get_args(DllmFeature), False, overlaps=True),
    "cached": Arm(True, ("inplace", "mixed_rounds"), True),
    "reentry": Arm(True, ("mixed_rounds",), True),
}
"""`cached` is what `reentry` is compared with."""
LONG_ARMS: Final[Mapping[str, Arm]] = {
    "synchronous": Arm(False, ("inplace",), False),
    "fdfo": Arm(True, ("inplace",), False),
    "full": ARMS["full"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FdfoOptions:
    """What runs; the benchmark sets the engine's modes and `max_num_seqs` itself."""

    engine: EngineConfig
    questions: str | None = None
    """JSON lines with `messages` and `answer`; None takes `MODEL_heldout.jsonl`, or for a MODEL
    named demo-x the questions of demo."""
    num_questions: int = 0
    """Of the file's; 0 takes all."""
    repeats: int = 2
    """Times that each is asked, one set after another: the fewer requests there are, the more of
    the time the last ones have the engine to themselves."""
    running: tuple[int, ...] = (4, 16)
    pairs: int = 10
    max_tokens: int = 128
    long_prompt_blocks: int = 20
    """Of the long uncached prompts, at most; the shortest have a fifth."""
    num_long: int = 32
    shares: bool = False
    """Whether `full` is compared with itself without each of its refinements, too."""
    kinds: tuple[str, ...] = ("questions", "long")
    """Workloads: the questions, or prompts that are long and uncached."""
    replay: Mapping[int, int] = field(default_factory=dict)
    """Instead of questions: how many blocks take how many rounds."""

    def __post_init__(self) -> None:
        counts = (self.pairs, self.repeats, self.max_tokens, *self.running)
        if not self.running or min(counts) < 1:
            raise ValueError("--pairs, --repeats, --running and --max-tokens must be at least 1")
        if not self.kinds or not set(self.kinds) <= {"questions", "long"}:
            raise ValueError("--kinds: choose from questions, long")
        if self.long_prompt_blocks < 5 or self.num_long < 1 or self.num_questions < 0:
            raise ValueError("--long-prompt-blocks must be at least 5, --num-long at least 1")


def arm_config(engine: EngineConfig, arm: Arm, running: int) -> EngineConfig:
    """The engine of one arm."""
    return replace(
        engine,
        max_num_seqs=running,
        dllm_fdfo=arm.first_out,
        dllm_disable=tuple(f for f in get_args(DllmFeature) if f not in arm.features),
        enable_prefix_caching=arm.caches,
        overlap_depth=engine.overlap_depth if arm.overlaps else 0,
    )
