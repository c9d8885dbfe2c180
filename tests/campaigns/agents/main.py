"""`make check-agents`: many runs of client libraries' tool loops against the demo model.

OpenAI's official client (chats with and without streaming, responses), Anthropic's official client
and LangChain's agent send questions, run the calls that the model generates, and return the
results. In every second run, the first response is forced to be a call. The model's answers may be
wrong, but the protocol must not be violated.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.bench.report import Check, Result, at_least, checks_json, exactly, note
from cluster.config import find_demo_model
from cluster.launch import LocalFleet
from tests.campaigns.agents.loops import LOOPS, Loop
from tests.campaigns.agents.model import model_with_tools, supports_tools
from tests.campaigns.agents.world import Question, Run, random_question
from tests.campaigns.checks import check_main, serve_config

MODEL = "demo"
_SHOWN_FAULTS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentsOptions:
    """Model and number of runs."""

    model: str | None = None
    """Checkpoint folder; default: the demo model."""
    num_runs: int = 50
    """Number of runs per loop."""
    min_right: float = 0.85
    """Minimum fraction of unforced runs that make exactly the required calls; checked only if the
    model's own chat template supports tools."""
    seed: int = 0
    """Random seed of the questions."""

    def __post_init__(self) -> None:
        if self.num_runs < 2:
            raise ValueError(f"--num-runs must be at least 2, got {self.num_runs}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One run of a loop."""

    question: Question
    is_forced: bool
    run: Run

    @property
    def is_right(self) -> bool:
        """Whether the run made the required calls and ended with an answer."""
        return self.run.answer is not None and self.run.calls == list(self.question.calls)


def run_agents(options: AgentsOptions) -> Result:
    """Starts a fleet with one worker and runs the loops in sequence."""
    with tempfile.TemporaryDirectory() as directory:
        model = str(model_with_tools(options.model, Path(directory)))
        config = serve_config(MODEL, model, max_num_seqs=4, kv_cache_tokens=8192)
        with LocalFleet(config, report=note) as fleet:
            played = {
                name: _play(loop, fleet.base_url, random.Random(options.seed), options.num_runs)
                for name, loop in LOOPS.items()
            }
    is_taught = supports_tools(Path(options.model or find_demo_model()))
    min_right = options.min_right if is_taught else None
    faults = [
        f"{name}: {f}" for name, runs in played.items() for one in runs for f in one.run.faults
    ]
    return {
        "faults": faults[:_SHOWN_FAULTS],
        "checks": checks_json(judge(played, min_right=min_right)),
    }


def judge(played: Mapping[str, Sequence[Played]], *, min_right: float | None) -> list[Check]:
    """Checks of all runs. `right` is not checked if the model was not trained on tool calls
    (None)."""
    checks = []
    for name, runs in played.items():
        free = [one for one in runs if not one.is_forced]
        forced = [one for one in runs if one.is_forced]
        right = sum(one.is_right for one in free) / max(1, len(free))
        checks += [
            exactly(f"{name}_faults", sum(len(one.run.faults) for one in runs), "errors", 0),
            exactly(
                f"{name}_forced_without_a_call",
                sum(not one.run.calls and one.run.answer is not None for one in forced),
                "runs",
                0,
            ),
        ]
        if min_right is not None:
            checks.append(at_least(f"{name}_right", right, "share", min_right))
    return checks


def _play(loop: Loop, base_url: str, rng: random.Random, num_runs: int) -> list[Played]:
    played = []
    for number in range(num_runs):
        question = random_question(rng)
        is_forced = number % 2 == 1
        try:
            run = loop(base_url, MODEL, question.question, is_forced)
        except Exception as error:  # any type: each counts as a protocol error
            run = Run(faults=[f"{type(error).__name__}: {error}"])
        played.append(Played(question=question, is_forced=is_forced, run=run))
    return played


if __name__ == "__main__":
    sys.exit(check_main(run_agents, AgentsOptions))
