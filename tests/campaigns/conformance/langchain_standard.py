"""LangChain's standard tests of its OpenAI client, on chat completions and responses.

`python -m` runs them in a separate environment.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.campaigns.conformance.cases import TIMEOUT_S, Endpoint, Outcome, main

_VARIABLE = "CONFORMANCE_{name}"
"""Name of the variables that pass the endpoint to the tests, which pytest instantiates."""
_ENDS_VARIABLE = "CONFORMANCE_ENDS"

SKIPPED = {
    "test_unicode_tool_call_integration": "the demo model cannot copy Chinese and Japanese",
    "test_agent_loop": "the demo model would have to choose a call; see `make check-agents`",
    "test_tool_calling": "the demo model would have to copy a number; see test_tool_choice",
    "test_tool_calling_async": "the demo model would have to copy a number",
    "test_tool_calling_with_no_arguments": "the demo model calls tools forever if it must call one",
    "test_structured_output_pydantic_2_v1": "its schema allows other keys, which the model uses",
    "test_json_mode": "the demo model would have to use the requested keys",
}
_ENDS = ('"', '",', '"}', '."')
_BIAS = 4
"""Logit bias of tokens that end a JSON text. Without it, the demo model does not terminate; with a
higher bias, it calls functions with empty strings."""
_BIASES = {"test_structured_output_optional_param": 9}
"""Biases of tests whose texts are less like the demo model's training data."""


class _Standard(ChatModelIntegrationTests):  # type: ignore[misc]
    bias = _BIAS

    @property
    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Other parameters of the model."""

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        given = {name: os.environ[_VARIABLE.format(name=name)] for name in Endpoint._fields}
        return {
            "model": given["model"],
            "base_url": f"{given['base_url']}/v1",
            "api_key": given["key"],
            "temperature": 0,
            "max_tokens": 192,
            "max_retries": 0,
            "timeout": TIMEOUT_S,
            **self._settings,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return os.environ[_VARIABLE.format(name="model")]

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        """Sends the prompt twice; the second time, it is cached."""
        model = ChatOpenAI(**{**self.chat_model_params, "stream_usage": True})
        prompt = "Count to ten. " * 20
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        chunks = list(model.stream(prompt))
        return sum(chunks[1:], start=chunks[0])

    def _logit_bias(self) -> dict[str, int]:
        return {str(token): self.bias for token in json.loads(os.environ[_ENDS_VARIABLE])}

    @pytest.fixture(autouse=True)
    def _prepared(self, request: pytest.FixtureRequest) -> None:
        name = getattr(request.node, "originalname", "")
        self.bias = _BIASES.get(name, _BIAS)
        if (reason := SKIPPED.get(name)) is not None:
            pytest.skip(reason)


class TestChats(_Standard):
    """Tests on /v1/chat/completions."""

    @property
    def _settings(self) -> dict[str, Any]:
        return {"stream_usage": True, "logit_bias": self._logit_bias()}


class TestResponses(_Standard):
    """Tests on /v1/responses."""

    @property
    def _settings(self) -> dict[str, Any]:
        extra = {"logit_bias": self._logit_bias()}  # not a parameter of OpenAI's responses
        return {"use_responses_api": True, "extra_body": extra}


class Listener:
    """Collects the outcomes of the tests."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Handles the report of a test's setup, call or teardown; a failure in any of them
        counts."""
        name = f"LangChain: {report.nodeid.partition('::')[2]}"
        if report.failed:
            lines = (report.longreprtext or "").splitlines()
            wrong = [line[1:].strip() for line in lines if line.startswith("E ")]
            self.outcomes[name] = Outcome(name, "failed", " ".join(wrong)[:600])
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"
            self.outcomes[name] = Outcome(name, "skipped", str(reason).removeprefix("Skipped: "))
        elif report.when == "call":
            self.outcomes[name] = Outcome(name, "passed")


def _ends(endpoint: Endpoint) -> list[int]:
    """Ids of the tokens that end a text."""
    tokens = []
    for text in _ENDS:
        request = urllib.request.Request(
            f"{endpoint.base_url}/tokenize",
            data=json.dumps({"model": endpoint.model, "prompt": text}).encode(),
            headers={
                "authorization": f"Bearer {endpoint.key}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            tokens.append(json.load(answer)["tokens"][-1])
    return tokens


def _try_all(endpoint: Endpoint) -> Iterator[Outcome]:
    for name, value in endpoint._asdict().items():
        os.environ[_VARIABLE.format(name=name)] = value
    os.environ[_ENDS_VARIABLE] = json.dumps(_ends(endpoint))
    listener = Listener()
    scopes = ("asyncio_default_test_loop_scope", "asyncio_default_fixture_loop_scope")
    options = ["asyncio_mode=auto", *(f"{scope}=session" for scope in scopes)]
    arguments = ["-c", os.devnull, "--noconftest", "-q", "-p", "no:cacheprovider", __file__]
    pytest.main(
        [*arguments, *(word for option in options for word in ("-o", option))], plugins=[listener]
    )
    yield from listener.outcomes.values()


if __name__ == "__main__":
    sys.exit(main(_try_all))
