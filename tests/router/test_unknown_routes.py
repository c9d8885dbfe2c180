"""404s name what was probably meant: the models of the key, and the right base URL."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.unknown_routes import describe_unknown_route

KEYS = """
[one]
key = "one-key"
models = ["stub"]
[none]
key = "none-key"
models = ["another"]
"""
WRONG_BASES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/messages": "/v1/messages",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
    "/embeddings": "/v1/embeddings",
    "/v1/v1/embeddings": "/v1/embeddings",
    "/v1/v1/messages": "/v1/messages",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/v1/models": "/v1/models",
    "/v1/chat/completions/chat/completions": "/v1/chat/completions",
    "/api/v1/chat/completions": "/v1/chat/completions",
    "/openai/chat/completions": "/v1/chat/completions",
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/messages/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/tokenize": "/tokenize",
    "/v1/health": "/health",
}
UNSUPPORTED = {
    "/v1/audio/speech": "speech",
    "/v1/images/generations": "image generation",
    "/v1/files": "Files API",
    "/v1/files/file-1/content": "Files API",
    "/v1/batches": "Batch API",
    "/v1/messages/batches": "Message Batches",
    "/v1/moderations": "moderation",
    "/v1/fine_tuning/jobs": "fine-tuning",
    "/v1/complete": "Text Completions API of Anthropic",
}


async def message(rig: Any, path: str) -> str:
    """The message of a POST's 404, in either API's format."""
    response = await rig.client.post(path, json={"model": "stub"})
    assert response.status_code == 404, (path, response.text)
    text: str = response.json()["error"]["message"]
    return text


async def test_a_wrong_base_url_gets_a_hint(rig: Any) -> None:
    await rig.start()
    for path, meant in WRONG_BASES.items():
        error = await message(rig, path)
        assert f"unknown route {path}, did you mean {meant}?" in error, error
        assert ("base URL" in error) == meant.startswith("/v1/")


async def test_routes_that_are_not_supported_say_what_they_are(rig: Any) -> None:
    await rig.start()
    for path, what in UNSUPPORTED.items():
        error = await message(rig, path)
        assert "is not supported" in error
        assert what in error


async def test_other_paths_get_no_hint(rig: Any) -> None:
    await rig.start()
    for path in ("/v2/nothing", "/favicon.ico", "/admin.php", "/v1", "/v1/nothing"):
        error = await message(rig, path)
        assert error == f"unknown route {path}: GET /openapi.json lists all routes"


@pytest.mark.parametrize("path", ["/v1/responses/{response_id}", "/", "/ui/{name}"])
def test_routes_with_parameters_are_not_suggested(path: str) -> None:
    assert "did you mean" not in describe_unknown_route("/x", [path])


async def test_an_unknown_model_gets_those_that_there_are(rig: Any) -> None:
    await rig.start()
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
        "/tokenize": {"prompt": "x"},
    }
    for path, body in bodies.items():
        response = await rig.client.post(path, json={"model": "nope", **body})
        assert response.status_code == 404
        error = response.json()["error"]["message"]
        assert error == "The model `nope` does not exist. Available: stub, alias."
    response = await rig.client.get("/v1/models/nope")
    assert "Available: stub, alias." in response.json()["error"]["message"]


async def test_only_models_that_the_key_may_use_are_named(rig: Any, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text(KEYS)
    await rig.start(api_key_file=str(tmp_path / "keys"))
    error = {}
    for key in ("one", "none"):
        headers = {"authorization": f"Bearer {key}-key"}
        body = {"model": "nope", "prompt": "x"}
        response = await rig.client.post("/v1/completions", json=body, headers=headers)
        error[key] = response.json()["error"]["message"].partition(". ")[2]
    assert error == {
        "one": "Available: stub, alias.",
        "none": "This API key may not use any model.",
    }
