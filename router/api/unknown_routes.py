"""Hints for requests to unknown routes: wrong base URLs and unsupported APIs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_UNSUPPORTED = {
    "/v1/assistants": "the Assistants API of OpenAI",
    "/v1/audio": "speech and transcription (OpenAI)",
    "/v1/batches": "the Batch API of OpenAI",
    "/v1/complete": "the Text Completions API of Anthropic",
    "/v1/containers": "containers of the code interpreter (OpenAI)",
    "/v1/conversations": "the Conversations API of OpenAI; use previous_response_id",
    "/v1/evals": "the Evals API of OpenAI",
    "/v1/files": "the Files API of OpenAI and Anthropic",
    "/v1/fine_tuning": "the fine-tuning API of OpenAI",
    "/v1/images": "image generation (OpenAI)",
    "/v1/messages/batches": "the Message Batches API of Anthropic",
    "/v1/moderations": "moderation, a classification of texts (OpenAI)",
    "/v1/realtime": "the Realtime API of OpenAI",
    "/v1/skills": "skills (OpenAI, Anthropic)",
    "/v1/threads": "the Assistants API of OpenAI",
    "/v1/uploads": "the Uploads API of OpenAI",
    "/v1/vector_stores": "vector stores of OpenAI",
    "/v1/videos": "video generation (OpenAI)",
}
"""Route prefixes of other servers' APIs that are not supported here, with descriptions of the APIs.
"""
_VERSION = "/v1"
_SIMILARITY = 0.85
"""Minimum difflib ratio at which another route is suggested: a difference of one or two letters."""


def describe_unknown_route(path: str, known: Iterable[str]) -> str:
    """Error message for a path without a route, with a hint if the intended route is known.

    Args:
        path: path of the request.
        known: paths of all routes.
    """
    served = [route for route in known if "{" not in route and route != "/"]
    for name in _other_spellings(path):
        for prefix, meaning in _UNSUPPORTED.items():
            if name == prefix or name.startswith(prefix + "/"):
                return f"{prefix} is not supported ({meaning}): GET /openapi.json lists all routes"
    meant = _meant(path, served)
    if meant is None:
        return f"unknown route {path}: GET /openapi.json lists all routes"
    hint = f"unknown route {path}, did you mean {meant}?"
    if meant.startswith(_VERSION):
        hint += (
            " The base URL ends with /v1 for OpenAI clients (http://HOST:PORT/v1), but not for "
            "Anthropic clients (http://HOST:PORT)"
        )
    return hint


def _other_spellings(path: str) -> tuple[str, str]:
    """The path, and the path with a corrected base URL."""
    return path, _VERSION + path.rpartition(_VERSION)[2]


def _meant(path: str, served: list[str]) -> str | None:
    """The known route that the client probably meant; None if none is similar.

    A wrong base URL adds a prefix or omits /v1, so routes are compared with the end of the path.
    """
    ends = {route.removeprefix(_VERSION): route for route in served}
    same = [end for end in ends if path.endswith(end)]
    if same:
        return ends[max(same, key=len)]
    close = difflib.get_close_matches(path, served, 1, _SIMILARITY)
    return close[0] if close else None
