"""Content of the dashboards: boards, their panels, and the panels' queries, keyed by legend.

Boards of worker internals are in worker_boards.py.
"""

from __future__ import annotations

from typing import Final

from deploy.monitoring.queries import (
    Board,
    F,
    M,
    Panel,
    kept,
    level,
    mean,
    quantiles,
    rate,
    share,
    whole,
)
from deploy.monitoring.worker_boards import DIFFUSION, WORKER

FLEET = Board(
    "fleet",
    "fleet",
    "Throughput, latency, and signs of overload.",
    (
        Panel(
            "Workers",
            "short",
            {
                "{{model_name}} {{state}}": whole("workers", "model_name, state"),
                "{{model_name}} wanted": whole("num_workers_wanted", "model_name"),
            },
        ),
        Panel(
            "Tokens per second",
            "short",
            {
                "generated": rate("generation_tokens_total"),
                "prompt": rate("prompt_tokens_total"),
                "prompt, cached": rate("prompt_tokens_cached_total"),
            },
        ),
        Panel(
            "Completions per second",
            "reqps",
            {"{{finished_reason}}": rate("request_success_total", "finished_reason")},
            stacked=True,
        ),
        Panel(
            "Requests",
            "short",
            {
                "running": level("num_requests_running"),
                "waiting at workers": level("num_requests_waiting"),
                "at gateways": level("gateway_pending_requests"),
            },
        ),
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", quantiles("inter_token_latency_seconds")),
        Panel("Request latency", "s", quantiles("e2e_request_latency_seconds")),
        Panel(
            "Request length",
            "short",
            {
                "prompt tokens": mean("request_prompt_tokens"),
                "generated tokens": mean("request_generation_tokens"),
            },
            "Mean per request.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{worker_id}}": f"rayfleet_kv_cache_usage_perc{{{M}}}"},
            "Excludes cached pages that can be evicted.",
        ),
        Panel(
            "Rejected with 429 or 503",
            "reqps",
            {"{{reason}}": rate("admission_rejections_total", "reason")},
        ),
        Panel(
            "HTTP responses",
            "reqps",
            {
                "{{route}} {{status}}": rate(
                    "http_requests_total", "route, status", ', route=~"/v1/.*|other"', of=F
                )
            },
            "Streams are counted when they start.",
            stacked=True,
        ),
        Panel(
            "Preemptions and rebuilds per minute",
            "short",
            {
                "preemptions": f"60 * {rate('num_preemptions_total')}",
                "rank groups rebuilt": f"60 * {rate('worker_rebuilds_total')}",
            },
        ),
        Panel(
            "Gateway CPU time per token",
            "s",
            {
                "gateways": rate("process_cpu_seconds_total", more=', process=~"gateway .*"', of=F)
                + f" / ({rate('generation_tokens_total', of=F)} > 0)"
            },
        ),
        Panel(
            "Resident memory",
            "bytes",
            {"{{process}}": f"rayfleet_process_resident_memory_bytes{{{F}}}"},
        ),
        Panel(
            "Event loop lag",
            "s",
            quantiles("event_loop_lag_seconds", "process", 0.99, of=F),
            "Delay until a gateway or a worker's frontend runs a task that is due.",
        ),
        Panel(
            "Processes by state (silent: no response to scrapes)",
            "short",
            {"{{state}}": level("node_processes", "state", of=F)},
        ),
        Panel(
            "GPU memory in use",
            "percentunit",
            {
                "{{worker_id}} rank {{rank}}": (
                    f"rayfleet_gpu_memory_used_bytes{{{M}}} "
                    f"/ rayfleet_gpu_memory_total_bytes{{{M}}}"
                )
            },
        ),
    ),
)

