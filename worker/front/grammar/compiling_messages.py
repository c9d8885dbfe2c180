"""What a compiling process and its owner say to each other."""

from __future__ import annotations

import struct

import msgspec

from worker.wire.structured import StructuredOutputsParams

LENGTH = struct.Struct("<I")


class Setting(msgspec.Struct, frozen=True):
    """What a compiling process gets as its arguments."""

    tokenizer: str
    """Checkpoint folder or Hub repository."""
    vocab_size: int
    eos_token_ids: list[int]
    backend: str
    """auto, xgrammar or guidance."""


class Job(msgspec.Struct, frozen=True):
    """One grammar to compile."""

    params: StructuredOutputsParams
    cpu_s: float
    """Processor time that it may take, of all threads."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a Job: a payload, or the reason why there is none."""

    backend: str = ""
    payload: str = ""
    problem: str | None = None
    is_final: bool = True
    """False where a limit of time or memory decided: another time the Job may keep it."""
