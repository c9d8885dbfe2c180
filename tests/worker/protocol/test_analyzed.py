"""Threads that decode to a type for the first time do not crash the process, and all product code
decodes so that they do not."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROUNDS = 100
"""Without `analyzed`, the first few of them crash the process."""
RACE = f"""
import sys, threading, typing, msgspec
from worker.protocol.analyzed import analyzed
sys.setswitchinterval(1e-6)
for number in range({ROUNDS}):
    names = [f"f{{place}}" for place in range(60)]
    hints = [typing.Annotated[int, msgspec.Meta(ge=place)] for place in range(60)]
    kind = msgspec.defstruct(f"Kind{{number}}", list(zip(names, hints)))
    barrier = threading.Barrier(2)
    def convert(kind=kind, values=dict.fromkeys(names, 99), barrier=barrier):
        barrier.wait()
        msgspec.convert(values, TYPE)
    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_two_threads_convert_to_a_new_type() -> None:
    process = subprocess.run([sys.executable, "-c", RACE.replace("TYPE", "analyzed(kind)")])
    assert process.returncode == 0


def test_product_code_decodes_to_analyzed_types() -> None:
    rooms = ("worker", "router", "cluster")
    files = [path for room in rooms for path in ROOT.joinpath(room).rglob("*.py")]
    places = [f"{path}:{line}" for path in files for line in _unsafe(path.read_text())]
    assert not places, "use analyzed(...) of worker.protocol.analyzed for the type"


def test_unsafe_decoding_is_found() -> None:
    source = "msgspec.convert(a, B)\nmsgspec.json.decode(a, type=B)\nmsgspec.json.decode(a)\n"
    assert list(_unsafe(source)) == [1, 2]
    assert not list(_unsafe(source.replace("B", "analyzed(B)")))


def _unsafe(source: str) -> Iterator[int]:
    """Lines that decode with msgspec to a type that is no call of `analyzed`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        kinds: list[ast.expr] = []
        if function == "msgspec.convert":
            kinds = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "type")]
        elif function in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            kinds = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
        for kind in kinds:
            if not ast.unparse(kind).startswith("analyzed("):
                yield node.lineno
