"""Acceptance rate of a draft model: ``python -m deploy.models.evaluate_draft``.

The model answers held-out questions greedily. For each token of its answers, the model and the
draft model sample with the same noise, as in speculative decoding.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from cluster.cli.parser import CommandParser
from deploy.models.corpus import Question, questions_path, read_questions, tool_questions_path
from deploy.models.evaluate import answers

_TEMPERATURES: Final = (0.0, 0.7, 1.3)


def main() -> None:
    """Prints the fraction of tokens for which both models sample the same one, by family and
    temperature."""
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.evaluate_draft")
    parser.add_argument("--model", type=Path, default=Path("deploy/models/demo"))
    parser.add_argument("--draft", type=Path, default=Path("deploy/models/demo-draft"))
    args = parser.parse_args()
    questions = [
        *read_questions(questions_path(args.model)),
        *read_questions(tool_questions_path(args.model)),
    ]
    print(f"{'family':12}", *(f"{temperature:6}" for temperature in _TEMPERATURES))
    for family, rates in acceptance_by_family(args.model, args.draft, questions).items():
        print(f"{family:12}", *(f"{rate:6.3f}" for rate in rates))


def acceptance_by_family(
    model: Path, draft: Path, questions: list[Question]
) -> dict[str, list[float]]:
    """Fraction of tokens for which both models sample the same one at each temperature, keyed by
    family; the key ``overall`` has all families."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    # No transformers class satisfies the protocol that types `generate`.
    pair: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, draft)
    ]
    equal: dict[str, list[torch.Tensor]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)
    for question, given in zip(questions, answers(model, questions), strict=True):
        found = _equal_draws(pair, tokenizer, question, given, generator)
        equal[question.family].append(found)
        equal["overall"].append(found)
    return {
        family: torch.cat(found, dim=1).float().mean(dim=1).tolist()
        for family, found in equal.items()
    }


def _equal_draws(
    pair: list[Any],
    tokenizer: PreTrainedTokenizerFast,
    question: Question,
    given: str,
    generator: torch.Generator,
) -> torch.Tensor:
    """Whether both models sample the same token, bool [temperatures, tokens of the answer]."""
    prompt = tokenizer.apply_chat_template(
        list(question.messages),
        tools=list(question.tools) or None,
        add_generation_prompt=True,
        tokenize=False,
    )
    length = len(tokenizer(prompt)["input_ids"])
    tokens = tokenizer(f"{prompt}{given}{tokenizer.eos_token}", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = [model(tokens).logits[0, length - 1 : -1] for model in pair]
    noise = -torch.empty_like(logits[0]).exponential_(generator=generator).log()
    samples = [
        [(values + temperature * noise).argmax(dim=-1) for temperature in _TEMPERATURES]
        for values in logits
    ]
    return torch.stack([a == b for a, b in zip(*samples, strict=True)])


if __name__ == "__main__":
    main()
