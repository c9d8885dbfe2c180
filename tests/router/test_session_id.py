"""Session ids of agents' requests, and tenants that do not depend on them."""

from __future__ import annotations

import json

import pytest

from router.api.http.session_id import CLAUDE_CODE, HEADERS, account_of_user, session_id

IN_JSON = json.dumps({"device_id": "d", "account_uuid": "a", "session_id": "of-json"})
IN_TEXT = "user_0f_account_a1_session_of-text"
ORDER = (CLAUDE_CODE, "user", *HEADERS, "prompt_cache_key")


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_first_source_of_an_id_wins(first):
    given = dict.fromkeys(ORDER[first:], "")
    given |= {name: f"of-{name}" for name in given}
    if "user" in given:
        given["user"] = IN_TEXT
    user, key = given.pop("user", None), given.pop("prompt_cache_key", None)
    expected = "of-text" if ORDER[first] == "user" else f"of-{ORDER[first]}"
    assert session_id(given, user, key) == expected


@pytest.mark.parametrize(
    ("user", "session", "account"),
    [
        (IN_JSON, "of-json", '{"account_uuid":"a","device_id":"d"}'),
        (IN_TEXT, "of-text", "user_0f_account_a1"),
        ("alice", "", "alice"),
        ("_session_", "", "_session_"),
        ('{"session_id": 1}', "", '{"session_id": 1}'),
        ('{"session_id": "s"', "", '{"session_id": "s"'),
        ("", "", ""),
    ],
)
def test_users_are_split_into_account_and_session(user, session, account):
    assert session_id({}, user, None) == session
    assert account_of_user(user) == account


def test_ids_of_different_keys_are_different_sessions():
    assert session_id({"x-session-id": "s"}, None, None, "alpha") == "alpha/s"
    assert session_id({"x-session-id": "s"}, None, None) == "s"
    assert session_id({}, None, None, "alpha") == ""


@pytest.mark.parametrize("user", [IN_JSON, IN_TEXT])
async def test_conversations_of_a_user_are_one_tenant(rig, user):
    await rig.start(fairness_key="user", cache_isolation="user", api_keys=("one", "two"))
    rig.client.headers["authorization"] = "Bearer one"
    for session in ("of-json", "of-text"):
        changed = user.replace("of-json", session).replace("of-text", session)
        body = {
            "model": "stub",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "hi"}],
            "metadata": {"user_id": changed},
        }
        assert (await rig.client.post("/v1/messages", json=body)).status_code == 200
    first, second = rig.submits()
    assert first.tenant == second.tenant != ""
    assert first.cache_salt == second.cache_salt != ""
