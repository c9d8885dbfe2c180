"""Errors of the command line have two lines, with a suggestion."""

from __future__ import annotations

import re

import pytest

from cluster.bench.cli import main as bench
from cluster.cli.main import COMMANDS, build_parser
from cluster.cli.serve import COMMON
from cluster.config import UNSUPPORTED


@pytest.mark.parametrize(
    ("line", "usage", "mistake"),
    [
        (
            "serve some/model --max-model-length 4096",
            "rayfleet serve [FLAGS] [model]",
            "unknown flag --max-model-length (did you mean --max-model-len?)",
        ),
        (
            "serve some/model --max_num_seqs=8",
            "rayfleet serve [FLAGS] [model]",
            "unknown flag --max_num_seqs (did you mean --max-num-seqs?)",
        ),
        (
            "bench serve --json --number-prompts 8",
            "rayfleet bench serve [FLAGS]",
            "unknown flag --number-prompts (did you mean --num-prompts?)",
        ),
        ("doctor --prot 9000", "rayfleet doctor [FLAGS]", "--prot (did you mean --port?)"),
        ("doctor http://x:8000", "rayfleet doctor [FLAGS]", "use `rayfleet top --url URL`)"),
        ("doctor --url http://x", "rayfleet doctor [FLAGS]", "use `rayfleet top --url URL`)"),
        ("doctor some/model", "rayfleet doctor [FLAGS]", "(did you mean --model some/model?)"),
        ("serve --num-worker 2", "rayfleet serve", "--num-worker (did you mean --num-workers?)"),
        ("serve --max-num-s=2", "rayfleet serve", "--max-num-s (did you mean --max-num-seqs?)"),
        ("serve -t 2", "rayfleet serve", "unknown flag -t (did you mean -tp?)"),
        ("serve -tp2", "rayfleet serve", "unknown flag -tp2 (did you mean -tp?)"),
        ("chat --temp 0", "rayfleet chat", "--temp (did you mean --temperature?)"),
        (
            "serve --fair-by=key",
            "rayfleet serve",
            "unknown flag --fair-by (now --fairness-key)",
        ),
        ("serve --salt-by key", "rayfleet serve", "--salt-by (now --cache-isolation)"),
        (
            "serve --worker-wait-s 9",
            "rayfleet serve",
            "(now in --routing-config '{\"no_worker_timeout_s\": ...}')",
        ),
        (
            "serve --no-dllm-fdfo",
            "rayfleet serve",
            "(now in --dllm-config '{\"dllm_fdfo\": ...}')",
        ),
        (
            "serve --no-speculative-adaptive",
            "rayfleet serve",
            "(now in --speculative-config '{\"speculative_adaptive\": ...}')",
        ),
        (
            "serve --speculative-deadline-margin-ms 9",
            "rayfleet serve",
            "(now in --scheduler-config '{\"deadline_margin_ms\": ...}')",
        ),
        ("serve --adaptive-window-s 3", "rayfleet serve", "(removed: routing derives it"),
        (
            'serve --routing-config {"decision_log_mb":3}',
            "rayfleet serve",
            "unknown key 'decision_log_mb' (did you mean decision_log_mib?)",
        ),
        (
            'serve --scheduler-config {"prefill_max_ms":25}',
            "rayfleet serve",
            "unknown key 'prefill_max_ms' (replaced by default_tpot_ms, the time per token",
        ),
        (
            'serve --scheduler-config {"urgent_first_steps":"x"}',
            "rayfleet serve",
            "urgent_first_steps: Expected `int`, got `str`",
        ),
        ("serve --dllm-config [1]", "rayfleet serve", "not a JSON object: [1]"),
        ("serve --dllm-config {", "rayfleet serve", "not valid JSON: "),
        ("serve --hurry", "rayfleet serve [FLAGS] [model]", "unknown flag --hurry"),
        (
            "serve one/model another",
            "rayfleet serve [FLAGS] [model]",
            "unexpected argument: another",
        ),
        ("serve --dtype f8", "rayfleet serve [FLAGS] [model]", "invalid choice: 'f8'"),
        ("sreve", "rayfleet [FLAGS] COMMAND ...", "invalid choice: 'sreve'"),
    ],
)
def test_errors_have_two_lines(
    line: str, usage: str, mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args(line.split())
    assert exit_.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"usage: {usage} ")
    assert mistake in second
    assert second.startswith(usage.partition(" [")[0])


def listed_flags(topic: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args(["serve", topic])
    assert exit_.value.code == 0
    return set(re.findall(r"^  (-[-\w]+)", capsys.readouterr().out, re.MULTILINE))


def test_serve_has_at_most_85_options_and_lists_the_26_most_common(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = listed_flags("--help=all", capsys)
    shown = listed_flags("--help", capsys)
    assert len(everything) <= 85
    assert shown == COMMON
    assert len(shown) == 26
    assert shown < everything
    groups = (
        *("endpoint", "access", "tenants", "fleet", "chat", "autoscaling", "routing", "engine"),
        *("scheduling", "cache", "speculative", "dllm", "pooling", "lora", "execution"),
    )
    by_group = [listed_flags(f"--help={group}", capsys) for group in groups]
    assert set().union(*by_group) == everything - {"-h", "--config", "--address"}
    assert sum(map(len, by_group)) == len(set().union(*by_group))


def test_help_on_an_unknown_group_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args(["serve", "--help=fleets"])
    assert exit_.value.code == 2
    assert "choose from all, endpoint, access" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--trust-remote-code", "code of checkpoints is never executed"),
        ("--ssl-ca-certs=a.pem", "client certificates are not supported"),
        ("-dp=2", "use --num-workers"),
        ("--pipeline-parallel-size=2", "use --tensor-parallel-size"),
        ("--enable-auto-tool-choice", "always enabled"),
        ("--scheduling-policy=priority", "use --schedule-policy"),
        ("--swap-space=4", "use --host-cache-gib"),
    ],
)
def test_flags_of_other_servers_are_rejected_with_the_reason(
    flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args(["serve", "some/model", flag])
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_unsupported_flags_name_existing_flags(capsys: pytest.CaptureFixture[str]) -> None:
    known = listed_flags("--help=all", capsys)
    reasons = " ".join(UNSUPPORTED.values())
    assert set(re.findall(r"--[a-z][a-z-]+", reasons)) <= known
    assert {"--" + name.replace("_", "-") for name in UNSUPPORTED}.isdisjoint(known)


def test_errors_of_the_benchmarks_module_have_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(["serve", "--number-prompts", "8"])
    assert "did you mean --num-prompts?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*COMMANDS, "bench serve", "bench compare a b"])
def test_flags_cannot_be_abbreviated(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each flag without its last letter is unknown, and the flag itself is suggested."""
    topic = "--help=all" if command == "serve" else "--help"
    with pytest.raises(SystemExit):
        build_parser().parse_args([*command.split(), topic])
    lines = re.findall(r"^  (-.*)", capsys.readouterr().out, re.MULTILINE)
    flags = {flag for line in lines for flag in re.findall(r"(?:^|, )(--?[a-z][-a-z]+)", line)}
    for flag in flags - {"--help"}:
        with pytest.raises(SystemExit) as exit_:
            build_parser().parse_args([*command.split(), flag[:-1], "1"])
        assert exit_.value.code == 2
        assert f"unknown flag {flag[:-1]} (did you mean -" in capsys.readouterr().err
