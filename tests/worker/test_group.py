"""Whether a failed start of a rank group is retried, depending on how its ranks ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tests.support.paths import DEMO
from worker.config import EngineConfig
from worker.core.executor import RankFailure
from worker.group import _fetch_checkpoints, _Ranks
from worker.protocol.retry import Unavailable


def raised(cause: Exception) -> Exception:
    """An error as passed on by Ray from another process."""
    return RayTaskError("lead", "the traceback", cause)


UNSUPPORTED = raised(ValueError("no such architecture"))
REFUSED = raised(RankFailure("rank 1 failed: no such architecture", heals=False))
NOT_THERE = raised(RankFailure("rank 1 failed: no such folder"))
COLLECTIVE = raised(RuntimeError("Connection closed by peer"))
KILLED = ActorDiedError()


@pytest.mark.parametrize(
    ("endings", "heals"),
    [
        ([UNSUPPORTED], False),
        ([REFUSED, UNSUPPORTED], False),
        ([COLLECTIVE, UNSUPPORTED], False),
        ([UNSUPPORTED, None], False),
        ([NOT_THERE, raised(Unavailable("no such folder"))], True),
        ([COLLECTIVE, COLLECTIVE], True),
        ([COLLECTIVE, KILLED], True),
        ([REFUSED, KILLED], True),
        ([KILLED], True),
    ],
)
async def test_restarts_depend_on_how_ranks_ended(
    endings: list[Exception | None], heals: bool
) -> None:
    """None is a rank that is still running."""

    async def end(error: Exception | None) -> None:
        if error is None:
            await asyncio.sleep(3600)
        else:
            raise error

    ranks = _Ranks([end(error) for error in endings])
    await asyncio.wait(ranks.tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    assert ranks.may_heal == heals
    for task in ranks.tasks:
        task.cancel()


def test_a_draft_model_cannot_reference_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    index = {"weight_map": {"a": str(DEMO / "model.safetensors")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = EngineConfig.of(
        model=str(DEMO), speculative_method="draft", speculative_model=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"weights must be \*\.safetensors files next to it"):
        _fetch_checkpoints(config)
