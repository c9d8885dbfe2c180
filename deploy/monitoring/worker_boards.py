"""Dashboards of what goes on inside workers: their steps, and block diffusion."""

from __future__ import annotations

from deploy.monitoring.queries import Board, M, Panel, level, mean, quantiles, rate, share

PHASES = (
    *("schedule", "broadcast", "prepare", "forward", "sample", "collect", "process", "deliver"),
    "bubble",
)

WORKER = Board(
    "worker",
    "worker step timeline",
    "What the steps of the workers consist of.",
    (
        Panel(
            "A mean step",
            "s",
            {phase: mean(f"step_{phase}_seconds") for phase in PHASES},
            "Prepare, forward, sample and bubble are of rank 0; it computes while the coordinator "
            "does the rest, so the two add up apart.",
            stacked=True,
        ),
        Panel(
            "Steps per second",
            "short",
            {"{{worker_id}}": rate("step_forward_seconds_count", "worker_id")},
        ),
        Panel(
            "Idle between steps while there was work",
            "percentunit",
            {"{{worker_id}}": rate("step_bubble_seconds_sum", "worker_id")},
        ),
        Panel(
            "Tokens of the last step", "short", {"{{worker_id}}": level("step_tokens", "worker_id")}
        ),
        Panel(
            "Batch in use",
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
                "tokens that wait": level("num_queued_tokens"),
                "prompt tokens to compute": level("queued_prefill_tokens"),
            },
        ),
        Panel(
            "A mean decode step by worker",
            "s",
            {"{{worker_id}}": mean("worker_step_seconds", "worker_id", ', kind="decode"')},
            "Of steps without prompt tokens: a slow GPU stands out.",
        ),
        Panel(
            "Mean time to first token by worker",
            "s",
            {"{{worker_id}}": mean("worker_time_to_first_token_seconds", "worker_id")},
            "From its arrival at the worker.",
        ),
        Panel(
            "Last start",
            "s",
            {"{{phase}}": f"max by (phase) (rayfleet_worker_startup_seconds{{{M}}})"},
            "The longest of each phase among the workers.",
            stacked=True,
        ),
        Panel("Queue time", "s", quantiles("request_queue_time_seconds")),
        Panel("Prefill time", "s", quantiles("request_prefill_time_seconds")),
        Panel(
            "Drafts that were right",
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
            "Why rows were drafted for or not",
            "short",
            {"{{reason}}": rate("spec_decode_decisions_total", "reason")},
            stacked=True,
        ),
    ),
)

DIFFUSION = Board(
    "diffusion",
    "block diffusion",
    "How many passes blocks take, and how many of them decide something.",
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
            "Passes of blocks that decided something",
            "percentunit",
            {"share": share(rate("diffusion_rounds_total"), rate("diffusion_block_passes_total"))},
        ),
    ),
)
