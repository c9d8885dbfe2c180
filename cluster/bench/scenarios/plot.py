"""Draws a scenario: times to the first token over the time of arrival, and queues, per fleet."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.bench.scenarios.turn import Turn

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError as error:
    raise ValueError("--plot needs matplotlib: pip install 'rayfleet[plots]'") from error


def draw_turns(title: str, turns: Mapping[str, Turn], path: str) -> None:
    """Writes a PNG of one turn of each fleet."""
    figure, (times, shares, queues) = pyplot.subplots(3, 1, figsize=(10, 9), layout="constrained")
    for name, turn in turns.items():
        done = [
            (planned.arrival_s, 1e3 * record.ttft)
            for planned, record in zip(turn.planned, turn.records, strict=True)
            if not record.error
        ]
        values = sorted(ttft for _, ttft in done)
        times.plot([at for at, _ in done], [ttft for _, ttft in done], ".", ms=3, label=name)
        shares.plot(values, [(place + 1) / len(values) for place in range(len(values))], label=name)
        queues.plot(
            [m.at_s for m in turn.moments], [m.num_waiting for m in turn.moments], label=name
        )
    times.set(xlabel="arrival, s", ylabel="TTFT, ms", title=title)
    shares.set(xlabel="TTFT, ms", ylabel="part of the requests", xscale="log")
    queues.set(xlabel="seconds", ylabel="requests that wait")
    times.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
