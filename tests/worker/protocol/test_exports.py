from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from worker.protocol.analyzed import analyzed
from worker.protocol.exports import AsCounter, AsGauge, exported


@dataclass(slots=True)
class Stats:
    requests: Annotated[int, AsCounter("requests", "Requests.")] = 0
    waiting: Annotated[int, AsGauge("waiting", "Waiting requests.")] = 0
    internal: int = 0


class Load(msgspec.Struct, array_like=True):
    waiting: Annotated[int, AsGauge("waiting", "Waiting requests.")] = 0


def test_annotated_fields_are_found_by_type_of_metric():
    assert exported(Stats, AsCounter) == {"requests": AsCounter("requests", "Requests.")}
    assert exported(Stats, AsGauge) == {"waiting": AsGauge("waiting", "Waiting requests.")}


def test_annotations_change_no_message():
    assert exported(Load, AsGauge) == {"waiting": AsGauge("waiting", "Waiting requests.")}
    assert msgspec.json.encode(Load(3)) == b"[3]"
    assert msgspec.json.decode(b"[3]", type=analyzed(Load)) == Load(3)
