"""Pooling models of a rig."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.router.rig import Rig
from worker.protocol.pooling import PoolingInfo

EMBED = PoolingInfo(
    task="embed",
    pooling_type="last",
    size=8,
    prompts=(("query", "fox: "), ("document", "")),
)
RERANK = PoolingInfo(
    task="classify",
    pooling_type="last",
    size=2,
    activation="softmax",
    labels=("no", "yes"),
    pair_template="<{instruction}> {query} {document}",
    instruction="rank",
)
CLASSIFY = PoolingInfo(
    task="classify", pooling_type="last", size=2, activation="softmax", labels=("bad", "good")
)
CROSS = PoolingInfo(
    task="classify", pooling_type="last", size=1, activation="sigmoid", labels=("LABEL_0",)
)


async def start(rig: Rig, pooling: PoolingInfo, **config: Any) -> None:
    """Starts the rig with workers of a pooling model."""
    for worker in rig.workers:
        worker.info = msgspec.structs.replace(worker.info, pooling=pooling)
    await rig.start(**config)


async def post(rig: Rig, path: str, **body: Any) -> Any:
    """The response to a body, which must be accepted."""
    response = await rig.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
