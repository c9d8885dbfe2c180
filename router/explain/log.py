"""The decision log: a file of JSON lines per gateway and model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from router.explain.record import Decided, FleetSpeed, LogLine, WorkerSeen
from router.fleet import Fleet, WorkerState

_SPEED_EVERY = 256
"""Decisions between two lines on speeds."""
_BUFFER = 1 << 16


class DecisionLog:
    """Appends to FOLDER/MODEL-GATEWAY.jsonl. Lines wait in a buffer of 64 kB; `close` writes it.

    Args:
        folder: made if it is not there.
        model: its name.
        gateway_id: whose decisions these are.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, folder: str, model: str, gateway_id: str) -> None:
        name = re.sub(r"[^\w.-]", "-", model)
        path = Path(folder) / f"{name}-{gateway_id}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=_BUFFER)
        except OSError as error:
            raise ValueError(f"--decision-log {folder}: {error}") from error
        self._encoder = msgspec.json.Encoder()
        self._num_decided = 0

    def worker(self, worker: WorkerState) -> None:
        """A worker was attached."""
        if worker.info is not None:
            info = worker.info
            self._write(
                WorkerSeen(
                    worker_id=worker.worker_id,
                    page_size=info.page_size,
                    num_pages=info.max_total_tokens // info.page_size,
                    max_num_seqs=info.max_num_seqs,
                    max_num_batched_tokens=info.max_num_batched_tokens,
                )
            )

    def decided(self, line: Decided, fleet: Fleet) -> None:
        """A request has ended."""
        if self._num_decided % _SPEED_EVERY == 0:
            self._speed(fleet)
        self._num_decided += 1
        self._write(line)

    def close(self, fleet: Fleet) -> None:
        """Writes what is left."""
        if not self._file.closed:
            self._speed(fleet)
            self._file.close()

    def _speed(self, fleet: Fleet) -> None:
        factors = {w.worker_id: fleet.pace.factor(w.row) for w in fleet.workers}
        if factors:
            self._write(FleetSpeed(costs=fleet.pace.costs, factors=factors))

    def _write(self, line: LogLine) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_decisions(path: str) -> Iterator[LogLine]:
    """The lines of a log file, or of all logs in a folder.

    Raises:
        ValueError: there is none, or a line is not one of a decision log.
    """
    root = Path(path)
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    if not files:
        raise ValueError(f"there is no decision log (*.jsonl) in {path}")
    decoder = msgspec.json.Decoder(LogLine)
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ValueError(f"cannot read the decision log {file}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if number == len(lines):
                    return  # cut off when its gateway was killed
                raise ValueError(
                    f"{file}:{number} is no line of a decision log: {error}"
                ) from error
