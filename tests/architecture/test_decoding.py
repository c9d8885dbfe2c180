"""Product code decodes with msgspec to analyzed types only; see `worker.protocol.analyzed`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.sources import Source, sources

FUNCTIONS = {
    "msgspec.convert": 1,
    "msgspec.json.decode": None,
    "msgspec.msgpack.decode": None,
}
"""Position of the argument `type`; None if it is always named."""


def test_product_code_decodes_to_analyzed_types() -> None:
    places = [
        f"{source.path}:{line}"
        for source in sources("worker", "router", "cluster")
        if "msgspec" in source.text
        for line in _unsafe(source)
    ]
    assert places == [], "use analyzed(...) of worker.protocol.analyzed for the type"


def test_unsafe_decoding_is_found() -> None:
    code = "msgspec.convert(a, B)\nmsgspec.json.decode(a, type=B)\nmsgspec.json.decode(a)\n"
    assert list(_unsafe(Source("", code))) == [1, 2]
    assert not list(_unsafe(Source("", code.replace("B", "analyzed(B)"))))


def _unsafe(source: Source) -> Iterator[int]:
    """Lines that decode with msgspec to a type that is no call of `analyzed`."""
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in ("convert", "decode"):  # others need not be written out
            continue
        function = ast.unparse(node.func)
        if function not in FUNCTIONS:
            continue
        place = FUNCTIONS[function]
        kinds = [k.value for k in node.keywords if k.arg == "type"]
        kinds += [] if place is None else node.args[place : place + 1]
        for kind in kinds:
            if not ast.unparse(kind).startswith("analyzed("):
                yield node.lineno
