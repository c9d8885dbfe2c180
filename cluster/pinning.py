"""Serve request router for workers and gateways, which sends each call to a given replica.

Serve pickles this module by value, including objects imported from other modules. Therefore it
imports the module `workers`, which is pickled by reference, and not WORKERS itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster import workers


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Routes each call to the replica given by its keyword argument `worker_id` or `peer_id`;
    updates `workers.WORKERS`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Only the given replica; empty while it is missing, in which case Serve retries.

        A call without either argument may go to any replica.
        """
        if pending_request is None:
            return [candidate_replicas]
        # HAZARD: without backoff Serve retries without a pause. If the replica has just died, that
        # loop would never yield, and the gateway would hang.
        pending_request.routing_context.should_backoff = True
        kwargs = pending_request.kwargs
        replica_id = kwargs.get("worker_id") or kwargs.get("peer_id")
        if replica_id is None:
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == replica_id]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Updates the worker set; Serve calls this with the running replicas when they change."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Removes a dead replica from the worker set; Serve calls this if a call detects the
        failure before the controller does."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        ids = tuple(replica_id.unique_id for replica_id in self.curr_replicas)
        workers.WORKERS[self._deployment_id.name].replace(ids)
