"""An engine as `LLM` has it, which a benchmark drives step by step."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from types import TracebackType
from typing import Self

import msgspec

from worker.config import EngineConfig
from worker.core.engine import EngineCore
from worker.core.executor_factory import create_executor
from worker.wire.messages import EngineInfo, StepReport, Submit
from worker.wire.sampling import SamplingParams

GATEWAY = "bench"
"""Whose requests a benchmark's are."""


class BenchEngine:
    """Starts the engine; `close`, or leaving the `with` block, ends its ranks.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._directory = tempfile.mkdtemp(prefix="rf-")
        self._executor = create_executor(config, self._directory, spawn_peers=True)
        try:
            self._core = EngineCore(config, self._executor.start(), self._executor, time.monotonic)
        except BaseException:
            self.close()
            raise
        self._ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._core.info

    def close(self) -> None:
        """Ends the engine's ranks."""
        self._executor.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, prompt: bytes, sampling: SamplingParams, cache_salt: str = "") -> Submit:
        return Submit(
            request_id=str(next(self._ids)),
            gateway_id=GATEWAY,
            prompt=prompt,
            sampling=sampling,
            cache_salt=cache_salt,
        )

    def _step(self) -> StepReport:
        report = self._core.step()
        self._encoder.encode(report)  # as the worker does for its front
        return report
