"""`make check-proxy`: HAProxy and its manager in Serve are killed under load.

Outages are measured with continuous requests over new connections. At the same time, completions
are streamed. Those on a killed HAProxy are cut, but if only its manager is killed, none may be cut.
The next process is killed once the new manager has taken over. Linux only.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.client import Record
from cluster.bench.report import Check, Result, at_most, checks_json, exactly, note
from cluster.directories import DIRECTORY_VARIABLE, processes_of
from cluster.launch import LocalFleet
from tests.campaigns.checks import check_main, is_whole, serve_config
from tests.support.fleet.client_load import ClientLoad, ClientOptions
from tests.support.fleet.proxy_loss import HAPROXY, MANAGER, Probe, Victims, wait_until

MODEL = "proxied"
GOAL_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyOptions:
    """Number of kills, and the load."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    num_kills: int = 5
    """Number of times to kill HAProxy, and its manager."""
    num_clients: int = 4
    """Number of clients that stream completions continuously; 1/4 of them stream long ones."""
    settle_s: float = 2.0
    """Seconds without faults before each kill."""

    def __post_init__(self) -> None:
        if self.num_kills < 1:
            raise ValueError("--num-kills must be at least 1")
        if self.settle_s < 0.1:
            raise ValueError("--settle-s must be at least 0.1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Effects of one kill."""

    name: str
    silence_s: float
    """Longest time in seconds without a response."""
    num_failed: int
    """Number of requests without a response."""
    num_cut: int
    """Number of completions that were cut or rejected."""
    back_s: float
    """Seconds until the process was replaced and HAProxy served again."""


def run_proxy(options: ProxyOptions) -> Result:
    """Starts a fleet, kills processes in sequence, and stops the fleet."""
    kills = []
    config = serve_config(MODEL, options.model, max_num_seqs=16, kv_cache_tokens=16384)
    load_options = ClientOptions(
        num_clients=max(2, options.num_clients),
        num_idle_clients=0,
        long_output_len=300,
        pause_s=0.05,
    )
    with LocalFleet(config, report=note, haproxy=True) as fleet:
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        victims = Victims(lambda: processes_of(directory))
        with (
            Probe(f"{fleet.base_url}/v1/models") as probe,
            ClientLoad(fleet.base_url, load_options, MODEL) as load,
        ):
            for name in [HAPROXY, MANAGER] * options.num_kills:
                time.sleep(options.settle_s)
                kills.append(_kill(name, victims, probe, load.records))
                note(str(kills[-1]))
    return _result(kills, num_left=len(processes_of(directory)))


def _kill(name: str, victims: Victims, probe: Probe, records: list[Record]) -> Kill:
    before = len(records)
    victims.killed.clear()
    began = victims.kill(name)
    probe.wait_answer(began)
    if name == HAPROXY:  # its manager stays
        wait_until(lambda: len(victims.find(HAPROXY)) == 1, "HAProxy")
    else:
        victims.wait_replaced()
    back = time.monotonic()
    probe.wait_answer(back)
    wait_until(lambda: len(records) >= before + 8, "completions")
    return Kill(
        name=name,
        silence_s=probe.silence_s(began, time.monotonic()),
        num_failed=probe.num_failed(began),
        num_cut=sum(not is_whole(record) for record in records[before:]),
        back_s=back - began,
    )


def judge(kills: Sequence[Kill], num_left: int) -> list[Check]:
    """Checks of the outages and streams."""
    haproxy = [kill for kill in kills if kill.name == HAPROXY]
    manager = [kill for kill in kills if kill.name == MANAGER]

    def longest(of: list[Kill]) -> float:
        return max((kill.silence_s for kill in of), default=math.nan)

    failed = sum(kill.num_failed + kill.num_cut for kill in manager)
    return [
        at_most("haproxy_killed_unreachable_s", longest(haproxy), "s", GOAL_S),
        at_most("manager_killed_unreachable_s", longest(manager), "s", GOAL_S),
        exactly("manager_killed_failed", failed, "requests", 0),
        exactly("processes_left", num_left, "processes", 0),
    ]


def _result(kills: Sequence[Kill], num_left: int) -> Result:
    def values(name: str, of: str) -> list[Any]:
        return [getattr(kill, of) for kill in kills if kill.name == name]

    return {
        "haproxy_unreachable_s": values(HAPROXY, "silence_s"),
        "haproxy_cut": values(HAPROXY, "num_cut"),
        "manager_unreachable_s": values(MANAGER, "silence_s"),
        "manager_back_s": values(MANAGER, "back_s"),
        "checks": checks_json(judge(kills, num_left)),
    }


if __name__ == "__main__":
    sys.exit(check_main(run_proxy, ProxyOptions))
