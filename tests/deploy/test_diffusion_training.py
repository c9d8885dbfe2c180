"""Training rows of the block-diffusion model match its inputs in serving."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from deploy.models.diffusion_batches import DiffusionBatch, diffusion_batches
from deploy.models.tokenizer import MASK, TURN_END
from tests.support.paths import DEMO

SIZE = 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    loaded.add_special_tokens([AddedToken(MASK, special=True)])
    return loaded


@pytest.fixture(scope="module")
def batches(tokenizer: Tokenizer) -> list[DiffusionBatch]:
    return list(islice(diffusion_batches(Random(3), tokenizer, 700, 200, SIZE), 6))


def test_a_noisy_copy_sees_what_a_running_block_sees(
    batches: list[DiffusionBatch], tokenizer: Tokenizer
) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    num_checked = 0
    for batch in batches:
        with torch.inference_mode():
            together = model(
                batch.input_ids,
                position_ids=batch.positions,
                attention_mask={"full_attention": batch.visible},
            ).logits
        row = 0
        blocks = batch.positions[row] // SIZE
        for start in _copies(batch, row):
            first = int(batch.positions[row, start])
            ids = torch.cat((batch.input_ids[row, :first], batch.input_ids[row, start : start + 8]))
            own = torch.arange(len(ids)) // SIZE
            mask = (own[:, None] >= own[None, :])[None, None]
            with torch.inference_mode():
                alone = model(ids[None], attention_mask={"full_attention": mask}).logits[0, -SIZE:]
            found = together[row, start : start + SIZE]
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=0)
            num_checked += 1
        assert len(blocks) == batch.input_ids.shape[1]
    assert num_checked > 6


def test_targets_are_answers_up_to_the_end_of_their_block(
    batches: list[DiffusionBatch], tokenizer: Tokenizer
) -> None:
    mask, end = tokenizer.token_to_id(MASK), tokenizer.token_to_id(TURN_END)
    num_ends = 0
    for batch in batches:
        assert batch.num_targets == int((batch.input_ids == mask).sum())
        assert torch.equal(batch.is_masked, batch.input_ids == mask)
        for row in range(len(batch.input_ids)):
            for start in _copies(batch, row):
                labels = batch.labels[row, start : start + SIZE].tolist()
                if end in labels and labels[-1] == end:
                    num_ends += labels.count(end)
    assert num_ends > 10


def _copies(batch: DiffusionBatch, row: int) -> list[int]:
    """Starts of noisy copies: blocks with a mask, after the clean tokens."""
    positions = batch.positions[row]
    clean = int((positions == torch.arange(len(positions))).long().cumprod(0).sum())
    masked = batch.is_masked[row].nonzero().flatten().tolist()
    return sorted({clean + (place - clean) // SIZE * SIZE for place in masked})
