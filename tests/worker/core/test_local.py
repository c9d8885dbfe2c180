"""The executor whose rank 0 steps in the caller's process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints.dense import write_checkpoint
from tests.support.engines.engine_driver import Engine
from worker.core.executor import RankFailure
from worker.protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow


def test_a_killed_peer_is_named(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_checkpoint("qwen3", tmp_path)
    # The exit of a forked rank is reported by its server, a moment after the kernel.
    with Engine(str(tmp_path), tensor_parallel_size=2, kv_cache_tokens=1024, forks=False) as engine:
        (peer,) = engine.peer_pids
        os.kill(peer, signal.SIGKILL)
        with pytest.raises(RankFailure, match="was killed by SIGKILL"):
            engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=8))


def test_a_peer_that_fails_early_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("qwen3", tmp_path)
    startup = tmp_path / "startup"
    startup.mkdir()
    (startup / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(startup), prepend=os.pathsep)
    with pytest.raises(RankFailure, match="code 3"):
        Engine(str(tmp_path), tensor_parallel_size=2, kv_cache_tokens=1024, forks=False)
