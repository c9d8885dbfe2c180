"""What workers report of speculation, as Prometheus families by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from worker.wire.speculation import Decision, SpeculationTotals


def speculation_metrics(
    workers: Iterable[tuple[list[str], SpeculationTotals]],
) -> Iterator[Metric]:
    """Families of the workers that draft.

    Args:
        workers: label values (model, worker) and totals of each.
    """
    found = list(workers)
    labels = ["model_name", "worker_id"]
    for name, text, read in (
        ("drafts", "Rows with drafts.", lambda t: t.num_drafts),
        ("draft_tokens", "Tokens drafted.", lambda t: t.num_draft_tokens),
        ("accepted_tokens", "Drafts that were right.", lambda t: t.num_accepted_tokens),
        ("decode_rows", "Requests in decode steps.", lambda t: t.num_decode_rows),
        ("decode_tokens", "Tokens of these; per row: tokens per step.", _decode_tokens),
    ):
        family = CounterMetricFamily(f"rayfleet_spec_decode_num_{name}", text, labels=labels)
        for values, totals in found:
            family.add_metric(values, read(totals))
        yield family
    drafted = CounterMetricFamily(
        "rayfleet_spec_decode_num_draft_tokens_per_pos",
        "Tokens drafted, by position in their row.",
        labels=[*labels, "position"],
    )
    accepted = CounterMetricFamily(
        "rayfleet_spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were accepted, by position in their row.",
        labels=[*labels, "position"],
    )
    decisions = CounterMetricFamily(
        "rayfleet_spec_decode_decisions",
        "Why decoding requests were drafted for or not, step by step.",
        labels=[*labels, "reason"],
    )
    for values, totals in found:
        for position, count in enumerate(totals.drafted_at):
            drafted.add_metric([*values, str(position)], count)
        for position, count in enumerate(totals.accepted_at):
            accepted.add_metric([*values, str(position)], count)
        for decision, count in zip(Decision, totals.decisions, strict=True):
            decisions.add_metric([*values, decision.name.lower()], count)
    yield from (drafted, accepted, decisions)


def _decode_tokens(totals: SpeculationTotals) -> int:
    return totals.num_decode_tokens
