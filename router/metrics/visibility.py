"""The metrics that the holder of an API key may see."""

from __future__ import annotations

from collections.abc import Iterable

from worker.protocol.exposition import label_pair


def visible_to(
    text: bytes,
    tenants: Iterable[str],
    models: Iterable[str] | None = None,
    adapters: Iterable[str] = (),
) -> bytes:
    """Prometheus or OpenMetrics text without the series of other tenants, models and adapters.

    Args:
        text: metrics of one or several processes.
        tenants: tenants whose series are kept. Series without a tenant label, which cover all
            tenants, are kept too.
        models: models whose series are kept; None for all. Series without a model label are kept
            too.
        adapters: LoRA adapters whose series are kept.
    """
    # Not splitlines(): a label may hold a raw carriage return, but no raw line feed.
    lines = _with_label(text.split(b"\n"), "tenant", tenants)
    lines = _with_label(lines, "lora_adapter", adapters)
    if models is not None:
        lines = _with_label(lines, "model_name", models)
    return b"\n".join(lines)


def _with_label(lines: list[bytes], label: str, values: Iterable[str]) -> list[bytes]:
    """The lines whose label has one of the given values, and the lines without the label."""
    # Quotes inside of values are escaped, so no other value can contain one of these pairs. Parsing
    # all labels would hold up the event loop several times as long.
    pairs = [label_pair(label, value).encode() for value in values]
    named = f'{label}="'.encode()

    def is_kept(line: bytes) -> bool:
        for pair in pairs:  # any() would take 1.5 times as long
            if pair in line:
                return True
        return line.startswith(b"#")

    return [line for line in lines if named not in line or is_kept(line)]
