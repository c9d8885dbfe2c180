"""Unavailable models are rejected with two-line errors before Ray starts.

A server on loopback stands for the Hub. Cases with different variables run in different processes,
as huggingface_hub reads them once. They are forked from one that has imported all but that.
"""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import checkpoints
from cluster.config import find_demo_model
from tests.support.forking import Forker
from worker.config import EngineConfig

MODEL = "org/model"
HUB_VARIABLES = ("HF_", "HUGGING", "TRANSFORMERS_")
FORKER = Forker(
    *("cluster.cli.main", "cluster.cli.parser", "cluster.config", "cluster.checkpoints"),
    *("router.tokens.defaults", "worker.rank.preflight", "httpx2", "filelock"),
)
"""Its server has imported what `rayfleet serve` imports, without huggingface_hub."""
RUN_S = 120.0
"""Maximum seconds of a process."""

MAIN = "import sys; from cluster.cli.main import main; main(sys.argv[1:])"

SERVE = """
import contextlib, io, json, os, sys
from cluster.cli.main import main

def serve(arguments, token):
    os.environ["HF_TOKEN"] = token
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(SystemExit):
        main(["serve", *arguments])
    return stderr.getvalue()

print(json.dumps([serve(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


@contextmanager
def hub(answers: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Hub that responds with a status (0: never) and an error code for each repository; yields its
    URL."""
    end = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:  # huggingface_hub requests headers
            status, error_code = answers["/".join(self.path.split("/")[1:3])]
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
    """URL of a port that refuses connections while the fixture is active."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def serve(home: Path, model: str, *options: str, **environment: str) -> list[str]:
    """Error of `rayfleet serve` for a model that it rejects."""
    result = run(home, MAIN, "serve", model, *options, **environment)
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()


def serve_each(home: Path, *commands: tuple[list[str], str], **environment: str) -> list[list[str]]:
    """Errors of `rayfleet serve` for each pair of arguments and token, from one process."""
    result = run(home, SERVE, json.dumps(commands), **environment)
    assert result.returncode == 0, result.stderr
    return [text.splitlines() for text in json.loads(result.stdout)]


def pass_all(home: Path, *models: str, **environment: str) -> None:
    """Checks that `rayfleet serve` accepts these models."""
    code = f"from cluster.checkpoints import require_model as r; [r(m) for m in {models}]"
    result = run(home, code, **environment)
    assert result.returncode == 0, result.stderr


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    returncode: int | None
    stdout: str
    stderr: str


def run(home: Path, code: str, *arguments: str, **environment: str) -> Ended:
    """Runs code in a separate process, as `python -c` would in the folder `home`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(HUB_VARIABLES) and not name.lower().endswith("_proxy")
    }
    variables = {**inherited, "HF_HOME": str(home), **environment}
    process = FORKER.start(_run_here, code, arguments, variables, home)
    process.join(RUN_S)
    texts = [(home / name).read_text() for name in ("stdout", "stderr")]
    return Ended(process.exitcode, *texts)


def _run_here(code: str, arguments: Sequence[str], variables: dict[str, str], home: Path) -> None:
    assert "huggingface_hub" not in sys.modules
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(home)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def cache(home: Path) -> None:
    """Adds the model's configuration to the Hub's cache."""
    folder = home / "hub" / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text("{}")


def test_each_hub_error_has_a_remedy(tmp_path: Path) -> None:
    cases = [
        (404, "RepoNotFound", "", "no public model org/model on the Hub", "check the name"),
        (404, "", "", "no public model org/model on the Hub", "check the name"),
        (401, "RepoNotFound", "", "no public model org/model on the Hub", "set HF_TOKEN"),
        (
            401,
            "",
            "hf_wrong",
            "the Hugging Face token has no access to org/model (HTTP 401)",
            "/settings/tokens",
        ),
        (401, "GatedRepo", "", "org/model is gated", "accept them at"),
        (403, "GatedRepo", "hf_other", "org/model is gated", "accept them at"),
        (404, "EntryNotFound", "", "has no config.json", "GGUF and"),
    ]
    names = [f"{MODEL}-{number}" for number in range(len(cases))]
    answers = {name: case[:2] for name, case in zip(names, cases, strict=True)}
    commands = [([name], case[2]) for name, case in zip(names, cases, strict=True)]
    with hub(answers) as url:
        errors = serve_each(tmp_path, *commands, HF_ENDPOINT=url)
    for name, (*_, problem, remedy), lines in zip(names, cases, errors, strict=True):
        assert len(lines) == 2, lines
        assert problem.replace(MODEL, name) in lines[0]
        assert remedy in lines[1]


def test_an_unknown_revision_has_a_remedy(tmp_path: Path) -> None:
    commands = [([MODEL, "--revision", "v9"], ""), ([str(tmp_path), "--revision", "v9"], "")]
    with hub({MODEL: (404, "RevisionNotFound")}) as url:
        of_hub, of_folder = serve_each(tmp_path, *commands, HF_ENDPOINT=url)
    assert "org/model has no revision v9" in of_hub[0]
    assert f"branch, tag or commit: {url}/org/model/commits" in of_hub[1]
    assert "revision v9 is not supported for a folder" in of_folder[0]
    assert len(of_folder) == 2


