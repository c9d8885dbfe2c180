"""Prometheus metrics that are declared, with name and help, at the fields they export."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, get_type_hints


class AsCounter(NamedTuple):
    """Annotation of a field that is exported as a counter: `Annotated[int, AsCounter(...)]`."""

    name: str
    """Name without the prefix `rayfleet_` and the suffix `_total`."""
    help: str


class AsGauge(NamedTuple):
    """Annotation of a field that is exported as a gauge."""

    name: str
    """Name without the prefix `rayfleet_`."""
    help: str


class AsHistogram(NamedTuple):
    """Annotation of a field that is exported as a histogram."""

    name: str
    """Name without the prefix `rayfleet_`."""
    help: str


_Export = TypeVar("_Export", AsCounter, AsGauge, AsHistogram)


def exported(owner: type, export: type[_Export]) -> dict[str, _Export]:
    """Fields of a class that are annotated with metrics of one type, by field name."""
    return {
        field: annotation
        for field, hint in get_type_hints(owner, include_extras=True).items()
        for annotation in getattr(hint, "__metadata__", ())
        if isinstance(annotation, export)
    }
