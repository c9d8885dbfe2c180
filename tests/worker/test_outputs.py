"""Outputs of `LLM`, built from the engine's deltas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.router.sentencepiece import DECODERS, build_sentencepiece
from worker.outputs import ChoiceState
from worker.protocol.messages import Submit, TokenDelta
from worker.protocol.sampling import SamplingParams
from worker.protocol.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_the_first_word_keeps_its_space(
    tmp_path: Path, kind: str, skip_special_tokens: bool
) -> None:
    build_sentencepiece(tmp_path, kind)
    tokenizer = load_tokenizer(str(tmp_path))
    prompt = "The capital of France is"
    token_ids = tokenizer.encode(prompt)
    answer = tokenizer.encode(prompt + " Paris.")[len(token_ids) :]
    submit = Submit(
        request_id="0",
        gateway_id="",
        prompt=np.asarray(token_ids, "<i4").tobytes(),
        sampling=SamplingParams(skip_special_tokens=skip_special_tokens),
        seed=0,
    )
    state = ChoiceState(submit, 0, tokenizer)
    state.apply(TokenDelta("0", 0, answer[:1]))
    assert state.output.text == " Paris"
    state.apply(TokenDelta("0", 0, answer[1:], "length"))
    assert state.output.text == " Paris."
