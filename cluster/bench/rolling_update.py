"""`python -m cluster.bench.rolling_update`: a fleet is replaced under load, and no client notices.

The application is deployed again with a changed engine option, so that every gateway and every
worker group is replaced, while requests keep coming: short ones one after the other, long streams
that a worker has when it is told to go, and clients who say nothing for the whole update and then
go on with the connection that they had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import uvloop

from cluster.bench.client import Record, Request, open_session, send
from cluster.bench.cpu import find_parts
from cluster.bench.report import Check, Result, at_least, checks_json, emit, exactly, note
from cluster.cli.options import add_options, given_options
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig, find_demo_model
from cluster.launch import APPLICATION, LocalFleet
from cluster.ports import free_ports
from worker.config import EngineConfig

MODEL = "rolling"
_GONE_TIMEOUT_S = 60.0
"""For replaced processes to end, once the streams that they have are finished."""
_SHARE_BEFORE = 0.2
"""Of the requests that are over before the update begins; as many begin after it, at least."""
_SHARE_LONG = 0.25
"""Of the clients: each of their requests is a long stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollingUpdateOptions:
    """What is replaced, and the load meanwhile."""

    model: str | None = None
    """Checkpoint folder; the demo model unless given."""
    num_requests: int = 1000
    """Requests that the whole takes at least."""
    num_clients: int = 16
    """Clients at the same time; each sends its next request when it has the answer to the last."""
    num_idle_clients: int = 4
    """Clients with a request before the update, one after it, and an open connection between."""
    num_workers: int = 2
    """Worker groups."""
    num_gateways: int = 1
    """Gateway processes."""
    output_len: int = 16
    """Tokens of a short request."""
    long_output_len: int = 600
    """Tokens of a long one."""
    pause_s: float = 0.0
    """Seconds for which a client waits before its next request."""
    python_proxy: bool = False
    """Take Serve's own proxy where HAProxy is installed."""

    def __post_init__(self) -> None:
        if self.num_clients < 2:
            raise ValueError("--num-clients must be at least 2")
        if self.pause_s < 0.0:
            raise ValueError(f"--pause-s must not be negative, got {self.pause_s}")


class UpdateLoad:
    """Clients on a thread of their own, from here until `stop` or the end of the `with` block.

    Args:
        url: of completions.
        options: how many clients, and what they ask for.
        headers: sent with each request.
        model: that they name.
    """

    def __init__(
        self, url: str, options: RollingUpdateOptions, headers: dict[str, str], model: str = MODEL
    ) -> None:
        self.records: list[Record] = []
        self._url = url
        self._options = options
        self._headers = headers
        self._model = model
        self._num_sent = 0
        self._updated = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """However the block ended: clients that go on would load whatever comes next."""
        self.stop()

    def wait_for(self, count: int) -> None:
        """Returns when `count` more requests have ended."""
        wanted = len(self.records) + count
        while len(self.records) < wanted and self._thread.is_alive():
            time.sleep(0.02)

    def stop(self) -> list[Record]:
        """Ends when every client has had its last answer; all records."""
        self._updated.set()
        self._thread.join()
        return self.records

    async def _run(self) -> None:
        num_long = max(1, round(_SHARE_LONG * self._options.num_clients))
        async with asyncio.TaskGroup() as group:
            for number in range(self._options.num_clients):
                group.create_task(self._ask_on(is_long=number < num_long))
            for _ in range(self._options.num_idle_clients):
                group.create_task(self._ask_twice())

    async def _ask_on(self, *, is_long: bool) -> None:
        length = self._options.long_output_len if is_long else self._options.output_len
        async with open_session(self._headers) as session:
            while not self._updated.is_set():
                self.records.append(await send(session, self._url, self._request(length)))
                await asyncio.sleep(self._options.pause_s)

    async def _ask_twice(self) -> None:
        async with open_session(self._headers, keepalive_s=600.0) as session:
            request = self._request(self._options.output_len)
            self.records.append(await send(session, self._url, request))
            while not self._updated.is_set():
                await asyncio.sleep(0.05)
            request = self._request(self._options.output_len)
            self.records.append(await send(session, self._url, request))

    def _request(self, output_len: int) -> Request:
        self._num_sent += 1
        body = {
            "model": self._model,
            "prompt": f"{self._num_sent}: a prompt of its own",
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0,
            "max_tokens": output_len,
        }
        return Request(
            index=self._num_sent,
            body=json.dumps(body).encode(),
            prompt_len=0,
            output_len=output_len,
        )


def run_rolling_update(options: RollingUpdateOptions) -> Result:
    """Starts a fleet, replaces it under load, counts what failed."""
    config = _config(options)
    parts = {
        "gateway": (f"ray::ServeReplica:{APPLICATION}:gateway",),
        "worker": (f"ray::ServeReplica:{APPLICATION}:{config.models[0].deployment}",),
    }
    part = round(_SHARE_BEFORE * options.num_requests)
    haproxy = False if options.python_proxy else None
    with (
        LocalFleet(config, report=note, haproxy=haproxy) as fleet,
        UpdateLoad(f"{fleet.base_url}/v1/completions", options, {}) as load,
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


def _config(options: RollingUpdateOptions) -> ServeConfig:
    engine = EngineConfig(
        model=options.model or find_demo_model(),
        device="cpu",
        max_num_seqs=32,
        kv_cache_tokens=32768,
    )
    fleet = FleetConfig(served_model_name=MODEL, num_workers=options.num_workers)
    return ServeConfig(
        endpoint=EndpointConfig(port=free_ports(1)[0], num_gateways=options.num_gateways),
        models=(ModelSpec(fleet=fleet, engine=engine),),
    )


def _changed(config: ServeConfig) -> ServeConfig:
    """The same fleet with one engine option changed."""
    (model,) = config.models
    engine = replace(model.engine, max_num_seqs=model.engine.max_num_seqs + 16)
    return replace(config, models=(replace(model, engine=engine),))


def _wait_gone(old: dict[str, list[int]], parts: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """How many processes of each part are still there, once none is or the time is up."""
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
    """What was promised, against what clients saw and which processes are still there."""
    refused = sum(record.status not in (0, 200) for record in records)
    num_whole = sum(map(is_whole, records))
    return [
        at_least("requests", len(records), "requests", options.num_requests),
        exactly("failed", len(records) - num_whole, "requests", 0),
        exactly("refused", refused, "requests", 0),
        *(exactly(f"old_{part}s_left", kept[part], "processes", 0) for part in kept),
    ]


def is_whole(record: Record) -> bool:
    """Whether a request got all its tokens."""
    return record.status == 200 and not record.error and record.output_len == record.wanted_len


def _result(
    records: Sequence[Record],
    begin: float,
    end: float,
    kept: dict[str, int],
    options: RollingUpdateOptions,
) -> Result:
    during = [r for r in records if r.start < end and r.start + r.latency > begin]
    across = [r for r in during if r.wanted_len == options.long_output_len]
    failures = [
        f"sent at {r.start - begin:+.2f} s, broken off {r.latency:.2f} s later after "
        f"{r.output_len} of {r.wanted_len} tokens: {r.error}"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; 1 if a check does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.bench.rolling_update", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, RollingUpdateOptions)
    args = parser.parse_args(arguments)
    try:
        options = RollingUpdateOptions(**given_options(args, RollingUpdateOptions))
    except ValueError as error:
        parser.error(str(error))
    result = run_rolling_update(options)
    emit(result, as_json=args.json, title="rolling update")
    return 0 if all(check["holds"] for check in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
