"""Serve's request router for WorkerGroup deployments: a call goes to the replica it names.

Serve pickles this module by value, and with it each object that it has imported by name: the
state is reached through its module, which is pickled as a name.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster import workers


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # Ray ships no types
    """Routes by the keyword argument `worker_id` of each call, and publishes the set of ids."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The named replica alone; none while it is not there, and Serve then asks again.

        A call that names none may go to any.
        """
        if pending_request is None:
            return [candidate_replicas]
        # HAZARD: otherwise Serve asks again without a pause. Where the named replica has just died
        # it would never let go of the event loop, and the gateway would stand still.
        pending_request.routing_context.should_backoff = True
        worker_id = pending_request.kwargs.get("worker_id")
        if worker_id is None:
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == worker_id]]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news of the running replicas."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Serve found a replica dead before its controller did."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        ids = tuple(replica_id.unique_id for replica_id in self.curr_replicas)
        workers.WORKERS[self._deployment_id.name].replace(ids)
