"""`python -m cluster.bench.proxy`: HAProxy is killed, and Serve's manager of it, amid requests.

How long nobody is answered is asked on new connections, all the time. Completions are streamed
meanwhile: those that HAProxy carries when it is killed are cut, and none is when its manager is.
Each time the next manager has taken over before the next process is killed. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from cluster.bench.client import Record
from cluster.bench.report import Check, Result, at_most, checks_json, emit, exactly, note
from cluster.bench.rolling_update import RollingUpdateOptions, UpdateLoad, is_whole
from cluster.cli.options import add_options, given_options
from cluster.config import EndpointConfig, FleetConfig, ModelSpec, ServeConfig, find_demo_model
from cluster.environment import DIRECTORY_VARIABLE
from cluster.launch import LocalFleet, processes_of
from cluster.ports import free_ports
from worker.config import EngineConfig

MODEL = "proxied"
HAPROXY, MANAGER = "haproxy", "ray::HAProxyManager"
GOAL_S = 3.0
_ASK_TIMEOUT_S = 30.0
_BACK_TIMEOUT_S = 240.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyOptions:
    """How often, and the load meanwhile."""

    model: str | None = None
    """Checkpoint folder; the demo model unless given."""
    num_kills: int = 5
    """Of HAProxy, and as many of its manager."""
    num_clients: int = 4
    """Clients that stream completions all the time; a quarter of them long ones."""
    settle_s: float = 2.0
    """Seconds of undisturbed service before each kill."""

    def __post_init__(self) -> None:
        if self.num_kills < 1:
            raise ValueError("--num-kills must be at least 1")
        if self.settle_s < 0.1:
            raise ValueError("--settle-s must be at least 0.1")


class Probe:
    """Asks all the time, each time on a new connection; from here to the end of the `with` block.

    Args:
        url: that answers with a status below 400.
        interval_s: between an answer and the next question.
    """

    def __init__(self, url: str, interval_s: float = 0.01) -> None:
        self.answers: list[float] = []
        """When, on the machine's monotonic clock."""
        self.failures: list[float] = []
        self._url = url
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def silence_s(self, begin: float, end: float) -> float:
        """The longest time without an answer between two moments."""
        times = [begin, *(at for at in self.answers if begin <= at <= end), end]
        return max(later - earlier for earlier, later in pairwise(times))

    def num_failed(self, begin: float) -> int:
        """Questions that were not answered since then."""
        return sum(at >= begin for at in self.failures)

    def wait_answer(self, begin: float) -> None:
        """Returns once one has come that was not under way at `begin`.

        Raises:
            TimeoutError: none comes.
        """
        wait_until(lambda: sum(at > begin for at in self.answers[-3:]) > 1, "an answer")

    def _ask_on(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                with urllib.request.urlopen(self._url, timeout=_ASK_TIMEOUT_S) as response:
                    response.read()
            except OSError:
                self.failures.append(time.monotonic())
            else:
                self.answers.append(time.monotonic())


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """What one kill did."""

    name: str
    silence_s: float
    """Longest time without an answer."""
    num_failed: int
    """Questions without an answer."""
    num_cut: int
    """Completions that were cut or refused."""
    back_s: float
    """Until there was a process in its place, and a HAProxy that is this one's."""


@dataclass
class Victims:
    """The two processes of a fleet that are killed."""

    processes: Callable[[], Sequence[int]]
    """All of the fleet."""
    killed: set[int] = field(default_factory=set)

    def find(self, name: str) -> list[int]:
        """Processes with this name, or a title that begins with it."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                is_named = Path(f"/proc/{pid}/comm").read_text().strip() == name
                if is_named or title.startswith(name):
                    found.append(pid)
        return found

    def kill(self, name: str) -> float:
        """Kills the one process of this name, at once; when it did."""
        (pid,) = self.find(name)
        self.killed |= {pid, *self.find(HAPROXY)}
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return began

    def wait_replaced(self) -> None:
        """Returns once there are others in place of all that were there at the last kill.

        Raises:
            TimeoutError: there are none.
        """

        def is_replaced() -> bool:
            now = [self.find(HAPROXY), self.find(MANAGER)]
            return all(len(pids) == 1 and not self.killed & set(pids) for pids in now)

        wait_until(is_replaced, "another HAProxy and its manager")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Returns once it holds. Raises TimeoutError if it never does."""
    deadline = time.monotonic() + _BACK_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {_BACK_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def run_proxy(options: ProxyOptions) -> Result:
    """Starts a fleet, kills one process after the other, ends the fleet."""
    kills = []
    load_options = RollingUpdateOptions(
        num_clients=max(2, options.num_clients),
        num_idle_clients=0,
        long_output_len=300,
        pause_s=0.05,
    )
    with LocalFleet(_config(options), report=note, haproxy=True) as fleet:
        directory = Path(os.environ[DIRECTORY_VARIABLE])
        victims = Victims(lambda: processes_of(directory))
        url = f"{fleet.base_url}/v1/completions"
        with (
            Probe(f"{fleet.base_url}/v1/models") as probe,
            UpdateLoad(url, load_options, {}, MODEL) as load,
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


def _config(options: ProxyOptions) -> ServeConfig:
    engine = EngineConfig(
        model=options.model or find_demo_model(),
        device="cpu",
        max_num_seqs=16,
        kv_cache_tokens=16384,
    )
    fleet = FleetConfig(served_model_name=MODEL)
    return ServeConfig(
        endpoint=EndpointConfig(port=free_ports(1)[0]),
        models=(ModelSpec(fleet=fleet, engine=engine),),
    )


def judge(kills: Sequence[Kill], num_left: int) -> list[Check]:
    """What was promised, against what clients saw."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; 1 if a check does not hold."""
    parser = argparse.ArgumentParser(prog="python -m cluster.bench.proxy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, ProxyOptions)
    args = parser.parse_args(arguments)
    try:
        options = ProxyOptions(**given_options(args, ProxyOptions))
    except ValueError as error:
        parser.error(str(error))
    result = run_proxy(options)
    emit(result, as_json=args.json, title="proxy")
    return 0 if all(check["holds"] for check in result["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