ROUTER = Board(
    "router",
    "router",
    "Routing decisions: expected and actual cache hits and latencies.",
    (
        Panel(
            "Requests per second by worker",
            "reqps",
            {"{{worker_id}}": rate("routed_requests_total", "worker_id")},
            stacked=True,
        ),
        Panel(
            "Prefix cache hit rate (prompt tokens)",
            "percentunit",
            {
                "actual": share(rate("prompt_tokens_cached_total"), rate("prompt_tokens_total")),
                "expected": share(rate("routing_hit_tokens_total"), rate("prompt_tokens_total")),
                "on the best worker": share(
                    rate("routing_achievable_hit_tokens_total"), rate("prompt_tokens_total")
                ),
                "single shared cache": share(
                    rate("routing_pooled_hit_tokens_total"), rate("prompt_tokens_total")
                ),
            },
            "The single shared cache requires --explain-routing.",
        ),
        Panel(
            "TTFT prediction error",
            "s",
            quantiles("routing_prediction_error_seconds", "", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Time to first token by part",
            "s",
            {
                part: mean(f"request_{name}_time_seconds")
                for part, name in (
                    ("route", "route"),
                    ("queue", "queue"),
                    ("prefill", "prefill"),
                    ("first flush", "first_flush"),
                )
            },
            "Means.",
            stacked=True,
        ),
        Panel(
            "Expected queueing delay of the next request",
            "s",
            {"{{model_name}}": f"min by (model_name) (rayfleet_expected_wait_seconds{{{M}}})"},
        ),
        Panel(
            "Pending at gateways (no worker yet)",
            "short",
            {
                "requests": level("gateway_pending_requests"),
                "prompt tokens": level("gateway_pending_tokens"),
            },
        ),
        Panel(
            "Blocks in the prefix index",
            "short",
            {"{{worker_id}}": (f"max by (worker_id) (rayfleet_prefix_index_blocks{{{M}}})")},
        ),
        Panel(
            "Submits retried on another worker", "reqps", {"retries": rate("routing_retries_total")}
        ),
        Panel(
            "Regret: TTFT given up in favor of other requests",
            "s",
            {"regret per second": rate("routing_regret_seconds_total")},
            "Requires --explain-routing.",
        ),
    ),
)

SLO = Board(
    "slo",
    "SLO and tenants",
    "Requests with an SLO: whether they met it, by class, priority and tenant.",
    (
        Panel(
            "SLO met",
            "percentunit",
            {"{{slo_class}}": kept("slo_requests_total", "slo_class")},
        ),
        Panel(
            "SLO met, by priority",
            "percentunit",
            {"{{priority}}": kept("slo_requests_total", "priority")},
        ),
        Panel(
            "Requests with an SLO",
            "reqps",
            {"{{slo_class}} met={{met}}": rate("slo_requests_total", "slo_class, met")},
            stacked=True,
        ),
        Panel(
            "Time to first token", "s", quantiles("time_to_first_token_seconds", "slo_class", 0.95)
        ),
        Panel(
            "Time per output token",
            "s",
            quantiles("request_time_per_output_token_seconds", "slo_class", 0.95),
        ),
        Panel("Queue time", "s", quantiles("request_queue_time_seconds", "slo_class", 0.95)),
        Panel(
            "Tokens per second by tenant",
            "short",
            {"{{tenant}}": rate("tenant_generation_tokens_total", "tenant")},
            "Counted when a completion ends. --fairness-key defines the tenants.",
            stacked=True,
        ),
        Panel(
            "Time to first token by tenant",
            "s",
            {"{{tenant}}": mean("tenant_time_to_first_token_seconds", "tenant")},
            "Means.",
        ),
        Panel(
            "Requests by tenant",
            "reqps",
            {
                "{{tenant}}": rate("tenant_requests_total", "tenant"),
                "{{tenant}}, 429": rate("tenant_rejections_total", "tenant"),
            },
        ),
        Panel(
            "Cached share of prompt tokens by tenant",
            "percentunit",
            {
                "{{tenant}}": share(
                    rate("tenant_prompt_tokens_cached_total", "tenant"),
                    rate("tenant_prompt_tokens_total", "tenant"),
                )
            },
        ),
        Panel(
            "SLO met, by tenant",
            "reqps",
            {"{{tenant}} met={{met}}": rate("tenant_slo_requests_total", "tenant, met")},
        ),
    ),
)

BOARDS: Final = (FLEET, ROUTER, WORKER, SLO, DIFFUSION)
