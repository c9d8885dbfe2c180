"""Metrics of a worker's speculative decoding, named as vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from worker.protocol.speculation import Decision, SpeculationTotals

_LABELS = ["model_name", "worker_id"]


def speculation_metrics(labels: Sequence[str], totals: SpeculationTotals) -> Iterator[Metric]:
    """Families of one worker's speculation; `labels` are values of (model_name, worker_id)."""
    for name, text, count in (
        ("drafts", "Rows with drafts.", totals.num_drafts),
        ("draft_tokens", "Tokens drafted.", totals.num_draft_tokens),
        ("accepted_tokens", "Drafts that were right.", totals.num_accepted_tokens),
        ("decode_rows", "Requests in decode steps.", totals.num_decode_rows),
        ("decode_tokens", "Tokens of these; per row: tokens per step.", totals.num_decode_tokens),
    ):
        family = CounterMetricFamily(f"rayfleet_spec_decode_num_{name}", text, labels=_LABELS)
        family.add_metric(labels, count)
        yield family
    for name, text, counts in (
        ("draft_tokens", "Tokens drafted, by position in their row.", totals.drafted_at),
        (
            "accepted_tokens",
            "Drafts that were accepted, by position in their row.",
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
        "Why decoding requests were drafted for or not, step by step.",
        labels=[*_LABELS, "reason"],
    )
    for decision, count in zip(Decision, totals.decisions, strict=True):
        decisions.add_metric([*labels, decision.name.lower()], count)
    yield decisions
