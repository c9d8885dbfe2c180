"""Request traces of Mooncake (Qin et al., FAST 2025): times, lengths, and blocks in common."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec
import numpy as np

from cluster.bench.datasets import Ids

TRACE_BLOCK = 512
"""Tokens per block of the traces."""
_RANGE = 999_983
"""Token ids are below it."""


class TraceLine(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """Ids of the blocks of its prompt: equal where prompts have text in common."""

    def tokens(self, number: int, scale: float = 1.0) -> Ids:
        """Equal blocks for equal ids; a last part that is no whole block is the request's own.

        Args:
            number: of the request.
            scale: of the lengths of prompt and blocks.
        """
        block = max(round(TRACE_BLOCK * scale), 1)
        ids = np.array(self.hash_ids, np.int64)[:, None]
        tokens: Ids = (ids * 40_503 + np.arange(block) * 2_654_435_761) % _RANGE
        flat = tokens.reshape(-1)[: max(round(self.input_length * scale), 1)]
        whole = self.input_length // TRACE_BLOCK * block
        flat[whole:] = (flat[whole:] + number) % _RANGE
        return flat


class TraceRequest(NamedTuple):
    """One request as it is replayed."""

    arrival_s: float
    """Seconds after the first request's arrival."""
    tokens: Ids
    output_len: int


class TraceFile(NamedTuple):
    """A trace in Mooncake's format; see its repository, folder FAST25-release/traces."""

    path: str

    def lines(self) -> list[TraceLine]:
        """All requests. Raises ValueError where there is no such file."""
        try:
            with open(self.path, "rb") as file:
                decoder = msgspec.json.Decoder(TraceLine)
                return [decoder.decode(line) for line in file if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(
                f"no trace at {self.path} ({error}): fetch FAST25-release/traces of "
                "kvcache-ai/Mooncake, and name the folder with --traces"
            ) from error


def find_traces(folder: str) -> str | None:
    """The folder, if the traces lie in it."""
    return folder if os.path.exists(f"{folder}/conversation_trace.jsonl") else None


def trace_requests(
    trace: TraceFile, speed: float, duration: float, *, length_scale: float = 1.0
) -> list[TraceRequest]:
    """The first `duration` seconds of a trace that is replayed `speed` times as fast, as it is.

    `length_scale` shortens or lengthens prompts, their blocks and completions alike, so that the
    parts that prompts have in common stay.
    """
    lines = trace.lines()
    began = lines[0].timestamp
    return [
        TraceRequest(
            arrival_s=(line.timestamp - began) / 1000.0 / speed,
            tokens=line.tokens(number, length_scale),
            output_len=max(round(line.output_length * length_scale), 1),
        )
        for number, line in enumerate(lines)
        if (line.timestamp - began) / 1000.0 / speed < duration
    ]
