"""The first delta of a request has the parts of its time at the worker."""

from __future__ import annotations

import pytest

from tests.support.worker.fake_device import Harness, make_submit


@pytest.mark.parametrize("depth", [0, 1])
def test_queue_and_prefill_by_the_schedulers_clock(depth: int) -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=8)
    found = []

    def run(count: int) -> None:
        for _ in range(count):
            harness.now += 1.0
            before = harness.last
            harness.step(depth)
            if harness.last is not None and harness.last is not before:
                found.extend(d for deltas in harness.last.deltas.values() for d in deltas)

    harness.submit(make_submit("first", [3] * 24, max_tokens=3, ignore_eos=True))
    harness.submit(make_submit("second", [4] * 4, max_tokens=2, waited_ms=7000.0))
    run(14)
    times = {d.request_id: d.times for d in found if d.times is not None}
    assert [d.request_id for d in found if d.times is not None] == ["first", "second"]
    first, second = times["first"], times["second"]
    # Three steps of eight tokens; each result is taken in the step that launched it, or a later.
    assert (first.queue_s, first.prefill_s) == (1.0, 2.0 + depth)
    assert second.queue_s >= first.queue_s + first.prefill_s + 1.0
    assert second.prefill_s == depth
