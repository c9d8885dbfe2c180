"""Engine link: the frontend's socket to the engine of one epoch."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from worker.plan.sockets import FrameStream, listen
from worker.protocol.messages import EngineMessage


class EngineConnection:
    """Connection to rank 0 by a socket in a directory that only the user of this process can
    access.

    Args:
        parent_directory: folder in which that directory is created.
        on_message: called with each message of rank 0, in order; an exception raised by it breaks
            the connection.
    """

    def __init__(self, parent_directory: str, on_message: Callable[[EngineMessage], None]) -> None:
        # mkdtemp sets mode 0700. The path of a socket is limited to 107 bytes, hence the short
        # names.
        self.directory = tempfile.mkdtemp(prefix="rf-", dir=parent_directory)
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails when a message cannot be handled, or when `fail` is called."""
        self._on_message = on_message
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._num_submits = 0
        self._loop = asyncio.get_running_loop()
        self._stream: FrameStream | None = None
        self._listener = listen(self.directory, "front", 1)
        # asyncio streams would add the overhead of buffers and tasks to every step.
        self._loop.add_reader(self._listener, self._accept)

    def send(self, payload: bytes, num_submits: int = 0) -> int:
        """Sends a SubmitBatch to rank 0 without waiting; returns the ordinal of its last submit.

        Ordinals count the submits sent to this engine. Rank 0 counts them in the same order, so the
        loads that it reports show which submits they include.
        """
        assert self._stream is not None, "the engine is still loading"
        self._stream.send(payload)
        if self._stream.unsent:
            self._loop.add_writer(self._stream.fileno(), self._flush)
        self._num_submits += num_submits
        return self._num_submits

    def fail(self, reason: str) -> None:
        """Breaks the connection to a hung engine; `broken` fails with the reason."""
        if not self.broken.done():
            self._detach()
            self.broken.set_exception(RuntimeError(reason))

    def close(self) -> None:
        """Drops unsent data and removes the directory."""
        self.broken.cancel()
        self._detach()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(Path(self.directory))

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        assert self._stream is None, "one engine per epoch"
        self._stream = FrameStream(connection)
        self._loop.add_reader(self._stream.fileno(), self._read)

    def _read(self) -> None:
        assert self._stream is not None
        try:
            for payload in self._stream.read(wait=False):
                self._on_message(self._decode(payload))
        except EOFError:
            self._detach()  # rank 0 exits, and its supervisor receives the reason
        except Exception as error:
            self._detach()
            self.broken.set_exception(error)

    def _flush(self) -> None:
        assert self._stream is not None
        self._stream.flush()
        if not self._stream.unsent:
            self._loop.remove_writer(self._stream.fileno())

    def _detach(self) -> None:
        if self._stream is not None and self._stream.fileno() >= 0:
            self._loop.remove_reader(self._stream.fileno())
            self._loop.remove_writer(self._stream.fileno())
            self._stream.close()
