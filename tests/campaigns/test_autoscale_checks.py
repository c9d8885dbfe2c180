"""Load and checks of the autoscaling campaign."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.bench.client import Record
from tests.campaigns.autoscale import (
    OUTPUT,
    AutoscaleOptions,
    Count,
    Phase,
    judge,
    levels,
    num_turns,
    run_autoscale,
)
from tests.campaigns.checks import check_main

OPTIONS = AutoscaleOptions()


def phase(workers: list[int], *broken: Record) -> Phase:
    """A sample every ten seconds."""
    good = Record(index=0, prompt_len=40, requested_len=OUTPUT, status=200, output_len=OUTPUT)
    counts = [Count(10.0 * number, count) for number, count in enumerate(workers)]
    return Phase(records=[good, *broken], counts=counts)


def failed(step: Phase, noise: Phase, options: AutoscaleOptions = OPTIONS) -> list[str]:
    return [check.name for check in judge(options, step, noise) if not check.holds]


STEP = phase([1, 1, 1, 1, 2, 3, 3, 2, 1, 1])
NOISE = phase([1, 2, 2, 2])


def test_a_step_without_failures_or_flaps_holds() -> None:
    assert failed(STEP, NOISE) == []
    assert failed(STEP, phase([1, 2, 3, 2])) == []


@pytest.mark.parametrize(
    ("step", "noise", "name"),
    [
        (STEP, phase([1, 2, 1, 2]), "noise_direction_changes"),
        (phase([1, 2, 1, 1, 2, 3, 2, 1]), NOISE, "workers_before_step"),
        (phase([1, 1, 1, 1, 2, 2, 1, 1]), NOISE, "workers_in_step"),
        (phase([1, 1, 1, 1, 3, 3, 2, 2]), NOISE, "workers_after_step"),
        (phase([1, 1, 1, 1, 3, 2, 3, 1]), NOISE, "step_direction_changes"),
    ],
)
def test_failed_checks_are_reported(step: Phase, noise: Phase, name: str) -> None:
    assert name in failed(step, noise)


@pytest.mark.parametrize(
    "change",
    [{"status": 503}, {"error": "the stream broke", "status": 200}, {"status": 200}],
)
def test_every_kind_of_failure_counts(change: dict[str, object]) -> None:
    record = Record(index=1, prompt_len=40, requested_len=OUTPUT, output_len=OUTPUT - 1)
    broken = replace(record, **change)  # type: ignore[arg-type]
    assert failed(phase([1, 1, 1, 1, 3, 1], broken), NOISE) == ["failed_requests"]


def test_a_shorter_noise_shows_nothing() -> None:
    assert failed(STEP, NOISE, replace(OPTIONS, noise_s=60.0)) == ["noise_minutes"]


def test_levels_and_turns() -> None:
    assert levels(STEP.counts) == [1, 2, 3, 2, 1]
    assert num_turns(STEP.counts) == 1
    assert num_turns(phase([2, 2]).counts) == 0


def test_the_load_is_for_one_three_and_one_worker_then_noisy() -> None:
    times = np.array(OPTIONS.step_times())
    counts, _ = np.histogram(times, [0.0, 30.0, 90.0, 290.0])
    rates = counts / np.array([30.0, 60.0, 200.0]) / OPTIONS.worker_rate
    assert rates == pytest.approx([0.4, 2.5, 0.4], rel=0.05)
    noise = np.array(OPTIONS.noise_times())
    assert (np.diff(noise) >= 0.0).all()
    counts, _ = np.histogram(noise, np.arange(0.0, 601.0, 20.0))
    rates = counts / 20.0 / OPTIONS.worker_rate
    assert rates.min() < 1.1, "one worker would do"
    assert rates.max() > 1.9
    assert 1.2 < rates.mean() < 1.8


def test_options_out_of_range_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_main(run_autoscale, AutoscaleOptions, ["--noise-s", "0"])
    assert "--noise-s" in capsys.readouterr().err
