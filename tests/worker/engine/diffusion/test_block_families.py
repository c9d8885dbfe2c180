"""Every block-diffusion family generates the tokens and rounds of a reference in all modes; each of
its features, broken on purpose, changes the logits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.blocks import BLOCK_SPECIMENS, BlockCheckpoint, write_blocks
from tests.support.checkpoints.moe import LLADA2, LLADA2_2, MASK, SDAR_MOE, write_moe
from tests.support.checkpoints.mutations import broken
from tests.support.engines.block_engine import BlockEngine, BlockOutput
from tests.support.engines.block_oracle import Answer, Terms, answer
from tests.support.engines.block_requests import of_each_algorithm
from tests.support.engines.guided_engine import EOS, VOCAB_SIZE, GuidedEngine, text_of
from worker.models.architectures.decoder import DecoderModel
from worker.models.config.model_config import load_model_config
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

MOE_FAMILIES = ("SDARMoeForCausalLM", "LLaDA2MoeModelLM")
THRESHOLD = 0.25
FOUND = 1e-2
"""Minimum difference of logits (about 5 in size) that counts as detected."""


@dataclass(frozen=True)
class Case:
    checkpoint: BlockCheckpoint
    prompts: list[list[int]]
    expected: list[Answer]

    def serve(self, times: int = 1, **options: object) -> list[list[BlockOutput]]:
        """Outputs of an engine for all prompts at once, repeated as given."""
        with self.engine(**options) as engine:
            return [engine.serve(self.prompts, self.sampling()) for _ in range(times)]

    def engine(self, **options: object) -> BlockEngine:
        settings = {"kv_cache_tokens": 512, "dllm_disable": ("early_exit",), **options}
        folder = str(self.checkpoint.folder)
        return BlockEngine(folder, dllm_threshold=THRESHOLD, **settings)

    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=2 * self.checkpoint.block_size)

    def check(self, found: list[BlockOutput]) -> None:
        assert [one.token_ids for one in found] == [one.token_ids for one in self.expected]
        assert [one.rounds for one in found] == [one.rounds for one in self.expected]


@pytest.fixture(scope="module", params=BLOCK_SPECIMENS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    checkpoint = write_blocks(request.param, Path(tmp_path_factory.mktemp(request.param)))
    size, specimen = checkpoint.block_size, checkpoint.specimen
    prompts = [[7, 3, 50], list(range(10, 10 + 2 * size)), [specimen.mask, *range(40, 45 + size)]]
    expected = [
        answer(
            *(checkpoint.logits, prompt),
            block_size=size,
            mask=specimen.mask,
            max_tokens=2 * size,
            terms=Terms(threshold=THRESHOLD),
            ends=specimen.ends,
        )
        for prompt in prompts
    ]
    assert min(one.margin for one in expected) > 1e-5, "choose other prompts"
    return Case(checkpoint, prompts, expected)


@pytest.mark.checks(
    "blocks", "batched", of=BLOCK_SPECIMENS, against="independent reference and uncached decoding"
)
@pytest.mark.parametrize("is_invariant", [False, True])
def test_batched(case: Case, is_invariant: bool) -> None:
    (found,) = case.serve(batch_invariant=is_invariant)
    case.check(found)


@pytest.mark.checks(
    "TP 2", of=BLOCK_SPECIMENS, against="independent reference and uncached decoding"
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in MOE_FAMILIES else pytest.mark.long)
        for name in BLOCK_SPECIMENS
    ],
    indirect=True,
)
def test_two_ranks(case: Case) -> None:
    (found,) = case.serve(tensor_parallel_size=2)
    case.check(found)


@pytest.mark.checks(
    "alone", of=BLOCK_SPECIMENS, against="independent reference and uncached decoding"
)
def test_alone(case: Case) -> None:
    with case.engine(enable_prefix_caching=False, overlap_depth=0) as engine:
        found = [engine.serve([prompt], case.sampling())[0] for prompt in case.prompts]
    case.check(found)


@pytest.mark.checks(
    "prefix hit", of=BLOCK_SPECIMENS, against="independent reference and uncached decoding"
)
def test_hitting_prefixes(case: Case) -> None:
    first, second = case.serve(times=2, page_size=case.checkpoint.block_size)
    case.check(first)
    case.check(second)
    assert max(one.num_cached for one in second) >= case.checkpoint.block_size


@pytest.mark.checks("mutations", of=BLOCK_SPECIMENS, against="independent reference")
def test_a_broken_feature_shows(case: Case, tmp_path: Path) -> None:
    checkpoint = case.checkpoint
    size, mask = checkpoint.block_size, checkpoint.specimen.mask
    prompt = list(range(10, 10 + 5 * size))
    expected = checkpoint.logits([*prompt, *[mask] * size])[-size:]
    expected[:, mask] = 0.0
    assert difference(checkpoint.folder, prompt, mask, expected) < 1e-4, "nothing is broken yet"
    unnoticed = []
    for feature, mutation in checkpoint.specimen.mutations.items():
        with broken(checkpoint.folder, mutation, tmp_path / feature) as folder:
            if difference(folder, prompt, mask, expected) < FOUND:
                unnoticed.append(feature)
    assert unnoticed == []


def difference(folder: Path, prompt: list[int], mask: int, expected: torch.Tensor) -> float:
    """Maximum difference of the logits of the block after a prompt, in its first round; infinite if
    weights are missing."""
    found: list[torch.Tensor] = []

    def compute_logits(self: DecoderModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(self, hidden)
        found.append(logits.clone())  # the caller changes decided ones
        return logits

    original = DecoderModel.compute_logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderModel, "compute_logits", compute_logits)
        try:
            with BlockEngine(str(folder), kv_cache_tokens=512, cpu_backend="torch") as engine:
                engine.serve([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        except ValueError as error:
            if "disagree" not in str(error):
                raise
            return math.inf
    logits = found[0].clone()
    logits[:, mask] = 0.0
    assert 0 < len(logits) <= len(expected)
    return (logits - expected[: len(logits)]).abs().max().item()


@pytest.mark.checks("chunks", "scarce", of=MOE_FAMILIES, against="requests alone")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SDAR_MOE, id="sdar_moe"),
        pytest.param(LLADA2, id="llada2_moe"),
    ],
)
@pytest.mark.long  # test_block_engine.py has the same without experts
def test_chunks_and_scarce_pages(config: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_moe(config, tmp_path)
    prompts = [list(range(5 + start, 45 + start)) for start in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    options = {"batch_invariant": True, "page_size": 8}
    with BlockEngine(checkpoint.folder, kv_cache_tokens=1024, **options) as engine:
        alone = [engine.serve([prompt], sampling)[0].token_ids for prompt in prompts]
    scarce = {"kv_cache_tokens": 128, "max_num_batched_tokens": 32}
    with BlockEngine(checkpoint.folder, **options, **scarce) as engine:
        found = [one.token_ids for one in engine.serve(prompts, sampling)]
        assert engine.num_preemptions > 0, "pages were not scarce"
    assert found == alone


def test_experts_of_a_block(tmp_path: Path) -> None:
    """Of LLaDA 2.2: no pass may leave out tokens of a block before its last experts are chosen."""
    plain = write_moe(LLADA2_2, tmp_path / "plain")
    checkpoint = BlockCheckpoint(
        folder=tmp_path / "plain", specimen=BLOCK_SPECIMENS["LLaDA2MoeModelLM"], plain=plain
    )
    size, terms = checkpoint.block_size, Terms(threshold=THRESHOLD)
    prompts = [[7, 3, 50], list(range(10, 10 + 2 * size))]
    expected = [
        answer(
            checkpoint.logits, prompt, block_size=size, mask=MASK, max_tokens=2 * size, terms=terms,
            ends=(2,),
        )
        for prompt in prompts
    ]  # fmt: skip
    assert min(one.margin for one in expected) > 1e-5, "choose other prompts"
    case = Case(checkpoint, prompts, expected)
    (found,) = case.serve(batch_invariant=True, dllm_fdfo=False)
    case.check(found)
    logits = checkpoint.logits([*prompts[1], *[MASK] * size])[-size:]
    logits[:, MASK] = 0.0
    assert difference(tmp_path / "plain", prompts[1], MASK, logits) < 1e-4
    for capacity in (3, 8):
        write_moe({**LLADA2_2, "expert_capacity": capacity}, tmp_path / str(capacity))
        assert difference(tmp_path / str(capacity), prompts[1], MASK, logits) > FOUND


@pytest.mark.long  # test_block_engine.py has two algorithms
def test_one_request_is_the_same_first_out_and_synchronous(tmp_path: Path) -> None:
    """Of every algorithm."""
    checkpoint = write_moe(LLADA2_2, tmp_path)
    found = []
    for fdfo in (True, False):
        with BlockEngine(checkpoint.folder, kv_cache_tokens=512, dllm_fdfo=fdfo) as engine:
            found.append([engine.serve([[7, 3, 50, 4, 9]], one)[0] for one in of_each_algorithm()])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_capacity": 2}, r"expert_capacity 2 in config\.json must be in \[3, 8\]"),
        ({"delete_token_id": 96}, "delete_token_id and split_token_id .* must be two tokens"),
        ({"norm_topk_prob": False}, "norm_topk_prob .* must be true if expert_capacity"),
    ],
)
def test_configurations_of_blocks_that_do_not_suit(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    checkpoint = write_moe({**LLADA2_2, **changes}, tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model_config(checkpoint.folder)


@pytest.mark.checks("grammar", of=MOE_FAMILIES, against="re")
@pytest.mark.parametrize("config", [SDAR_MOE, LLADA2], ids=["sdar_moe", "llada2_moe"])
def test_outputs_conform_to_their_grammars(config: dict[str, Any], tmp_path: Path) -> None:
    letters = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}
    checkpoint = write_moe({**config, **letters}, tmp_path)
    patterns = (r"\d{3}-\d{4}", "yes|no|maybe so", r"[a-z]{2,6}(, [a-z]{2,6}){2,5}\.")
    sampling = [
        SamplingParams(
            temperature=0.9 * (number // 3),
            seed=number,
            max_tokens=80,
            structured_outputs=StructuredOutputsParams(regex=patterns[number % 3]),
        )
        for number in range(6)
    ]
    with GuidedEngine(checkpoint.folder, kv_cache_tokens=1024, dllm_threshold=0.3) as engine:
        outcomes = engine.outcomes([[7 + number] * 9 for number in range(6)], sampling)
    for number, outcome in enumerate(outcomes):
        assert outcome.finish_reason == "stop", outcome.error
        assert re.fullmatch(patterns[number % 3], text_of(outcome.token_ids))


def test_real_configurations(tmp_path: Path) -> None:
    """Keys missing in published config.json files have the defaults of the published code."""
    checkpoint = write_moe(LLADA2, tmp_path)
    model = load_model_config(checkpoint.folder)
    assert model.rotary_dim == 8
    assert model.moe is not None
    assert model.moe.shared_size == 32
    assert model.moe.dense_layers == {0}
    odd = write_moe({**LLADA2, "n_group": 3}, tmp_path / "odd")
    with pytest.raises(ValueError, match=r"n_group 3 in config\.json does not divide"):
        load_model_config(odd.folder)
