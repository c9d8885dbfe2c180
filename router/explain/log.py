"""DecisionLog: a JSON Lines file with a gateway's routing decisions for one model."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from router.explain.keyed import KEY_BYTES, KeyedNames
from router.explain.record import DecisionLine, FleetSpeed, LogLine, WorkerSeen
from router.fleet import Fleet, WorkerState
from router.private_files import RotatedFile

logger = logging.getLogger(__name__)

MAX_BLOCKS = 8192
"""Maximum number of leading blocks of a prompt that are logged: 131,072 tokens with pages of 16
tokens. Their hashes take 87 kB."""
_HASH_BYTES = 8
_MIN_SECRET_BYTES = 16
_SPEED_EVERY = 256
"""Number of decisions after which a line with the fleet's step times is logged again."""
_BUFFER = 1 << 16
"""Size in bytes of the line buffer."""


class DecisionLog:
    """Appends to FOLDER/MODEL-GATEWAY.jsonl. Lines are buffered up to 64 kB; `close` flushes.

    Only the user that runs the gateway may read the file. When it is full, it replaces
    MODEL-GATEWAY.1.jsonl, and a new file starts with the current workers. If writing fails, the log
    is disabled; requests are not affected.

    Args:
        folder: folder of logs; created if it does not exist.
        model: name of the model.
        gateway_id: id of this gateway.
        max_bytes: maximum total size in bytes of this gateway's two files, and of the files of all
            exited gateways.
        key_file: file with the key of all hashes; empty for a random key.

    Raises:
        ValueError: the log is not writable, or the key file is unreadable or too short.
    """

    def __init__(
        self, folder: str, model: str, gateway_id: str, *, max_bytes: int, key_file: str = ""
    ) -> None:
        name = re.sub(r"[^\w.-]", "-", model)
        path = Path(folder) / f"{name}-{gateway_id}.jsonl"
        self._names = KeyedNames(_read_key(key_file))
        self._encoder = msgspec.json.Encoder()
        self._num_decided = 0
        self._file: RotatedFile | None
        """The log file; None once the log is disabled."""
        try:
            self._file = RotatedFile(
                path, max_bytes=max_bytes // 2, buffering=_BUFFER, others=f"{name}-gw-*.jsonl"
            )
        except OSError as error:
            raise ValueError(
                f"decision_log: cannot write to {folder}: {error.strerror or error}"
            ) from error

    def worker(self, worker: WorkerState) -> None:
        """Logs a worker that has attached."""
        if worker.info is not None:
            info = worker.info
            self._write(
                WorkerSeen(
                    worker_id=worker.worker_id,
                    page_size=info.page_size,
                    num_pages=info.num_blocks,
                    max_num_seqs=info.max_num_seqs,
                    max_num_batched_tokens=info.max_num_batched_tokens,
                )
            )

    def decided(self, line: DecisionLine, fleet: Fleet) -> None:
        """Logs the decision of a finished completion, preceded from time to time by the fleet's
        step times."""
        if self._file is not None and not self._file.has_room():
            self._turn_over(self._file, fleet)
        if self._num_decided % _SPEED_EVERY == 0:
            self._speed(fleet)
        self._num_decided += 1
        hashes = np.frombuffer(line.hashes[: MAX_BLOCKS * _HASH_BYTES], "<u8")
        keyed = self._names.blocks(hashes).astype("<u8").tobytes()
        session = self._names.text(line.session)
        self._write(msgspec.structs.replace(line, hashes=keyed, session=session))

    def close(self, fleet: Fleet) -> None:
        """Logs the fleet's step times, and flushes buffered lines."""
        self._speed(fleet)
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(self._file, error)
            self._file = None

    def _turn_over(self, file: RotatedFile, fleet: Fleet) -> None:
        try:
            file.turn_over()
        except OSError as error:
            self._give_up(file, error)
        for worker in fleet.workers:
            self.worker(worker)
        self._num_decided = 0

    def _speed(self, fleet: Fleet) -> None:
        factors = {w.worker_id: fleet.pace.factor(w.row) for w in fleet.workers}
        if factors:
            self._write(FleetSpeed(costs=fleet.pace.costs, factors=factors))

    def _write(self, line: LogLine) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(line))
        except OSError as error:
            self._give_up(self._file, error)

    def _give_up(self, file: RotatedFile, error: OSError) -> None:
        logger.error("disabling decision log %s after a write error: %s", file.path, error)
        self._file = None
        with contextlib.suppress(OSError):  # buffered lines cannot be written
            file.close()


def _read_key(path: str) -> bytes:
    if not path:
        return secrets.token_bytes(KEY_BYTES)
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(
            f"decision_log_key_file: cannot read {path}: {error.strerror or error}"
        ) from error
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(
            f"decision_log_key_file {path} has fewer than {_MIN_SECRET_BYTES} bytes: fill it with "
            "a secret, such as the output of `openssl rand -hex 32`"
        )
    return hashlib.blake2b(secret, digest_size=KEY_BYTES).digest()


def read_decisions(path: str) -> Iterator[LogLine]:
    """Yields the lines of a log file, or of all logs in a folder.

    Raises:
        ValueError: there is no log, or a line is malformed.
    """
    root = Path(path)
    files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
    if not files:
        raise ValueError(f"no decision log (*.jsonl) in {path}")
    decoder = msgspec.json.Decoder(LogLine)
    for file in files:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise ValueError(f"cannot read the decision log {file}: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                if number == len(lines):
                    break  # the gateway was killed while writing
                raise ValueError(f"{file}:{number} is not a decision log line: {error}") from error
