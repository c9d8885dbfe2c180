"""Supervisor of Ray's GCS, the control service of a cluster: restarts it if it exits.

Without the GCS, all of Ray's processes exit after 60 s, and Ray does not restart it. On Kubernetes,
the head pod is restarted; on a single machine, this supervisor restarts the GCS. The GCS keeps its
state in RocksDB.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from cluster.haproxy_guard import die_with_parent

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""Interval in seconds between checks that the GCS is running."""
PAUSE_S = 1.0
"""Delay in seconds before restarting a GCS that exited soon after its start."""
_PORT = "--gcs_server_port="


def can_restart_gcs() -> bool:
    """Whether the GCS can be restarted: only on Linux, where it exits with this process."""
    return hasattr(os, "pidfd_open")


def gcs_settings(directory: Path) -> dict[str, str]:
    """Settings of Ray that make the GCS keep its state across restarts.

    Args:
        directory: the fleet's private directory.
    """
    if not can_restart_gcs():
        return {}
    return {
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(gcs_directory(directory)),
    }


def gcs_directory(directory: Path) -> Path:
    """Folder of the GCS's state within the fleet's private directory."""
    return directory / "gcs"


def forget_gcs_state(directory: Path) -> None:
    """Removes the state of a cluster that failed to start, so that the next one does not resume
    it."""
    shutil.rmtree(gcs_directory(directory), ignore_errors=True)


class GcsSupervisor:
    """Restarts the GCS of the cluster started by this process, until `stop` is called."""

    def __init__(self) -> None:
        from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER
        from ray._private.worker import _global_node

        self._infos: list[Any] = _global_node.all_processes[PROCESS_TYPE_GCS_SERVER]
        self._port = int(str(_global_node.gcs_address).rpartition(":")[2])
        self._log = Path(_global_node.get_logs_dir_path()) / "gcs_server_restarted.log"
        self._is_stopping = False
        # The kernel kills a child when the thread that started it ends, so this thread must outlive
        # the GCS.
        self._thread = threading.Thread(target=self._run, name="gcs-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops restarting the GCS; must be called before Ray is shut down."""
        self._is_stopping = True

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            process = self._infos[0].process
            while process.poll() is None:
                time.sleep(POLL_S)
            if self._is_stopping:
                return
            if time.monotonic() - began < PAUSE_S:
                time.sleep(PAUSE_S)
            logger.warning("Ray GCS exited with status %s: restarting it", process.returncode)
            command = with_port(process.args, self._port)
            # Ray's list of processes to end at shutdown.
            self._infos[0] = self._infos[0]._replace(process=self._start(command))

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )


def with_port(command: list[str], port: int) -> list[str]:
    """Command line of the GCS with its previous port, which all other processes use."""
    return [f"{_PORT}{port}" if word.startswith(_PORT) else word for word in command]
