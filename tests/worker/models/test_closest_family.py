"""The closest family of a class of transformers is found, with what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints.closest_family import closest_families
from tests.support.checkpoints.specimen import Specimen

GRANITE = Specimen(name="Granite", settings={"residual_multiplier": 0.5, "logits_scaling": 2.0})


def test_the_family_with_equal_logits_comes_first(tmp_path: Path) -> None:
    names = ("LlamaForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM")
    granite, llama, olmo = closest_families(GRANITE, tmp_path, names)
    assert (granite.family, granite.rejected, granite.is_equal) == (names[2], [], True)
    assert granite.first_layer == ""
    assert {"logits_scaling", "residual_multiplier"} <= set(llama.rejected)
    assert not llama.is_equal
    assert llama.first_layer == "layer 0"
    assert "model.layers.*.self_attn.q_norm.weight" in str(olmo)


@pytest.mark.long
def test_every_family_can_be_tried(tmp_path: Path) -> None:
    attempts = closest_families(GRANITE, tmp_path)
    assert attempts[0].family == "GraniteForCausalLM"
    assert all(attempt.problem or attempt.missing for attempt in attempts[-3:])
