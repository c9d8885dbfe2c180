"""Metrics of a worker's speculative decoding, named as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from worker.protocol.speculation import Decision, SpeculationTotals

_LABELS = ["model_name", "worker_id"]


def speculation_metrics(labels: Sequence[str], totals: SpeculationTotals) -> Iterator[Metric]:
    """Speculation metrics of a worker; `labels` are values of (model_name, worker_id)."""
    for name, text, count in (
        (
            "drafts",
            "Draft sequences verified: one per request and step with drafts.",
            totals.num_drafts,
        ),
        ("draft_tokens", "Draft tokens.", totals.num_draft_tokens),
        ("accepted_tokens", "Accepted draft tokens.", totals.num_accepted_tokens),
        (
            "decode_rows",
            "Requests that decoded, summed over decode-only steps.",
            totals.num_decode_rows,
        ),
        ("decode_tokens", "Tokens generated in decode-only steps.", totals.num_decode_tokens),
    ):
        family = CounterMetricFamily(f"rayfleet_spec_decode_num_{name}", text, labels=_LABELS)
        family.add_metric(labels, count)
        yield family
    for name, text, counts in (
        (
            "draft_tokens",
            "Draft tokens, by position in their draft sequence (0-based).",
            totals.drafted_at,
        ),
        (
            "accepted_tokens",
            "Accepted draft tokens, by position in their draft sequence (0-based).",
            totals.accepted_at,
        ),
    ):
        family = CounterMetricFamily(
            f"rayfleet_spec_decode_num_{name}_per_pos", text, labels=[*_LABELS, "position"]
        )
        for position, count in enumerate(counts):
            family.add_metric([*labels, str(position)], count)
        yield family
    decisions = CounterMetricFamily(
        "rayfleet_spec_decode_decisions",
        "Drafting decisions for decoding requests, by reason.",
        labels=[*_LABELS, "reason"],
    )
    for decision, count in zip(Decision, totals.decisions, strict=True):
        decisions.add_metric([*labels, decision.name.lower()], count)
    yield decisions
