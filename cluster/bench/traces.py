"""Request traces of Mooncake (Qin et al., FAST 2025): arrival times, lengths and shared blocks."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec
import numpy as np

from cluster.bench.datasets import Ids

TRACE_BLOCK = 512
"""Tokens per block of the traces."""
_RANGE = 999_983
"""Upper bound on the token ids of prompts."""


class TraceLine(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    """Arrival time in milliseconds."""
    input_length: int
    """Number of prompt tokens."""
    output_length: int
    """Number of output tokens."""
    hash_ids: list[int]
    """IDs of the prompt's blocks of TRACE_BLOCK tokens; equal blocks have equal IDs."""

    def tokens(self, number: int, scale: float = 1.0) -> Ids:
        """Token IDs of the prompt, equal for equal block IDs except for the last, incomplete block,
        which is unique per request.

        Args:
            number: index of the request.
            scale: factor for the lengths of prompt and blocks.
        """
        block = max(round(TRACE_BLOCK * scale), 1)
        ids = np.array(self.hash_ids, np.int64)[:, None]
        tokens: Ids = (ids * 40_503 + np.arange(block) * 2_654_435_761) % _RANGE
        flat = tokens.reshape(-1)[: max(round(self.input_length * scale), 1)]
        whole = self.input_length // TRACE_BLOCK * block
        flat[whole:] = (flat[whole:] + number) % _RANGE
        return flat


class TraceRequest(NamedTuple):
    """One request of a replayed trace."""

    arrival_s: float
    """Seconds after the first request's arrival."""
    tokens: Ids
    output_len: int


class TraceFile(NamedTuple):
    """A trace in Mooncake's format; see its repository, folder FAST25-release/traces."""

    path: str

    def lines(self) -> list[TraceLine]:
        """All requests of the trace. Raises ValueError if the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                decoder = msgspec.json.Decoder(TraceLine)
                return [decoder.decode(line) for line in file if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            problem = (
                f"cannot read trace {self.path}: {error.strerror}"
                if isinstance(error, OSError)
                else f"{self.path} is not a Mooncake trace ({error})"
            )
            raise ValueError(
                f"{problem}; download FAST25-release/traces from github.com/kvcache-ai/Mooncake"
            ) from error


def find_traces(folder: str) -> str | None:
    """The folder if it contains the traces; None otherwise."""
    return folder if os.path.exists(f"{folder}/conversation_trace.jsonl") else None


def trace_requests(
    trace: TraceFile, speed: float, duration: float, *, length_scale: float = 1.0
) -> list[TraceRequest]:
    """Requests of the first `duration` seconds of a replay.

    Args:
        speed: replay speed relative to the trace.
        duration: duration of the replay in seconds.
        length_scale: factor for the lengths of prompts, blocks and completions, which keeps the
            shared fraction of prompts.
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
