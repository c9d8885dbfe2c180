"""`make check-nodes`: three Ray nodes, of which one is killed and another one joins.

Two models are served. `one` has a worker on each of two nodes. When a node is killed, its streams
are resumed on the other one, and when a node joins, there are two workers again. `pair` has one
worker whose two ranks are on different nodes. When the second rank's node is killed, its streams
pause, and are resumed on the same worker once the new node has joined. At the end, the head node,
whose state is in Redis, is killed and restarted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.config import find_demo_model
from tests.campaigns.checks import check_main
from tests.support.fleet.node_cluster import NodeCluster, find_redis
from tests.support.fleet.node_streams import NodeStreams, Stream

ONE, PAIR = "one", "pair"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesOptions:
    """Models, load and faults."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    num_streams: int = 8
    """Number of streams of the model with two workers; the other model gets 1/4 as many."""
    num_tokens: int = 600
    """Tokens per stream."""
    pair: bool = True
    """Also serve the model whose ranks are on two nodes."""
    head_restart: bool = True
    """Kill and restart the head node at the end; requires redis-server."""
    node_check_ms: int = 3000
    """Milliseconds between health checks of a node by Ray's head; after five failed checks, the
    node is lost. Default: Ray's default."""

    def __post_init__(self) -> None:
        if self.num_streams < 4:
            raise ValueError("--num-streams must be at least 4")
        if self.node_check_ms < 1:
            raise ValueError(f"--node-check-ms must be at least 1, got {self.node_check_ms}")


class NodesCheck:
    """Steps in order; each adds its checks."""

    def __init__(self, options: NodesOptions, nodes: NodeCluster) -> None:
        self.checks: list[Check] = []
        self.values: dict[str, float] = {}
        self._options = options
        self._nodes = nodes
        self._num_workers = 3 if options.pair else 2
        self._first: Any = None
        self._second: Any = None
        self._undisturbed: list[Stream] = []

    def start(self) -> None:
        """Starts three nodes: a head without workers, one with the gateway, and a third."""
        nodes = self._nodes
        nodes.start()
        self._first = nodes.add(gateway=1, place=1, lead=1)
        self._second = nodes.add(place=1, follow=1)
        nodes.deploy(_arguments(self._options), _deployments(self._options))
        nodes.wait_workers(self._num_workers)
        counts = [len(nodes.ranks_on(node)) for node in (self._first, self._second)]
        per_node = 2 if self._options.pair else 1
        self.checks.append(exactly("nodes_with_ranks", counts.count(per_node), "nodes", 2))
        self._undisturbed = self._streams().wait()
        note(f"{self._num_workers} workers on two nodes, ranks: {counts}")

    def lose_node(self) -> None:
        """Kills the second node during streams, lets a third one join, and waits until all workers
        are ready."""
        nodes, lost = self._nodes, {worker for _, worker in self._nodes.ranks_on(self._second)}
        streams = self._streams()
        streams.wait_begun()
        nodes.kill(self._second)
        ones = streams.wait(ONE)
        note("a node was killed; its streams were resumed on another node")
        left = nodes.wait_workers(1)
        moved = [stream for stream in ones if stream.worker in lost]
        waiting = [stream for stream in streams.of(PAIR) if not stream.ended]
        began = time.monotonic()
        nodes.add(place=1, follow=1)
        self.values["workers_left_after_s"] = left
        nodes.wait_workers(self._num_workers)
        self.values["capacity_back_after_s"] = time.monotonic() - began
        streams.wait()
        note("a node has joined; all workers are ready")
        self._judge("node_loss", streams)
        self.values["longest_pause_s"] = max(stream.longest_pause_s for stream in ones)
        self.checks += [
            at_least("streams_on_the_lost_node", len(moved), "streams", 1),
            exactly("workers_back", len(nodes.ready_workers()), "workers", self._num_workers),
        ]
        if self._options.pair:
            self.checks.append(
                at_least("streams_that_waited_for_a_node", len(waiting), "streams", 1)
            )
        used = {stream.worker for stream in self._streams().wait(ONE)}
        self.checks.append(exactly("workers_that_serve", len(used), "workers", 2))

    def restart_head(self) -> None:
        """Kills the head during streams, sends requests in the meantime, restarts the head, and
        kills a worker's node."""
        nodes = self._nodes
        streams = self._streams()
        streams.wait_begun()
        nodes.kill_head()
        meanwhile = self._streams()
        self._judge("head_loss", streams)
        self._judge("without_head", meanwhile)
        note("the head was killed; streams and new requests were served")
        began = time.monotonic()
        nodes.restart_head()
        # Only a working head can restart a lost worker.
        third = next(n for n in nodes.others() if n is not self._first)
        before = set(nodes.ready_workers())
        nodes.kill(third)
        nodes.wait_workers(1)
        nodes.add(place=1, follow=1)
        nodes.wait_workers(self._num_workers)
        self.values["head_works_again_after_s"] = time.monotonic() - began
        new = set(nodes.ready_workers()) - before
        self.checks.append(at_least("workers_placed_by_the_new_head", len(new), "workers", 1))
        self._judge("after_head_restart", self._streams())

    def _streams(self) -> NodeStreams:
        counts = {ONE: self._options.num_streams}
        if self._options.pair:
            counts[PAIR] = self._options.num_streams // 4
        return NodeStreams(self._nodes.base_url, counts, self._options.num_tokens)

    def _judge(self, name: str, streams: NodeStreams) -> None:
        """Checks that all streams finished, with the same tokens as without faults."""
        ended = streams.wait()
        broken = [stream.error for stream in ended if not stream.is_whole]
        pairs = zip(ended, self._undisturbed, strict=True)
        changed = sum(stream.token_ids != calm.token_ids for stream, calm in pairs)
        for error in broken:
            note(f"{name}: {error}")
        self.checks += [
            exactly(f"{name}_failed", len(broken), "streams", 0),
            exactly(f"{name}_changed", changed, "streams", 0),
        ]


