"""The id of the conversation that a request belongs to, from its headers or its body."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from worker.protocol.analyzed import analyzed

CLAUDE_CODE = "x-claude-code-session-id"
HEADERS = (
    "session-id",
    "session_id",
    "x-session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-dynamo-session-id",
)
"""Headers with a session id, in order of precedence: of Codex (`session-id`), older Codex versions
and pi (`session_id`), OpenCode (the next three), and Dynamo."""
MAX_LENGTH = 256
"""Maximum length of an id in characters; longer ones are cut off."""
_IN_USER = "_session_"
"""Separates account and session in the `user_id` of older versions of Claude Code."""


def session_id(
    headers: Mapping[str, str], user: str | None, prompt_cache_key: str | None, owner: str = ""
) -> str:
    """The client's id of the conversation; empty if it sends none.

    Sources, in order of precedence: X-Claude-Code-Session-Id, the session in `user`, HEADERS, and
    `prompt_cache_key`.

    Args:
        headers: headers of the request, with case-insensitive or lower-case names.
        user: `user` of the body, or `metadata.user_id` in Anthropic's API.
        prompt_cache_key: the body's field of this name.
        owner: name of the API key: the same id under two keys means two sessions.
    """
    found = headers.get(CLAUDE_CODE) or _user_parts(user or "")[1]
    if not found:
        given = (headers.get(name) for name in HEADERS)
        found = next((value for value in given if value), prompt_cache_key or "")
    found = found[:MAX_LENGTH]
    return f"{owner}/{found}" if owner and found else found


def account_of_user(user: str) -> str:
    """`user` without its session: conversations of the same user belong to the same tenant."""
    return _user_parts(user)[0]


def _user_parts(user: str) -> tuple[str, str]:
    """Account and session id in a `user` field; the session id is empty if there is none.

    Claude Code sends a JSON object with `session_id`, or `user_…_account_…_session_…`.
    """
    if user.startswith("{"):
        try:
            fields = msgspec.json.decode(user, type=analyzed(dict[str, object]))
        except msgspec.DecodeError:
            return user, ""
        session = fields.pop("session_id", "")
        if isinstance(session, str) and session:
            return msgspec.json.encode(fields, order="sorted").decode(), session
        return user, ""
    account, separator, session = user.rpartition(_IN_USER)
    return (account, session) if separator and session else (user, "")
