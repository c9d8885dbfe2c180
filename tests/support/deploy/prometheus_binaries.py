"""Finds promtool and Prometheus for the tests.

Searches PATH, the user's cache folder, and the package of a Debian or Ubuntu system, in this order.
The package is unpacked into the cache folder but not installed, so no service is started.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import pytest


class BinaryUnavailableError(Exception):
    """The binary is not installed and could not be downloaded."""


def require(name: str) -> str:
    """Path of `promtool` or `prometheus`; skips the calling test if it is unavailable."""
    try:
        return find_binary(name)
    except BinaryUnavailableError as error:
        pytest.skip(f"{name} is not installed, and could not be had: {error}")


def find_binary(name: str) -> str:
    """Path of `promtool` or `prometheus`."""
    installed = shutil.which(name)
    if installed is not None:
        return installed
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cached = Path(base) / "rayfleet" / "prometheus" / name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            _unpack(Path(folder))
            # Renamed, so that it is either complete or absent: test runs may do this concurrently.
            (Path(folder) / "usr" / "bin" / name).rename(cached)
    return str(cached)


def wait_until_ready(base_url: str, process: subprocess.Popen[bytes], within_s: float) -> None:
    """Waits until a started Prometheus answers queries.

    While it replays its log, it first refuses connections and then responds with 503 in plain text.
    `within_s` must allow for loaded machines.
    """
    deadline = time.monotonic() + within_s
    with httpx.Client(base_url=base_url, trust_env=False) as client:
        while True:
            assert process.poll() is None, f"Prometheus ended with code {process.returncode}"
            try:
                answer = f"status {client.get('/-/ready').status_code}"
            except httpx.TransportError as error:
                answer = repr(error)
            if answer == "status 200":
                return
            assert time.monotonic() < deadline, f"Prometheus is not ready: {answer}"
            time.sleep(0.1)


def _unpack(folder: Path) -> None:
    """Downloads and unpacks the package."""
    try:
        _run(["apt-get", "download", "--quiet", "prometheus"], folder)
        (package,) = folder.glob("*.deb")
        _run(["dpkg-deb", "--extract", str(package), "."], folder)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BinaryUnavailableError(error) from error


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
