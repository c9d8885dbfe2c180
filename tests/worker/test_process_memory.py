from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from worker.memory import freeze_gc


def test_collections_skip_objects_of_start_up() -> None:
    # In a separate process, since it cannot be undone.
    script = (
        "import gc, worker.memory\n"
        "kept = [[number] for number in range(100_000)]\n"
        "cycle = []; cycle.append(cycle); del cycle\n"
        "worker.memory.freeze_gc()\n"
        "assert gc.get_freeze_count() > 100_000\n"
        "assert len(gc.get_objects()) < 10_000\n"
        "assert gc.isenabled()\n"
        "assert gc.collect() < 1_000\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_it_may_be_called_again() -> None:
    before = gc.get_threshold()
    try:
        freeze_gc()
        settled = gc.get_threshold()
        freeze_gc()
        assert gc.get_threshold() == settled
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_of_large_bodies_is_released() -> None:
    script = (
        "import sys, msgspec, worker.memory\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "def pages():\n"
        "    return int(Path('/proc/self/statm').read_text().split()[1])\n"
        "def read(number):\n"
        "    body = b'\"' + b'x' * (31 << 20) + b'\"'\n"
        "    return len(msgspec.json.decode(body))\n"
        "if len(sys.argv) > 1:\n"
        "    assert worker.memory.keep_freed_memory(4 << 20)\n"
        "with ThreadPoolExecutor(3) as threads:\n"
        "    before = pages()\n"
        "    for _ in range(4):\n"
        "        list(threads.map(read, range(3)))\n"
        "    print((pages() - before) * 4096 >> 20)\n"
    )
    usual, bounded = (
        int(
            subprocess.run(
                [sys.executable, "-c", script, *more], check=True, capture_output=True
            ).stdout
        )
        for more in ([], ["bounded"])
    )
    assert bounded <= 3 * 4 + 4
    assert usual > 4 * bounded, "without the setting, memory would be kept"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_memory_between_used_blocks_is_released() -> None:
    script = (
        "import sys, time, worker.memory\n"
        "from pathlib import Path\n"
        "def mib():\n"
        "    return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 / 2**20\n"
        "blocks = [bytes(4_000) for _ in range(10_000)]\n"
        "full = mib()\n"
        "for number in range(len(blocks)):\n"
        "    if number % 10:\n"
        "        blocks[number] = b''\n"
        "assert mib() > full - 4, 'malloc gives it back by itself'\n"
        "worker.memory.trim_regularly(every_s=0.05)\n"
        "deadline = time.monotonic() + 30\n"
        "while mib() > full - 20:\n"
        "    assert time.monotonic() < deadline, 'malloc keeps it'\n"
        "    time.sleep(0.05)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
