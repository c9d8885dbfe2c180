"""Processes of benchmarks, and options out of range."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from cluster.bench.cli import main
from cluster.bench.command import run_measurement
from tests.support.fleet.processes import CpuMeter, cpu_seconds, descendants


def test_cpu_time_of_descendants_is_counted_by_part() -> None:
    burn = (
        "burner = 1\nimport sys, time\nprint(0, flush=True)\n"
        "while time.process_time() < 0.3: pass\n"
        "print(1, flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", burn]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"0\n"  # before, it may have no command line yet
        assert child.pid in [pid for pid, _ in descendants()]
        meter = CpuMeter({"burner": (f"{sys.executable} -c burner",)})
        assert child.stdout.readline() == b"1\n"
        assert meter.num_processes() == {"burner": 1}
        assert cpu_seconds(child.pid) >= 0.2
        assert 0.0 <= meter.seconds()["burner"] <= cpu_seconds(child.pid)
        child.communicate(b"")
    with pytest.raises(RuntimeError, match="ended while"):
        meter.seconds()


def test_a_part_without_processes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing-like-it"):
        CpuMeter({"nothing-like-it": ("nothing-like-it",)})


def test_a_measurement_is_the_last_line_of_its_process() -> None:
    assert run_measurement([sys.executable, "-c", "print(1); print('{\"a\": 2}')"], "it") == {
        "a": 2
    }
    with pytest.raises(ValueError, match="the turn failed"):
        run_measurement([sys.executable, "-c", "raise SystemExit(3)"], "the turn")


def test_a_timed_out_process_is_killed_with_its_children() -> None:
    child = "import subprocess; subprocess.run(['sleep', '4321'])"
    with pytest.raises(ValueError, match="the turn timed out after 1 s"):
        run_measurement([sys.executable, "-c", child], "the turn", 1.0)
    while any("sleep 4321" in command for _, command in descendants()):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("throughput", "--model", "m", "--max-num-seqs=-1"), "--max-num-seqs"),
        (("throughput", "--model", "m", "--batch-invariant-cost", "--rounds", "2"), "--rounds"),
        (("compare", "http://a", "http://b", "--rounds", "1"), "--rounds"),
        (("compare", "http://a", "b.json"), "two results or two URLs"),
    ],
)
def test_options_out_of_range_are_explained(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], text: str
) -> None:
    assert main(argv) == 2
    assert text in capsys.readouterr().err
