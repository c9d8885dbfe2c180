"""Accuracy and rounds of a block-diffusion model, served by rayfleet's engine.

``python -m deploy.models.evaluate_diffusion DIRECTORY`` uses the held-out questions next to
DIRECTORY.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cluster.cli.parser import CommandParser
from deploy.models.corpus import Question, read_questions
from worker.llm import LLM, SamplingParams

_MAX_NEW_TOKENS: Final = 256


@dataclass(kw_only=True, slots=True)
class FamilyResult:
    """Results on the questions of one family."""

    right: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0

    @property
    def accuracy(self) -> float:
        """Fraction of exactly correct answers."""
        return sum(self.right) / len(self.right)

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens decided per round."""
        return self.num_tokens / max(1, self.num_rounds)


def main() -> None:
    """Prints accuracy and tokens per round by family."""
    parser = CommandParser(description=__doc__, prog="python -m deploy.models.evaluate_diffusion")
    parser.add_argument(
        "directory", type=Path, help="checkpoint folder; its questions must be next to it"
    )
    directory = parser.parse_args().directory
    path = directory.with_name(f"{directory.name}_heldout.jsonl")
    if not path.is_file():
        path = directory.with_name("demo_heldout.jsonl")
    questions = read_questions(path)
    for family, result in evaluate(directory, questions).items():
        print(f"{family:12} {result.accuracy:.3f} {result.tokens_per_round:6.2f} tokens per round")


def evaluate(directory: Path, questions: list[Question]) -> dict[str, FamilyResult]:
    """Results of greedy answers by family, and ``overall``."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_MAX_NEW_TOKENS)
    results: dict[str, FamilyResult] = defaultdict(FamilyResult)
    with LLM(str(directory), device="cpu") as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.render_chat(list(question.messages)) for question in questions]
        outputs = llm.generate(prompts, sampling)
    for question, output in zip(questions, outputs, strict=True):
        choice = output.outputs[0]
        for family in (question.family, "overall"):
            results[family].right.append(choice.text == question.answer)
            results[family].num_tokens += len(choice.token_ids)
            results[family].num_rounds += choice.num_rounds
    return dict(results)


if __name__ == "__main__":
    main()
