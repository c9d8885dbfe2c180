"""`make head-inputs MODEL=folder`: finds out whether an MTP head reads the model's hidden states
before or after the final norm. For developers who add a head.

With the wrong hidden states, a head runs without an error, but its drafts are accepted less often:
the head's own norm removes their scale, but not the weights of the final norm. This command tries
both at each position of a text, and compares the head's most probable token with the model's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.engines.engine_driver import Engine
from tests.support.paths import ROOT
from worker.models.layers.context import ForwardContext
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer
from worker.rank.batch import Batch
from worker.rank.speculation.heads import HeadProposer, _unpadded
from worker.rank.verification import AcceptedTokens

CHUNK = 512
"""Number of tokens per step."""
DECISIVE = 0.03
"""Minimum difference in acceptance that decides: three standard errors for 1,000 positions, of
which one in ten differs."""


class HeadInputs(NamedTuple):
    """Fraction of the positions at which the head predicts the model's most probable token."""

    after_norm: float
    before_norm: float
    num_positions: int

    def __str__(self) -> str:
        shares = f"after the final norm {self.after_norm:.3f}, before {self.before_norm:.3f}"
        difference, verdict = self.after_norm - self.before_norm, "not decided: use a longer text"
        if abs(difference) >= DECISIVE:
            verdict = f"it reads those {'after' if difference > 0 else 'before'} the norm"
        return f"acceptance of {self.num_positions} greedy drafts: {shares}; {verdict}"


class _Recorder:
    """Replacement for a proposer's `follow` that counts correct predictions."""

    def __init__(self, heads: HeadProposer) -> None:
        self._heads, model = heads, heads._model
        self._before: torch.Tensor | None = None
        self.right, self.num_positions = [0, 0], 0
        run_layers = model.run_layers

        def recorded(
            hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            hidden, residual = run_layers(hidden, positions, ctx)
            self._before = hidden.clone() if residual is None else hidden + residual
            return hidden, residual

        model.run_layers = recorded  # type: ignore[method-assign]

    def follow(self, batch: Batch, hidden: torch.Tensor, accepted: AcceptedTokens | None) -> None:
        """Counts correct predictions for the prompts of a batch. At position i, the head reads
        token i + 1 and predicts the token that the model predicts at i + 1."""
        heads, before = self._heads, self._before
        assert before is not None, "the model runs in torch"
        rows = _unpadded(batch, heads._tables)
        lengths = rows.rows[:, 2].tolist()
        own = _best(heads._model.compute_logits(hidden)).split(lengths)
        for kind, states in enumerate((hidden, before)):
            step, head = heads._gather(rows), heads._heads[0]
            outputs = heads._run(head, step, states.to(heads._outputs.dtype))
            logits = head.compute_logits(outputs, heads._model.compute_logits)
            pairs = zip(_best(logits).split(lengths), own, strict=True)
            self.right[kind] += sum(int((guess[:-1] == one[1:]).sum()) for guess, one in pairs)
        self.num_positions += sum(length - 1 for length in lengths)


def _best(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@torch.inference_mode()
def head_inputs(model: str, texts: Sequence[Sequence[int]], **options: Any) -> HeadInputs:
    """Compares both inputs of a checkpoint's head.

    Args:
        model: folder or Hub repository of the checkpoint.
        texts: token ids of each text, at least 2.
        options: options of the engine, as in EngineConfig.
    """
    fixed = {"cpu_backend": "torch", "enforce_eager": True, "enable_prefix_caching": False}
    fixed |= {"speculative_method": "mtp", "max_num_batched_tokens": CHUNK}
    last = SamplingParams(temperature=0.0, max_tokens=1)
    with Engine(model, **{**fixed, **options}) as engine:
        heads = engine.runner._heads
        assert isinstance(heads, HeadProposer), "the head runs in torch"
        recorder = _Recorder(heads)
        heads.follow = recorder.follow  # type: ignore[method-assign]
        for text in texts:
            for start in range(0, len(text), CHUNK):
                engine.generate([text[start : start + CHUNK]], last)
    after, before = (count / recorder.num_positions for count in recorder.right)
    return HeadInputs(after, before, recorder.num_positions)


def main() -> None:
    """Prints the acceptance with both inputs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="folder or Hub repository of the checkpoint")
    parser.add_argument("--text", type=Path, default=ROOT / "CONTRIBUTING.md", help="a text file")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="maximum number of tokens to use from the text"
    )
    parser.add_argument("--device", default="auto", help="same as in rayfleet serve")
    parser.add_argument("--dtype", default="auto", help="same as in rayfleet serve")
    options = parser.parse_args()
    tokens = load_tokenizer(options.model).encode(options.text.read_text(), add_special_tokens=True)
    print(
        head_inputs(
            *(options.model, [tokens[: options.tokens]]),
            **{"device": options.device, "dtype": options.dtype, "cpu_threads": 0},
        )
    )


if __name__ == "__main__":
    main()
