"""`make check-rolling-update`: replaces a fleet under load, without failed requests.

The application is redeployed with a changed engine option, so that every gateway and worker group
is replaced. The load consists of sequences of short requests, long streams that are running when
their worker is drained, and clients that reuse idle keep-alive connections after the update.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.bench.client import Record
from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.config import ServeConfig
from cluster.launch import APPLICATION, LocalFleet
from tests.campaigns.checks import check_main, is_whole, serve_config
from tests.support.fleet.client_load import ClientLoad, ClientOptions
from tests.support.fleet.processes import find_parts

MODEL = "rolling"
_GONE_TIMEOUT_S = 60.0
"""Time limit in seconds for replaced processes to exit once their streams have finished."""
_SHARE_BEFORE = 0.2
"""Fraction of the requests that finish before the update; at least as many start after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollingUpdateOptions(ClientOptions):
    """Fleet and load."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    num_requests: int = 1000
    """Minimum number of requests."""
    num_workers: int = 2
    """Number of worker groups."""
    num_gateways: int = 1
    """Number of gateway processes."""
    python_proxy: bool = False
    """Use Serve's own proxy instead of HAProxy."""


def run_rolling_update(options: RollingUpdateOptions) -> Result:
    """Starts a fleet, replaces it under load, and counts failed requests."""
    config = serve_config(
        MODEL,
        options.model,
        num_workers=options.num_workers,
        endpoint={"num_gateways": options.num_gateways},
        max_num_seqs=32,
        kv_cache_tokens=32768,
    )
    parts = {
        "gateway": (f"ray::ServeReplica:{APPLICATION}:gateway",),
        "worker": (f"ray::ServeReplica:{APPLICATION}:{config.models[0].deployment}",),
    }
    part = round(_SHARE_BEFORE * options.num_requests)
    haproxy = False if options.python_proxy else None
    with (
        LocalFleet(config, report=note, haproxy=haproxy) as fleet,
        ClientLoad(fleet.base_url, options, MODEL) as load,
    ):
        load.wait_for(part)
        old = find_parts(parts)
        begin = time.perf_counter()
        fleet.update(_changed(config))
        kept = _wait_gone(old, parts)
        end = time.perf_counter()
        note(f"replaced in {end - begin:.1f} s, {len(load.records)} requests so far")
        load.wait_for(max(part, options.num_requests - len(load.records)))
        records = load.stop()
    return _result(records, begin, end, kept, options)


def _changed(config: ServeConfig) -> ServeConfig:
    """The same fleet with one changed engine option."""
    (model,) = config.models
    engine = model.engine.with_options(max_num_seqs=model.engine.scheduling.max_num_seqs + 16)
    return replace(config, models=(replace(model, engine=engine),))


def _wait_gone(old: dict[str, list[int]], parts: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Number of remaining processes, keyed by part, once there are none or on timeout."""
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while True:
        now = find_parts(parts)
        kept = {name: len(set(old[name]) & set(now[name])) for name in old}
        if not any(kept.values()) or time.monotonic() > deadline:
            return kept
        time.sleep(0.2)


def judge(
    records: Sequence[Record], kept: dict[str, int], options: RollingUpdateOptions
) -> list[Check]:
    """Checks of the responses and of remaining processes."""
    refused = sum(record.status not in (0, 200) for record in records)
    num_whole = sum(map(is_whole, records))
    return [
        at_least("requests", len(records), "requests", options.num_requests),
        exactly("failed", len(records) - num_whole, "requests", 0),
        exactly("refused", refused, "requests", 0),
        *(exactly(f"old_{part}s_left", kept[part], "processes", 0) for part in kept),
    ]


def _result(
    records: Sequence[Record],
    begin: float,
    end: float,
    kept: dict[str, int],
    options: RollingUpdateOptions,
) -> Result:
    during = [r for r in records if r.start < end and r.start + r.latency > begin]
    across = [r for r in during if r.requested_len == options.long_output_len]
    failures = [
        f"sent at {r.start - begin:+.2f} s, broken off {r.latency:.2f} s later after "
        f"{r.output_len} of {r.requested_len} tokens: {r.error}"
        for r in records
        if not is_whole(r)
    ]
    return {
        "update_s": end - begin,
        "num_requests": len(records),
        "num_during": len(during),
        "num_long_during": len(across),
        "longest_gap_s": max((gap for r in during for gap in r.itl), default=0.0),
        "longest_ttft_s": max((r.ttft for r in during), default=0.0),
        "longest_ttft_at_s": max(during, key=lambda r: r.ttft).start - begin if during else 0.0,
        "first_failures": failures[:10],
        "checks": checks_json(judge(records, kept, options)),
    }


if __name__ == "__main__":
    sys.exit(check_main(run_rolling_update, RollingUpdateOptions))
