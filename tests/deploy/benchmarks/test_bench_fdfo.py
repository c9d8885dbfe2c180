"""The benchmark of block diffusion on an untrained model: counts and figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from deploy.benchmarks import engine
from deploy.benchmarks.ab.fdfo_prompts import questions_of, replayed_requests
from deploy.benchmarks.ab.forward_counts import CountedRequest, count_joined, count_separate
from deploy.benchmarks.ab.options import FdfoOptions, rounds_of_blocks
from deploy.benchmarks.cli import main
from tests.support.paths import DEMO
from worker.config import EngineConfig
from worker.core.executor_local import LocalExecutor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's words with random weights, in blocks of 16."""
    from tests.support.checkpoints.sdar import write_sdar

    folder = tmp_path_factory.mktemp("fdfo") / "model"
    write_sdar(folder, 16, sharpness=40.0, vocab_size=2560)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder / name)
    lines = (DEMO.parent / "demo_heldout.jsonl").read_text().splitlines()
    folder.with_name("model_heldout.jsonl").write_text("\n".join(Random(0).sample(lines, 8)))
    return folder


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of two dozen variants in one process, so that torch is loaded once."""

    def create(config: EngineConfig, directory: str, *, spawn_peers: bool) -> LocalExecutor:
        assert spawn_peers
        return LocalExecutor(config, directory, ())

    monkeypatch.setattr(engine, "create_executor", create)


@pytest.mark.long  # test_replayed_rounds runs the benchmark with fewer variants
def test_figures_and_checks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--device", "cpu", "--cpu-threads", "1", "--kv-cache-tokens", "8192")
    load = ("--running", "3", "--pairs", "1", "--max-tokens", "24", "--num-long", "2")
    questions = ("--dllm-config", '{"dllm_threshold": 0.2}', "--long-prompt-blocks", "6")
    argv = ("fdfo", "--model", str(model), *where, *load, *questions, "--shares", "--json")
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in result["checks"]}
    for variant in ("synchronous", "fdfo", "fused", "full"):
        assert checks[f"forwards_{variant}_3"]["holds"], checks[f"forwards_{variant}_3"]
    assert result["fdfo_3"]["forwards"] <= result["synchronous_3"]["forwards"]
    assert result["fused_3"]["forwards"] < result["fdfo_3"]["forwards"]
    assert result["fdfo_3"]["block_passes"] < result["synchronous_3"]["block_passes"]
    for name in ("forwards_ratio", "fused_forwards_ratio", "wall_ratio", "inplace_ratio"):
        assert result[f"{name}_3"] == checks[f"{name}_3"]["value"] > 0
    assert checks["accuracy_change_3"]["holds"]
    assert result["overlap_ratio_3"] > 0
    assert result["share_fused_commit_3"]["forwards_ratio"] > 1
    assert result["share_report_at_once_3"]["forwards_ratio"] == 1
    assert result["overlap_ratio_unqueued_3"] > 0
    assert result["long_prompt_forwards_ratio_3"] > 1
    assert result["long_prompt_share_mixed_rounds_3"]["forwards_ratio"] > 1
    assert result["long_prompt_share_skip_unread_3"]["forwards_ratio"] == 1
    assert "long_prompt_wall_ratio" in checks


def test_counts_of_three_eight_and_two_passes() -> None:
    requests = [CountedRequest(prompt_blocks=0, passes=(number,)) for number in (3, 8, 2)]
    assert count_joined(requests, 3) == 8
    assert count_joined(requests, 1) == 13
    assert count_separate(requests, 3, synchronous=True) == 8
    assert count_separate(requests, 2, synchronous=True) == 10
    assert count_separate(requests, 2, synchronous=False) == 8
    long = [CountedRequest(prompt_blocks=4, passes=(3, 3)) for _ in range(2)]
    assert count_separate(long, 2, synchronous=True) == 7


def test_replayed_rounds(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--device", "cpu", "--cpu-threads", "1", "--load-format", "dummy")
    load = ("--running", "3", "--pairs", "1", "--num-questions", "9", "--kv-cache-tokens", "8192")
    argv = ("fdfo", "--model", str(model), *where, *load, "--replay-rounds", "1:5,3:2,9:1")
    assert main((*argv, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["weights"] == "random"
    assert result["replayed_rounds"] == {"1": 5, "3": 2, "9": 1}
    assert all(check["holds"] for check in result["checks"])
    assert len(result["checks"]) == 4
    assert result["forwards_ratio_3"] > 1


def test_requests_of_a_replay() -> None:
    prompts, rounds = replayed_requests({2: 3, 16: 1}, 16, 40)
    assert {len(prompt) % 16 for prompt in prompts} == {0, 14}
    assert [(-len(prompt)) % 16 or 16 for prompt in prompts] == rounds
    assert rounds_of_blocks("") == {}
    for wrong in ("3", "a:1", "0:1", "1:2:3"):
        with pytest.raises(ValueError, match="--replay-rounds"):
            rounds_of_blocks(wrong)
    with pytest.raises(ValueError, match="must be at most 16"):
        replayed_requests({17: 1}, 16, 4)


def test_options_are_checked() -> None:
    config = EngineConfig.of(model="m")
    with pytest.raises(ValueError, match="--pairs"):
        FdfoOptions(engine=config, pairs=0)
    with pytest.raises(ValueError, match="--long-prompt-blocks"):
        FdfoOptions(engine=config, long_prompt_blocks=2)
    with pytest.raises(ValueError, match="--kinds"):
        FdfoOptions(engine=config, kinds=("short",))


def test_models_of_one_world_share_their_questions() -> None:
    assert questions_of(str(DEMO)) == DEMO.with_name("demo_heldout.jsonl")
    assert questions_of(str(DEMO.with_name("demo-diffusion"))) == DEMO.with_name(
        "demo_heldout.jsonl"
    )
    assert questions_of("some/model") == Path("some/model_heldout.jsonl")
