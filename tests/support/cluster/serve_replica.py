"""A replica as seen by a Serve request router."""

from __future__ import annotations

from ray.serve._private.common import (
    DeploymentID,
    ReplicaID,
)

DEPLOYMENT = DeploymentID(name="model", app_name="app")


class Replica:
    """A replica as seen by a router."""

    node_id = "node"
    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = 100

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0
