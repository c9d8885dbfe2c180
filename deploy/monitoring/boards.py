"""What the dashboards show: boards, their panels, and the panels' queries by legend.

Those about what goes on inside workers are in worker_boards.py.
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
    "How much is served, how fast, and whether anything is about to give way.",
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
            "Length of requests",
            "short",
            {
                "prompt tokens": mean("request_prompt_tokens"),
                "generated tokens": mean("request_generation_tokens"),
            },
            "Mean by request.",
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            {"{{worker_id}}": f"rayfleet_kv_cache_usage_perc{{{M}}}"},
            "Cached pages that may be evicted do not count.",
        ),
        Panel(
            "Answered with 429 or 503",
            "reqps",
            {"{{reason}}": rate("admission_rejections_total", "reason")},
        ),
        Panel(
            "HTTP answers",
            "reqps",
            {
                "{{route}} {{status}}": rate(
                    "http_requests_total", "route, status", ', route=~"/v1/.*|other"', of=F
                )
            },
            "Streams count when they begin.",
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
            "Processor time of gateways per token",
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
            "Lateness of event loops",
            "s",
            quantiles("event_loop_lag_seconds", "process", 0.99, of=F),
            "How long what a gateway or a worker's front has to do waits for its turn.",
        ),
        Panel(
            "Processes by whether they answer scrapes",
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
    "Where requests go, what that was expected to bring, and what it brought.",
    (
        Panel(
            "Requests per second by worker",
            "reqps",
            {"{{worker_id}}": rate("routed_requests_total", "worker_id")},
            stacked=True,
        ),
        Panel(
            "Share of prompt tokens that was cached",
            "percentunit",
            {
                "found": share(rate("prompt_tokens_cached_total"), rate("prompt_tokens_total")),
                "expected": share(rate("routing_hit_tokens_total"), rate("prompt_tokens_total")),
                "at the best worker": share(
                    rate("routing_achievable_hit_tokens_total"), rate("prompt_tokens_total")
                ),
                "one cache for all": share(
                    rate("routing_pooled_hit_tokens_total"), rate("prompt_tokens_total")
                ),
            },
            "One cache for all is known with --explain-routing.",
        ),
        Panel(
            "Error of expected first tokens",
            "s",
            quantiles("routing_prediction_error_seconds", "", 0.5, 0.9, 0.99),
        ),
        Panel(
            "Parts of the time to first token",
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
            "Expected wait of the next request",
            "s",
            {"{{model_name}}": f"min by (model_name) (rayfleet_expected_wait_seconds{{{M}}})"},
        ),
        Panel(
            "At gateways, with no worker yet",
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
        Panel("Submits repeated elsewhere", "reqps", {"retries": rate("routing_retries_total")}),
        Panel(
            "First tokens given up for others",
            "s",
            {"regret per second": rate("routing_regret_seconds_total")},
            "With --explain-routing.",
        ),
    ),
)

SLO = Board(
    "slo",
    "SLO and tenants",
    "Whether requests that said when they were due were served in time, and whose they were.",
    (
        Panel(
            "Met",
            "percentunit",
            {"{{slo_class}}": kept("slo_requests_total", "slo_class")},
        ),
        Panel(
            "Met, by priority",
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
            "Counted when a completion ends; see --fairness-key for what a tenant is.",
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
                "{{tenant}}, answered with 429": rate("tenant_rejections_total", "tenant"),
            },
        ),
        Panel(
            "Cached share of prompts by tenant",
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
