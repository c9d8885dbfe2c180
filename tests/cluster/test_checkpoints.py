"""A model that cannot be had is refused in two lines, before Ray starts.

A server on loopback stands for the Hub. Each case runs in a process of its own, as
huggingface_hub reads its variables once.
"""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import checkpoints

MODEL = "org/model"
HUB_VARIABLES = ("HF_", "HUGGING", "TRANSFORMERS_")


@contextmanager
def hub(status: int, error_code: str = "") -> Iterator[str]:
    """A Hub that answers everything with `status`; 0 for one that never answers. Yields its URL."""
    end = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:  # huggingface_hub asks for headers
            if status == 0:
                end.wait()
                return
            self.send_response(status)
            if error_code:
                self.send_header("X-Error-Code", error_code)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "2")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        end.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def refusing() -> Iterator[str]:
    """URL of a port that refuses connections for as long as this lives."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def serve(home: Path, model: str, *options: str, **environment: str) -> list[str]:
    """What `rayfleet serve` says of a model that it refuses."""
    result = run(home, "-m", "cluster.cli.main", "serve", model, *options, **environment)
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()


def passes(home: Path, model: str, **environment: str) -> bool:
    """Whether `rayfleet serve` would go on and start Ray."""
    code = f"from cluster.checkpoints import refuse_missing_model as r; r({model!r})"
    return run(home, "-c", code, **environment).returncode == 0


def run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(HUB_VARIABLES) and not name.lower().endswith("_proxy")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "HF_HOME": str(home), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
    )


def cache(home: Path) -> None:
    """Puts the model's configuration into the Hub's cache."""
    folder = home / "hub" / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("status", "error_code", "token", "problem", "remedy"),
    [
        (404, "RepoNotFound", "", "knows no public model org/model", "check the name"),
        (404, "", "", "knows no public model org/model", "check the name"),
        (401, "RepoNotFound", "", "knows no public model org/model", "set HF_TOKEN"),
        (401, "", "hf_wrong", "the holder of this token (HTTP 401)", "/settings/tokens"),
        (401, "GatedRepo", "", "org/model is gated", "accept them at"),
        (403, "GatedRepo", "hf_other", "org/model is gated", "accept them at"),
        (404, "EntryNotFound", "", "holds no config.json", "GGUF cannot be served"),
    ],
)
def test_each_answer_of_the_hub_has_its_remedy(
    tmp_path: Path, status: int, error_code: str, token: str, problem: str, remedy: str
) -> None:
    with hub(status, error_code) as url:
        lines = serve(tmp_path, MODEL, HF_ENDPOINT=url, **({"HF_TOKEN": token} if token else {}))
    assert len(lines) == 2, lines
    assert problem in lines[0]
    assert remedy in lines[1]


def test_a_revision_that_is_none_has_its_remedy(tmp_path: Path) -> None:
    with hub(404, "RevisionNotFound") as url:
        lines = serve(tmp_path, MODEL, "--revision", "v9", HF_ENDPOINT=url)
    assert "org/model on the Hub has no revision v9" in lines[0]
    assert f"branch, tag or commit of {url}/org/model/commits" in lines[1]
    lines = serve(tmp_path, str(tmp_path), "--revision", "v9")
    assert "is a folder, which has no revision v9" in lines[0]
    assert len(lines) == 2


def test_the_commit_is_the_caches_where_the_hub_tells_none(tmp_path: Path, refusing: str) -> None:
    code = """
from cluster.checkpoints import with_commits
from worker.config import EngineConfig
for revision in ("", "v1"):
    print(with_commits(EngineConfig(model="org/model", revision=revision)).revision or "none")
"""
    for environment in ({"HF_ENDPOINT": refusing}, {"HF_HUB_OFFLINE": "1"}):
        told = run(tmp_path, "-c", code, **environment)
        assert told.stdout.split() == ["none", "v1"], told.stderr
        assert told.stderr.count("held to no common commit: org/model") == 2
    cache(tmp_path)
    for environment in ({"HF_ENDPOINT": refusing}, {"HF_HUB_OFFLINE": "1"}):
        told = run(tmp_path, "-c", code, **environment)
        assert told.stdout.split() == ["0" * 40, "v1"], told.stderr


def test_a_library_that_takes_long_to_import_is_not_the_hubs_time(tmp_path: Path) -> None:
    code = """
import sys, time
from cluster import checkpoints
from worker.config import EngineConfig
class Slow:
    def find_spec(name, path, target=None):
        time.sleep(2 * (name == "huggingface_hub"))
sys.meta_path.insert(0, Slow)
checkpoints.PIN_TIMEOUT_S = 2
print(checkpoints.with_commits(EngineConfig(model="org/model")).revision)
"""
    cache(tmp_path)
    told = run(tmp_path, "-c", code, HF_HUB_OFFLINE="1")
    assert told.stdout.split() == ["0" * 40], told.stderr


def test_a_hub_that_refuses_or_says_nothing(tmp_path: Path, refusing: str) -> None:
    lines = serve(tmp_path, MODEL, HF_ENDPOINT=refusing)
    assert "cannot be reached" in lines[0]
    assert "refused" in lines[0]
    assert "HTTPS_PROXY" in lines[1]
    assert len(lines) == 2
    with hub(0) as url:
        lines = serve(tmp_path, MODEL, HF_ENDPOINT=url)
    assert "cannot be reached" in lines[0]
    assert "HF_HUB_ETAG_TIMEOUT" in lines[1]
    assert len(lines) == 2


def test_a_name_that_never_resolves_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No timeout of HTTP covers getaddrinfo, which may block for minutes."""
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait())
    monkeypatch.setattr(checkpoints, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        with pytest.raises(ValueError, match=r"cannot be reached: no answer within 0\.2 s"):
            checkpoints.refuse_missing_model(MODEL)
    finally:
        end.set()


def test_offline_the_cache_decides(tmp_path: Path) -> None:
    lines = serve(tmp_path, MODEL, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids" in lines[0]
    assert "hf download org/model" in lines[1]
    assert len(lines) == 2
    cache(tmp_path)
    assert passes(tmp_path, MODEL, HF_HUB_OFFLINE="1")


def test_what_can_be_had_or_may_come_is_let_through(tmp_path: Path, refusing: str) -> None:
    for status in (200, 429, 503):
        with hub(status) as url:
            assert passes(tmp_path, MODEL, HF_ENDPOINT=url), status
    cache(tmp_path)
    assert passes(tmp_path, MODEL, HF_ENDPOINT=refusing)


def test_folders_say_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    for name, problem, remedy in (
        ("./nothing", "there is no folder ./nothing", "ORGANIZATION/NAME"),
        ("mistyped", "there is no folder mistyped", "ORGANIZATION/NAME"),
        ("./empty", "there is no config.json", "hf download"),
    ):
        lines = serve(tmp_path, name)
        assert len(lines) == 2
        assert problem in lines[0]
        assert remedy in lines[1]
    assert "holds no *.safetensors file" in serve(tmp_path, "./bare")[0]
    checkpoints.refuse_missing_model(str(tmp_path / "bare"), weights=False)
