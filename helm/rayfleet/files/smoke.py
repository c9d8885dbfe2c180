"""Smoke test of `helm test`: every model must answer within TIMEOUT_S seconds."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE_URL = os.environ["BASE_URL"]
DEADLINE = time.monotonic() + float(os.environ["TIMEOUT_S"])


def ask(path, body=None):
    """Returns the JSON response to a GET, or to a POST of `body`."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("API_KEY", "").split("\n")[0].strip():
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE_URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_until_ready():
    """Returns when every model has a worker; fails the test after the timeout."""
    answer = "no response"
    while time.monotonic() < DEADLINE:
        try:
            ask("/ready")
            return
        except urllib.error.HTTPError as error:
            answer = f"HTTP {error.code}: {error.read().decode(errors='replace')}"
        except OSError as error:
            answer = str(error)
        time.sleep(1)
    sys.exit(f"{BASE_URL}/ready did not succeed in time: {answer}")


wait_until_ready()
served = {card["id"] for card in ask("/v1/models")["data"]}
for model in os.environ["MODELS"].split(","):
    if model not in served:
        sys.exit(f"model {model} is not served; available: {sorted(served)}")
    answer = ask("/v1/completions", {"model": model, "prompt": "1 + 1 =", "max_tokens": 4})
    if not answer["usage"]["completion_tokens"]:
        sys.exit(f"model {model} returned no tokens: {answer}")
    print(f"{model} answers: {answer['choices'][0]['text']!r}")
