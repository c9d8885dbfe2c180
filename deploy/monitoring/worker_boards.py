"""Dashboards of worker internals: steps, and block diffusion."""

from __future__ import annotations

from deploy.monitoring.queries import Board, M, Panel, level, mean, quantiles, rate, share

PHASES = (
    *("schedule", "broadcast", "prepare", "forward", "sample", "collect", "process", "deliver"),
    "bubble",
)

WORKER = Board(
    "worker",
    "worker step timeline",
    "Phases of the workers' steps.",
    (
        Panel(
            "Mean step time by phase",
            "s",
            {phase: mean(f"step_{phase}_seconds") for phase in PHASES},
            "Prepare, forward, sample and bubble are times of rank 0, the others of the "
            "coordinator; they overlap.",
            stacked=True,
        ),
        Panel(
            "Steps per second",
            "short",
            {"{{worker_id}}": rate("step_forward_seconds_count", "worker_id")},
        ),
        Panel(
            "Idle time between steps with work pending",
            "percentunit",
            {"{{worker_id}}": rate("step_bubble_seconds_sum", "worker_id")},
        ),
        Panel(
            "Tokens of the last step", "short", {"{{worker_id}}": level("step_tokens", "worker_id")}
        ),
        Panel(
            "Batch utilization",
            "percentunit",
            {
                "{{worker_id}}": share(
                    level("num_requests_running", "worker_id"), level("max_num_seqs", "worker_id")
                )
            },
        ),
        Panel(
            "Queue",
            "short",
            {
                "waiting tokens": level("num_queued_tokens"),
                "prompt tokens to compute": level("queued_prefill_tokens"),
            },
        ),
        Panel(
            "LoRA adapters",
            "short",
            {
                "waiting requests": level("num_requests_waiting_for_lora"),
                "loads to devices per second": rate("lora_loads_total"),
                "reads per second": rate("lora_reads_total"),
            },
            "Many loads: raise --max-loras. Many reads: raise --max-cpu-loras.",
        ),
        Panel(
            "Mean decode step by worker",
            "s",
            {"{{worker_id}}": mean("worker_step_seconds", "worker_id", ', kind="decode"')},
            "Steps without prompt tokens: a slow GPU stands out.",
        ),
        Panel(
            "Mean time to first token by worker",
            "s",
            {"{{worker_id}}": mean("worker_time_to_first_token_seconds", "worker_id")},
            "From arrival at the worker.",
        ),
        Panel(
            "Last startup",
            "s",
            {"{{phase}}": f"max by (phase) (rayfleet_worker_startup_seconds{{{M}}})"},
            "Maximum over the workers, by phase.",
            stacked=True,
        ),
        Panel("Queue time", "s", quantiles("request_queue_time_seconds")),
        Panel("Prefill time", "s", quantiles("request_prefill_time_seconds")),
        Panel(
            "Draft acceptance rate",
            "percentunit",
            {
                "accepted": share(
                    rate("spec_decode_num_accepted_tokens_total"),
                    rate("spec_decode_num_draft_tokens_total"),
                )
            },
        ),
        Panel(
            "Decoded tokens per row",
            "short",
            {
                "tokens": share(
                    rate("spec_decode_num_decode_tokens_total"),
                    rate("spec_decode_num_decode_rows_total"),
                )
            },
            "With --speculative-method.",
        ),
        Panel(
            "Drafting decisions by reason",
            "short",
            {"{{reason}}": rate("spec_decode_decisions_total", "reason")},
            stacked=True,
        ),
    ),
)

DIFFUSION = Board(
    "diffusion",
    "block diffusion",
    "Forward passes per block, and the share of passes that decide tokens.",
    (
        Panel(
            "Forward passes per second",
            "short",
            {"{{worker_id}}": rate("diffusion_forwards_total", "worker_id")},
        ),
        Panel(
            "Tokens per second",
            "short",
            {"{{worker_id}}": rate("diffusion_tokens_total", "worker_id")},
        ),
        Panel(
            "Tokens per pass of a block",
            "short",
            {"tokens": share(rate("diffusion_tokens_total"), rate("diffusion_block_passes_total"))},
        ),
        Panel(
            "Blocks per forward pass",
            "short",
            {
                "blocks": share(
                    rate("diffusion_block_passes_total"), rate("diffusion_forwards_total")
                )
            },
        ),
        Panel(
            "Share of block passes that decided tokens",
            "percentunit",
            {"share": share(rate("diffusion_rounds_total"), rate("diffusion_block_passes_total"))},
        ),
    ),
)