def test_the_commit_is_read_from_the_cache_without_the_hub(tmp_path: Path, refusing: str) -> None:
    code = """
from cluster.checkpoints import with_commits
from worker.config import EngineConfig
for model in ("org/other", "org/model"):
    for revision in ("", "v1"):
        print(with_commits(EngineConfig.of(model=model, revision=revision)).revision or "none")
"""
    cache(tmp_path)
    for environment in ({"HF_ENDPOINT": refusing}, {"HF_HUB_OFFLINE": "1"}):
        result = run(tmp_path, code, **environment)
        assert result.stdout.split() == ["none", "v1", "0" * 40, "v1"], result.stderr
        assert result.stderr.count("cannot pin org/other") == 2


def test_slow_imports_do_not_count_for_the_timeout(tmp_path: Path) -> None:
    code = """
import sys, time
from cluster import checkpoints
from cluster.config import find_demo_model
from worker.config import EngineConfig
class Slow:
    def find_spec(name, path, target=None):
        time.sleep(2 * (name == "huggingface_hub"))
sys.meta_path.insert(0, Slow)
checkpoints.PIN_TIMEOUT_S = 2
print(checkpoints.with_commits(EngineConfig.of(model="org/model")).revision)
"""
    cache(tmp_path)
    result = run(tmp_path, code, HF_HUB_OFFLINE="1")
    assert result.stdout.split() == ["0" * 40], result.stderr


def test_an_unreachable_hub_is_reported(tmp_path: Path, refusing: str) -> None:
    lines = serve(tmp_path, MODEL, HF_ENDPOINT=refusing)
    assert "is not reachable" in lines[0]
    assert "refused" in lines[0]
    assert "HTTPS_PROXY" in lines[1]
    assert len(lines) == 2
    with hub({MODEL: (0, "")}) as url:
        lines = serve(tmp_path, MODEL, HF_ENDPOINT=url)
    assert "is not reachable" in lines[0]
    assert "HF_HUB_ETAG_TIMEOUT" in lines[1]
    assert len(lines) == 2


def test_name_resolution_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTP timeouts do not cover getaddrinfo, which may block for minutes."""
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait())
    monkeypatch.setattr(checkpoints, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        with pytest.raises(ValueError, match=r"is not reachable: no response within 0\.2 s"):
            checkpoints.require_model(MODEL)
    finally:
        end.set()


def test_offline_only_cached_models_are_accepted(tmp_path: Path) -> None:
    lines = serve(tmp_path, MODEL, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in lines[0]
    assert "hf download org/model" in lines[1]
    assert len(lines) == 2
    cache(tmp_path)
    pass_all(tmp_path, MODEL, HF_HUB_OFFLINE="1")


def test_available_models_and_hub_failures_are_accepted(tmp_path: Path, refusing: str) -> None:
    answers = {f"{MODEL}-{status}": (status, "") for status in (200, 429, 503)}
    with hub(answers) as url:
        pass_all(tmp_path, *answers, HF_ENDPOINT=url)
    cache(tmp_path)
    pass_all(tmp_path, MODEL, HF_ENDPOINT=refusing)


def test_incomplete_folders_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    for name, file in (("mistral", "params.json"), ("adapter", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    cases = (
        ("./nothing", "folder ./nothing does not exist", "ORGANIZATION/NAME"),
        ("mistyped", "folder mistyped does not exist", "ORGANIZATION/NAME"),
        ("./empty", "has no config.json", "hf download"),
        ("./bare", "has no *.safetensors file", ""),
        ("./mistral", "Mistral's own format is not supported", ""),
        ("./adapter", "LoRA adapter: serve its base model", ""),
    )
    errors = serve_each(tmp_path, *(([name], "") for name, *_ in cases))
    for (_, problem, remedy), lines in zip(cases, errors, strict=True):
        assert problem in lines[0]
        assert remedy in lines[-1]
        assert len(lines) == 2 or not remedy
    checkpoints.require_model(str(tmp_path / "bare"), weights=False)


def copy_of_demo(folder: Path, **changes: object) -> Path:
    """Copy of the demo model with changes in config.json, which do not match its weights."""
    folder.mkdir()
    demo = Path(find_demo_model())
    for path in demo.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_config_json_is_checked_before_ray_starts(tmp_path: Path) -> None:
    """Otherwise a worker fails after 12 s with a traceback of 73 lines."""
    nine = str(copy_of_demo(tmp_path / "nine", num_attention_heads=9, num_key_value_heads=3))
    demo = find_demo_model()
    cases: list[tuple[list[str], str, str]] = [
        ([nine, "-tp", "2"], "does not divide the number of attention heads (9)", "one of 1, 3"),
        ([demo, "-tp", "3"], "attention heads (8)", "set --tensor-parallel-size to one of 1, 2, 4"),
        (
            [demo, "--max-model-len", "9999"],
            "exceeds this checkpoint's maximum of 4096",
            "lower it",
        ),
        ([demo, "--enable-expert-parallel", "-tp", "2"], "has no experts", "remove the flag"),
        (
            [str(copy_of_demo(tmp_path / "other", architectures=["Odd"], model_type="odd"))],
            "architectures",
            "",
        ),
    ]
    for (_, mistake, remedy), lines in zip(
        cases, serve_each(tmp_path, *((case[0], "") for case in cases)), strict=True
    ):
        assert len(lines) <= 2, lines
        assert lines[0].startswith("rayfleet: ")
        assert mistake in lines[0]
        assert remedy in lines[-1]


@pytest.mark.parametrize(
    ("task", "route"),
    [
        ("generate", "/v1/chat/completions"),
        ("embed", "/v1/embeddings"),
    ],
)
def test_the_example_request_suits_the_model(task: str, route: str) -> None:
    engine = EngineConfig.of(model=find_demo_model(), task=task)
    assert checkpoints.example_request(engine).route == route
