"""Request router of Serve for workers and gateways: a call goes to the replica that it names.

Serve pickles this module by value, and with it each object that is imported from another module. So
it imports the module `workers`, which is pickled by reference, and not WORKERS itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster import workers


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Router by the keyword argument `worker_id` or `peer_id` of each call; keeps `workers.WORKERS`
    current."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The named replica alone; none while it is missing, and Serve then tries again.

        A call that names none may go to any replica.
        """
        if pending_request is None:
            return [candidate_replicas]
        # HAZARD: without backoff Serve asks again without a pause. Where the named replica has just
        # died, that loop would never yield, and the gateway would hang.
        pending_request.routing_context.should_backoff = True
        named = pending_request.kwargs.get("worker_id") or pending_request.kwargs.get("peer_id")
        if named is None:
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == named]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with the running replicas, when they change."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Called by Serve when a call finds a replica dead before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        ids = tuple(replica_id.unique_id for replica_id in self.curr_replicas)
        workers.WORKERS[self._deployment_id.name].replace(ids)
