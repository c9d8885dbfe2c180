"""Report of a job: an HTML page without external resources."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.bench.console import readable
from cluster.bench.jobs.charts import bar_chart, line_chart
from cluster.bench.report import Result

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; color: #222;
  background: #fff; padding: 0 1rem; }
h2 { border-top: 1px solid #bbb; margin-top: 2rem; padding-top: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; font-size: 11px; fill: #333; }
.no { color: #b00020; font-weight: 600; }
.reasons td:last-child, .reasons th:last-child { text-align: left; }
.setting { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: start; }
.setting td { text-align: left; overflow-wrap: anywhere; }
"""
_COLUMNS = {
    "label": "stage",
    "request_throughput": "req/s",
    "output_throughput": "tokens/s",
    "request_goodput": "good req/s",
    "p50_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "p99_tpot_ms": "TPOT p99 ms",
    "token_hit_rate": "hit rate",
    "completed": "done",
    "failed": "failed",
}
_BARS = 40


def write_page(result: Result, stages: Sequence[Result]) -> str:
    """HTML page of a job's result and its stages."""
    title = escape(f"{result['job']}: {result['model_id']} at {result['base_url']}")
    parts = [_section(stage["label"], _stage_charts(result, stage)) for stage in stages]
    if result["job"] in ("sweep", "goodput") and len(stages) > 1:
        parts.insert(0, _section("By load", _load_charts(result, stages)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{title}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"{_facts(result)}{_checks(result['checks'])}{_errors(stages)}{_table(stages)}"
        f"{''.join(parts)}{_setting(result)}</body></html>"
    )


def _section(title: str, charts: Iterable[str]) -> str:
    return f"<h2>{escape(title)}</h2><div class='charts'>{''.join(charts)}</div>"


def _load_charts(result: Result, stages: Sequence[Result]) -> Iterator[str]:
    for metric in ("ttft", "tpot"):
        yield line_chart(
            f"{metric.upper()} by load",
            "offered requests per second",
            "milliseconds",
            {
                name: [(s["rate"], s[f"{name}_{metric}_ms"]) for s in stages]
                for name in ("p50", "p99")
            },
            log=True,
            limit=result[f"slo_{metric}_ms"],
        )
    for title, key, unit in (
        ("Output by load", "output_throughput", "tokens per second"),
        ("Hit rate by load", "token_hit_rate", "fraction of prompt tokens"),
    ):
        points = [(s["rate"], s[key]) for s in stages]
        yield line_chart(title, "offered requests per second", unit, {unit: points})


def _stage_charts(result: Result, stage: Result) -> Iterator[str]:
    times = stage["timeline"]
    for metric, seconds in (("ttft", np.array(stage["ttfts"])), ("tpot", _tpots(stage))):
        if len(seconds):
            values = seconds * 1000.0
            heights, edges = np.histogram(values, _BARS, (0.0, max(float(values.max()), 1e-3)))
            bars = list(zip(edges[:-1].tolist(), heights.tolist(), strict=True))
            limit = result[f"slo_{metric}_ms"]
            yield bar_chart(metric.upper(), "milliseconds", "requests", bars, limit=limit)
    for title, key, unit in (
        ("Output", "tokens_per_s", "tokens per second"),
        ("Running requests", "running", "requests"),
        ("Hit rate", "hit_rate", "fraction of prompt tokens"),
    ):
        points = [
            (at, value)
            for at, value in zip(times["seconds"], times[key], strict=True)
            if value is not None
        ]
        yield line_chart(title, "seconds", unit, {unit: points}, whole=key == "running")


def _tpots(stage: Result) -> NDArray[np.float64]:
    """Seconds per output token after the first, for requests with several tokens."""
    tokens = np.array(stage["output_lens"])
    times = np.array(stage["e2els"]) - np.array(stage["ttfts"])
    several = tokens > 1
    found: NDArray[np.float64] = times[several] / (tokens[several] - 1)
    return found


def _facts(result: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td>{_text(value)}</td></tr>"
        for name, value in result.items()
        # `failed` is only for the exit status; objects and lists have separate sections.
        if name != "failed" and not isinstance(value, Mapping | list)
    ]
    return f"<table>{''.join(rows)}</table>"


def _setting(result: Result) -> str:
    """Section with the job's options, and the client's hardware and software versions."""
    parts = [
        f"<div><h3>{title}</h3>{_facts(result[key])}</div>"
        for key, title in (
            ("options", "Options"),
            ("client", "Client machine"),
            ("versions", "Client versions"),
        )
    ]
    return f"<h2>Configuration</h2><div class='setting'>{''.join(parts)}</div>"


def _errors(stages: Sequence[Result]) -> str:
    rows = [
        f"<tr><td>{escape(stage['label'])}</td><td>{count}</td><td>{escape(reason)}</td></tr>"
        for stage in stages
        for reason, count in stage.get("errors", {}).items()
    ]
    if not rows:
        return ""
    head = "<tr><th>stage</th><th>requests</th><th>reason</th></tr>"
    return f"<h2>Failed requests</h2><table class='reasons'>{head}{''.join(rows)}</table>"


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{escape(c['name'])}</td><td>{_text(c['value'])} {escape(c['unit'])}</td>"
        f"<td>{escape(c['goal'])}</td>"
        f"{'<td>passed' if c['holds'] else '<td class=no>failed'}</td></tr>"
        for c in checks
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _table(stages: Sequence[Result]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in _COLUMNS.values())
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(stage.get(name))}</td>" for name in _COLUMNS) + "</tr>"
        for stage in stages
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _text(value: Any) -> str:
    return escape(readable(value))
