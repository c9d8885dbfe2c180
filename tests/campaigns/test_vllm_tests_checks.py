"""vLLM's tests against a fleet: the stand-in for vLLM, and checks of the outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.vllm_shim import main as vllm_tests
from tests.campaigns.vllm_shim.groups import FOLDERS, GROUPS
from tests.campaigns.vllm_shim.main import VllmTestsOptions, judge, summary
from tests.campaigns.vllm_shim.reasons import (
    FEATURE,
    IN_PROCESS,
    LEFT_OUT,
    MODEL,
    Reason,
    reason_for,
)
from tests.campaigns.vllm_shim.stage import Outcome, files_with_tests, lay_out, run
from tests.support.paths import DEMO

REASONS = (
    Reason(FEATURE, "*[lora]", "no adapters"),
    Reason(MODEL, "a.py::test_clever*", "requires the capital of France"),
)
FILE = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.config import ModelConfig
from vllm.entrypoints.openai.protocol import ChatRequest, SomeError
from vllm.tokenizers import get_tokenizer
import vllm.envs as envs

class Mine(ChatRequest): ...

@pytest.fixture(scope="module")
def server():
    with RemoteOpenAIServer("served", ["--dtype", "half"]) as server:
        yield server

def test_url(server):
    assert str(server.get_client().base_url) == "http://127.0.0.1:9/v1/"
    assert server.url_for("v1", "models") == "http://127.0.0.1:9/v1/models"
    assert server.port == 9

def test_tokens():
    assert len(get_tokenizer("any")) <= ModelConfig(model="any").get_vocab_size()

def test_other_model():
    RemoteOpenAIServer("other", [])

def test_in_process():
    with pytest.raises(SomeError):
        ChatRequest(n=1)

def test_attribute():
    assert envs.SOME_LIMIT + 1 > 1

def test_fails(server):
    assert not server
"""


@pytest.fixture
def _reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_tests, "REASONS", REASONS)


def outcomes(**tests: str) -> list[Outcome]:
    return [
        Outcome(test=f"a.py::test_{name.replace('_lora', '[lora]')}", outcome=outcome, detail="")
        for name, outcome in tests.items()
    ]


def failing(found: list[Outcome], wordless: tuple[str, ...] = ()) -> set[str]:
    return {check.name for check in judge(found, wordless) if not check.holds}


@pytest.mark.usefixtures("_reasons")
def test_what_fails_needs_a_reason_and_a_reason_something_that_fails() -> None:
    good = outcomes(x="passed", x_lora="failed", y="skipped", clever="failed")
    assert failing(good) == set()
    assert summary(good)["tests"] == {
        "passed": 1,
        "failed, with a reason: feature": 1,
        "skipped": 1,
        "failed, with a reason: model": 1,
    }
    assert failing(good, ("b.py",)) == {"files_without_reason"}
    assert failing([*good, *outcomes(z="failed")]) == {"failed_without_reason"}
    assert failing(outcomes(x_lora="passed")) == {"needless_reasons"}
    assert failing(outcomes(x_lora="passed", y_lora="failed")) == set()
    assert failing(outcomes(clever="passed")) == set()  # may pass by chance
    assert failing(outcomes(x="skipped")) == {"passed"}


def test_a_pattern_is_of_the_whole_name() -> None:
    assert reason_for("a.py::test_x[lora]", REASONS) is REASONS[0]
    assert reason_for("a.py::test_x[lora]-no", REASONS) is None
    assert reason_for("b.py::test_clever", REASONS) is None


def test_no_file_is_run_and_left_out() -> None:
    run_files = [file for group in GROUPS for file in group.files]
    assert len(set(run_files)) == len(run_files)
    assert all(file.startswith(FOLDERS) for file in run_files)
    # Patterns of individual files are listed before wider ones that would match them, too.
    left_out = [reason for reason in LEFT_OUT if reason.kind != IN_PROCESS]
    assert [file for file in run_files if reason_for(file, left_out)] == []


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--checkout"):
        VllmTestsOptions(checkout=str(tmp_path))
    (tmp_path / "tests").mkdir()
    VllmTestsOptions(checkout=str(tmp_path))
    with pytest.raises(ValueError, match="give a checkout"):
        files_with_tests(tmp_path, FOLDERS)


@pytest.mark.long  # starts another pytest, which imports transformers
def test_tests_run_with_what_stands_in(tmp_path: Path) -> None:
    checkout, stage = tmp_path / "checkout", tmp_path / "stage"
    folder = checkout / "tests" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(FILE)
    (folder / "test_broken.py").write_text("import no_such_module")
    (checkout / "tests" / "conftest.py").write_text("raise RuntimeError('must not be read')")
    stage.mkdir()
    lay_out(checkout, ["entrypoints/openai"], stage)
    files = files_with_tests(checkout, ["entrypoints/openai"])
    found = run(stage, files, url="http://127.0.0.1:9", models=["served"], model=DEMO)
    came_to = {o.test.rpartition("/")[2]: (o.outcome, o.detail) for o in found}
    name = "vllm.entrypoints.openai.protocol.ChatRequest"
    assert came_to.pop("test_broken.py")[0] == "failed"
    assert came_to.pop("test_a.py::test_fails")[0] == "failed"
    assert came_to == {
        "test_a.py::test_url": ("passed", ""),
        "test_a.py::test_tokens": ("passed", ""),
        "test_a.py::test_other_model": ("skipped", "Skipped: needs the model other"),
        "test_a.py::test_in_process": ("skipped", f"Skipped: about vLLM's own code: {name}"),
        "test_a.py::test_attribute": (
            "skipped",
            "Skipped: about vLLM's own code: vllm.envs.SOME_LIMIT",
        ),
    }
