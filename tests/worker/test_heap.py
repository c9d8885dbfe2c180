from __future__ import annotations

import gc
import subprocess
import sys

from worker.heap import settle_heap


def test_collections_leave_alone_what_start_up_made() -> None:
    # In a process of its own: it stays that way.
    script = (
        "import gc, worker.heap\n"
        "kept = [[number] for number in range(100_000)]\n"
        "cycle = []; cycle.append(cycle); del cycle\n"
        "worker.heap.settle_heap()\n"
        "assert gc.get_freeze_count() > 100_000\n"
        "assert len(gc.get_objects()) < 10_000\n"
        "assert gc.isenabled()\n"
        "assert gc.collect() < 1_000\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_it_may_be_called_again() -> None:
    before = gc.get_threshold()
    try:
        settle_heap()
        settled = gc.get_threshold()
        settle_heap()
        assert gc.get_threshold() == settled
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
