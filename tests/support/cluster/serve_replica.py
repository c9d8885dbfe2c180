"""What a Serve request router sees of a replica."""

from __future__ import annotations

from ray.serve._private.common import (
    DeploymentID,
    ReplicaID,
)

DEPLOYMENT = DeploymentID(name="model", app_name="app")


class Replica:
    """What a router sees of one."""

    node_id = "node"
    availability_zone = None
    multiplexed_model_ids: frozenset[str] = frozenset()
    max_ongoing_requests = 100

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0
