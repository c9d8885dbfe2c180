"""Options of pooling models: names of this server and of vLLM, and contradictions."""

from __future__ import annotations

import pytest

from worker.config import EngineConfig
from worker.protocol.pooling import PoolingParams


@pytest.mark.parametrize(
    ("options", "task"),
    [
        ({}, "auto"),
        ({"task": "score"}, "score"),
        ({"runner": "generate"}, "generate"),
        ({"runner": "pooling"}, "pooling"),
        ({"runner": "pooling", "convert": "classify"}, "classify"),
        ({"convert": "embed"}, "embed"),
        ({"convert": "none"}, "generate"),
        ({"pooling_type": "MEAN", "normalize": False}, "auto"),
    ],
)
def test_requested_tasks(options: dict[str, object], task: str) -> None:
    assert EngineConfig.of(model="m", **options).pooling.requested == task


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "embed", "runner": "pooling"}, "--task embed cannot be combined"),
        ({"task": "embed", "convert": "embed"}, "--task embed cannot be combined"),
        ({"runner": "generate", "convert": "embed"}, "--convert embed needs --runner pooling"),
        ({"runner": "pooling", "convert": "none"}, "--convert none needs --runner generate"),
    ],
)
def test_contradictions(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.of(model="m", **options)


def test_dimensions_are_positive() -> None:
    with pytest.raises(ValueError, match="dimensions must be at least 1, got 0"):
        PoolingParams(dimensions=0)
