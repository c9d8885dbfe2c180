"""Totals of a worker as Prometheus samples."""

from __future__ import annotations

from worker.metrics.speculation import speculation_metrics
from worker.protocol.speculation import Decision, SpeculationTotals


def test_every_total_is_a_sample_under_its_labels() -> None:
    totals = SpeculationTotals.of(3)
    totals.add_row(3, 1)
    totals.add_row(2, 2)
    totals.count(Decision.DRAFT)
    totals.count(Decision.COST)
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in speculation_metrics(["demo", "w"], totals)
        for sample in family.samples
    }
    name = "rayfleet_spec_decode_"
    assert samples[f"{name}num_draft_tokens_total", ("demo", "w")] == 5
    assert samples[f"{name}num_accepted_tokens_total", ("demo", "w")] == 3
    per_place = [
        samples[f"{name}num_accepted_tokens_per_pos_total", ("demo", "w", str(place))]
        for place in range(3)
    ]
    assert per_place == [2, 1, 0]
    assert samples[f"{name}decisions_total", ("demo", "w", "cost")] == 1
    assert samples[f"{name}decisions_total", ("demo", "w", "priority")] == 0
