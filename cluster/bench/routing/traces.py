"""Request traces of Mooncake (Qin et al., FAST 2025): times, lengths, and blocks in common."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec
import numpy as np

from cluster.bench.routing.workload import Arrival, FleetShape, Workload

_BLOCK = 512
"""Tokens per block of the traces."""
_PAGES = 3000
_REQUESTS = 1500
_WARM = 500
"""Part of the trace's requests that only fill the caches."""
_SHORTER = 4
"""Generated tokens are divided by it: only prompts matter to a router, and the simulation's time
goes into steps that generate."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceFile(NamedTuple):
    """A trace in Mooncake's format; see its repository, folder FAST25-release/traces."""

    path: str

    def lines(self) -> list[_Line]:
        """All requests. Raises ValueError where there is no such file."""
        try:
            with open(self.path, "rb") as file:
                decoder = msgspec.json.Decoder(_Line)
                return [decoder.decode(line) for line in file if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(
                f"no trace at {self.path} ({error}): fetch FAST25-release/traces of "
                "kvcache-ai/Mooncake, and name the folder with --traces"
            ) from error


def find_traces(folder: str) -> str | None:
    """The folder, if the traces lie in it."""
    return folder if os.path.exists(f"{folder}/conversation_trace.jsonl") else None


def trace_workload(seed: int, *, trace: TraceFile, speed: float, scale: float = 1.0) -> Workload:
    """A stretch of the trace, another one for each seed, with arrivals `speed` times as fast."""
    lines = trace.lines()
    shape = FleetShape(page_size=_BLOCK, num_pages=_PAGES, max_num_seqs=128)
    count = min(max(int(_REQUESTS * scale), 1), len(lines))
    first = int(np.random.default_rng(seed).integers(len(lines) - count + 1))
    lines = lines[first : first + count]
    began = lines[0].timestamp
    arrivals = tuple(
        Arrival(
            request_id=f"t{number}",
            at=(line.timestamp - began) / 1000.0 / speed,
            tokens=_tokens(line, number),
            output_len=max(line.output_length // _SHORTER, 1),
            measured=number >= int(_WARM * scale),
        )
        for number, line in enumerate(lines)
    )
    name = os.path.basename(trace.path).removesuffix("_trace.jsonl")
    return Workload(name=f"{name}-x{speed}", arrivals=arrivals, fleet=shape)


def trace_arrivals(
    trace: TraceFile, speed: float, duration: float, *, length_scale: float = 1.0
) -> list[Arrival]:
    """The first `duration` seconds of a trace that is replayed `speed` times as fast, as it is.

    `length_scale` shortens or lengthens prompts, their blocks and completions alike, so that the
    parts that prompts have in common stay.
    """
    lines = trace.lines()
    began = lines[0].timestamp
    return [
        Arrival(
            request_id=f"t{number}",
            at=(line.timestamp - began) / 1000.0 / speed,
            tokens=_tokens(line, number, length_scale),
            output_len=max(round(line.output_length * length_scale), 1),
        )
        for number, line in enumerate(lines)
        if (line.timestamp - began) / 1000.0 / speed < duration
    ]


def _tokens(line: _Line, number: int, scale: float = 1.0) -> bytes:
    """Equal blocks for equal ids; a last part that is no whole block is the request's own."""
    block = max(round(_BLOCK * scale), 1)
    ids = np.array(line.hash_ids, np.int64)[:, None]
    tokens = (ids * 40_503 + np.arange(block) * 2_654_435_761) % 999_983
    flat = tokens.reshape(-1)[: max(round(line.input_length * scale), 1)]
    whole = line.input_length // _BLOCK * block
    flat[whole:] = (flat[whole:] + number) % 999_983
    return flat.astype("<i4").tobytes()
