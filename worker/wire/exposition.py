"""Prometheus text: one process's, and that of several processes merged into one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Carries when counters began beside them."""
_END = b"# EOF\n"


def content_type_for(accept: str) -> str:
    """What a scraper with such an Accept header is answered in."""
    return OPENMETRICS if "application/openmetrics-text" in accept else TEXT


def render(collector: Collector, content_type: str) -> bytes:
    """One process's metrics."""
    registry = CollectorRegistry()
    registry.register(collector)
    if content_type == OPENMETRICS:
        text: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # theirs
        return text
    return generate_latest(registry)


def merge(parts: Iterable[bytes], content_type: str) -> bytes:
    """Metrics of several processes: each family once, with the samples of all.

    Their samples must differ by a label. Texts are cut at their families, not parsed.
    """
    families: dict[bytes, tuple[bytes, list[bytes]]] = {}
    for part in parts:
        # A raw line break never stands inside a label, so these are the beginnings of families.
        for family in (b"\n" + part.removesuffix(_END)).split(b"\n# HELP ")[1:]:
            text, kind, *samples = family.split(b"\n", 2)
            name = text.split(b" ", 1)[0]
            head = b"# HELP %b\n%b\n" % (text, kind)
            families.setdefault(name, (head, []))[1].extend(
                sample.removesuffix(b"\n") + b"\n" for sample in samples if sample.strip()
            )
    body = b"".join(head + b"".join(samples) for head, samples in families.values())
    return body + _END if content_type == OPENMETRICS else body