def run_nodes(options: NodesOptions) -> Result:
    """Starts the nodes and runs the steps."""
    redis = find_redis() if options.head_restart else None
    with NodeCluster(redis, node_check_ms=options.node_check_ms) as nodes:
        check = NodesCheck(options, nodes)
        check.start()
        check.lose_node()
        if redis is not None:
            check.restart_head()
        elif options.head_restart:
            note("skipped: restart of the head (redis-server is not installed)")
    return {**check.values, "checks": checks_json(check.checks)}


def _arguments(options: NodesOptions) -> dict[str, Any]:
    common = {
        "model": options.model or find_demo_model(),
        "device": "cpu",
        "kv_cache_tokens": 16384,
        "batch_invariant": True,
    }
    models = [{**common, "served_model_name": ONE, "num_workers": 2}]
    if options.pair:
        pair = {"served_model_name": PAIR, "tensor_parallel_size": 2}
        models.append({**common, **pair, "tensor_parallel_placement": "spread"})
    return {"models": models}


def _deployments(options: NodesOptions) -> list[dict[str, Any]]:
    """Deployments, placed by the nodes' resources."""
    deployments: list[dict[str, Any]] = [
        {"name": "gateway", "ray_actor_options": {"num_cpus": 0.1, "resources": {"gateway": 1}}},
        {"name": f"worker-{ONE}", "placement_group_bundles": [{"CPU": 0.1, "place": 1}]},
    ]
    if options.pair:
        bundles = [{"CPU": 0.1, "lead": 1}, {"CPU": 0.1, "follow": 1}]
        deployments.append({"name": f"worker-{PAIR}", "placement_group_bundles": bundles})
    return deployments


if __name__ == "__main__":
    sys.exit(check_main(run_nodes, NodesOptions))
