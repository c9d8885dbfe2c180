"""What a worker can never serve, decided where the client can still be told."""

from __future__ import annotations

from worker.wire.messages import EngineInfo, Rejection, Submit


def refuse(submit: Submit, info: EngineInfo) -> Rejection | None:
    """A rejection with the numbers if `submit` can never run on an engine like `info`, else None.

    `max_tokens` beyond the room that the prompt leaves is no reason: generation then ends with
    finish reason "length" at the model's maximum.
    """
    num_prompt = len(submit.prompt) // 4
    limit = min(info.max_model_len, info.max_total_tokens)
    problem: str | None = None
    if num_prompt == 0:
        problem = "the prompt is empty: send at least one token"
    elif num_prompt >= limit:
        problem = (
            f"the prompt has {num_prompt} tokens, but this model takes at most {limit - 1} "
            f"(maximum model length {info.max_model_len}, KV cache {info.max_total_tokens} tokens, "
            "one token of room to generate): shorten the prompt"
        )
    elif submit.sampling.min_tokens > limit - num_prompt:
        problem = (
            f"min_tokens is {submit.sampling.min_tokens}, but after a prompt of {num_prompt} "
            f"tokens only {limit - num_prompt} can be generated"
        )
    if problem is None:
        return None
    return Rejection(
        request_id=submit.request_id, attempt=submit.attempt, message=problem, status=400
    )
