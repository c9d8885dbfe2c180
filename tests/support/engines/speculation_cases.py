"""Engines that draft under all conditions, and requests whose outcomes must not depend on
drafts."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.paths import MODELS
from worker.core.request import Request
from worker.core.scheduler.speculation_gate import SpeculationGate
from worker.protocol.sampling import SamplingParams
from worker.protocol.slo import Slo
from worker.protocol.step_time import StepCosts
from worker.protocol.structured import StructuredOutputsParams
from worker.protocol.text.tokenizer import load_tokenizer

MODEL = str(MODELS / "demo")
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "speculative_adaptive": False}
DRAFT: dict[str, Any] = {**NGRAM, "speculative_method": "draft", "speculative_model": MODEL}
"""Options with which the model is its own draft model: without logits processors, all drafts are
accepted."""
PATTERN = "(ab|cd ){2,9}x"
SCHEMA = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 5}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.95, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0.0, "presence_penalty": 0.7, "logprobs": 3},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": {40: 1.5, 17: -2.0}, "logprobs": 1},
    {"temperature": 1.3, "top_p": 0.9, "min_tokens": 30, "prompt_logprobs": 1},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex=PATTERN)},
    {
        "temperature": 0.7,
        "frequency_penalty": 0.3,
        "logprobs": 2,
        "structured_outputs": StructuredOutputsParams(json=SCHEMA),
    },
    {"temperature": 0.7, "top_k": 20, "stop_token_ids": (17, 300), "bad_words_token_ids": ((40,),)},
]


class RandomGate(SpeculationGate):
    """Gate that chooses random numbers of drafts."""

    random = random.Random(5)
    is_open = True

    def num_drafts(self, request: Request) -> int:
        most = self.config.num_speculative_tokens
        return self.random.choice((0, 0, self.random.randint(0, most)))


class TimedGate(SpeculationGate):
    """Gate with fixed costs at which drafts are worthwhile; measured costs could keep it closed on
    a busy machine."""

    costs = StepCosts(
        constant=1e-3,
        prefill_token=1e-5,
        attended=0.0,
        decode_row=2e-5,
        context_token=0.0,
        draft_row=1e-5,
        draft_token=1e-5,
    )

    def begin_step(
        self, num_running: int, num_decodes: int, now: float, costs: StepCosts | None
    ) -> float:
        known_costs = None if costs is None else self.costs
        return super().begin_step(num_running, num_decodes, now, known_costs)


class SpeculatingEngine(Engine):
    """An engine with a RandomGate if `at_random`, else with a TimedGate if adaptive."""

    def __init__(self, *, at_random: bool = False, **options: Any) -> None:
        super().__init__(MODEL, batch_invariant=True, max_model_len=1024, **options)
        gate = self.core.scheduler.steps.speculation
        if gate is not None and (at_random or gate.config.adaptive):
            kind = RandomGate if at_random else TimedGate
            own = kind(gate.config, self.config.scheduling, stops_itself=gate.stops_itself)
            self.core.scheduler.steps.speculation = own

    @property
    def num_drafted(self) -> int:
        return self._gate.totals.num_draft_tokens

    @property
    def num_accepted(self) -> int:
        return self._gate.totals.num_accepted_tokens

    @property
    def _gate(self) -> SpeculationGate:
        gate = self.core.scheduler.steps.speculation
        assert gate is not None
        return gate


def prompts(count: int) -> list[list[int]]:
    """Held-out questions and texts to copy, in a ratio of two to one; at most 300."""
    tokenizer = load_tokenizer(MODEL)
    rows = [json.loads(line) for line in (MODELS / "demo_heldout.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    chats: list[list[dict[str, str]]] = []
    for number, row in enumerate(rows):
        chats.append(row["messages"])
        if number % 2:
            text = " ".join(answers[number // 2 : number // 2 + 5])
            chats.append([{"role": "user", "content": f"Repeat exactly: {text}"}])
    return [
        tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False)
        for chat in chats[:count]
    ]


def settings(count: int) -> list[SamplingParams]:
    """Sampling parameters that cycle through all kinds."""
    return [
        SamplingParams(
            seed=i, max_tokens=50 + i % 3, ignore_eos=i % 3 == 0, **SETTINGS[i % len(SETTINGS)]
        )
        for i in range(count)
    ]


def run_in_waves(
    engine: Engine, texts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> list[Outcome]:
    """Runs requests that arrive while others decode; priorities and deadlines differ."""
    waiting = deque(enumerate(zip(texts, sampling, strict=True)))
    outputs: dict[str, Outcome] = {}
    slos = (None, Slo(ttft_ms=200, tpot_ms=20), Slo(e2e_ms=500))
    while waiting or engine.core.has_work() or engine.core.grammars.num_due:
        for _ in range(min(len(waiting), 2)):
            number, (text, one) = waiting.popleft()
            options = {"priority": number % 10, "slo": slos[number % 3]}
            request_id, outcome = engine.submit(text, one, **options)
            outputs[request_id] = outcome
        while engine.core.grammars.num_due:
            engine.core.take_grammars(wait=True)
        engine.step(outputs)
    return list(outputs.values())


def check_grammars(outcomes: Sequence[Outcome]) -> int:
    """Checks that outputs which ended under a grammar match it; returns their number."""
    tokenizer = load_tokenizer(MODEL)
    checked = 0
    for number, outcome in enumerate(outcomes):
        assert outcome.error is None
        if "structured_outputs" not in SETTINGS[number % len(SETTINGS)]:
            continue
        if outcome.finish_reason != "stop":
            continue
        text = tokenizer.decode(outcome.token_ids, skip_special_tokens=True)
        if number % len(SETTINGS) == 6:
            assert re.fullmatch(PATTERN, text), text
        else:
            items = json.loads(text)
            assert 2 <= len(items) <= 5, text
            assert set(items) <= {"red", "blue"}, text
        checked += 1
    return checked
