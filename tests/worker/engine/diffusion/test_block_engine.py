"""A whole engine with an SDAR checkpoint: batching, modes and options change no token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.checkpoints.sdar import EOS, MASK, SdarCheckpoint, write_sdar
from tests.support.engines.block_engine import BlockEngine, BlockOutput
from tests.support.engines.block_oracle import Processors, Terms, answer
from tests.support.engines.block_requests import COUNT, prompts, sampling
from tests.support.engines.forked_rank import forking_ranks
from worker.config import EngineConfig
from worker.llm import LLM
from worker.models.config.model_config import load_model_config
from worker.protocol.diffusion import DiffusionParams
from worker.protocol.sampling import SamplingParams
from worker.rank.diffusion.algorithms import ALGORITHMS
from worker.rank.diffusion.base import BlockBatch, BoolArray, DiffusionAlgorithm, IntArray, Proposal
from worker.rank.preflight import check_draft_model, check_engine

SIZE = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> SdarCheckpoint:
    torch.set_num_threads(1)
    return write_sdar(tmp_path_factory.mktemp("sdar"), SIZE)


def serve(
    checkpoint: SdarCheckpoint,
    batches: Sequence[tuple[list[list[int]], list[SamplingParams]]],
    **options: object,
) -> list[BlockOutput]:
    with BlockEngine(checkpoint.folder, kv_cache_tokens=2048, **options) as engine:
        return [output for batch in batches for output in engine.serve(*batch)]


@pytest.fixture(scope="module")
def alone(checkpoint: SdarCheckpoint) -> list[BlockOutput]:
    singles = [([prompt], [one]) for prompt, one in zip(prompts(), sampling(), strict=True)]
    return serve(checkpoint, singles, enable_prefix_caching=False)


def watch_margins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the distance of each undecided position's confidence from the threshold."""
    margins: list[float] = []
    for algorithm in ALGORITHMS.values():

        def step(
            self: DiffusionAlgorithm,
            batch: BlockBatch,
            logits: torch.Tensor,
            states: IntArray | None,
            original: Callable[..., BoolArray] = algorithm.step,
        ) -> BoolArray:
            def propose(values: torch.Tensor) -> Proposal:
                proposal = batch.propose(values)
                gaps = np.abs(proposal.confidence - batch.params.threshold)[batch.undecided]
                margins.extend(gaps.tolist())
                return proposal

            return original(self, dataclasses.replace(batch, propose=propose), logits, states)

        monkeypatch.setattr(algorithm, "step", step)
    return margins


@pytest.mark.checks("native", of="SDARForCausalLM", against="requests alone")
@pytest.mark.parametrize(
    ("backend", "together"),
    [
        ("native", 4),
        ("torch", 16),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("native", 2), ("native", 16), ("torch", 2), ("torch", 4))
        ),
    ],
)
def test_company_changes_no_token_and_no_round(
    checkpoint: SdarCheckpoint,
    alone: list[BlockOutput],
    backend: str,
    together: int,
    monkeypatch: pytest.MonkeyPatch,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    """The smallest distance of a confidence from its threshold is reported."""
    margins = watch_margins(monkeypatch)
    found = serve(
        checkpoint,
        [(prompts(), sampling())],
        max_num_seqs=together,
        cpu_backend=backend,
        batch_invariant=backend == "torch",
    )
    record_testsuite_property(f"smallest_margin_{backend}_{together}", min(margins))
    assert len(margins) > 60 * COUNT
    for one, other in zip(found, alone, strict=True):
        assert (one.token_ids, one.rounds) == (other.token_ids, other.rounds)


@pytest.mark.checks("chunks", "scarce", "TP 2", of="SDARForCausalLM", against="requests alone")
@pytest.mark.parametrize(
    "options",
    [
        {"dllm_fdfo": False},
        {"kv_cache_tokens": 160},
        {"max_num_batched_tokens": 16},
        {"dllm_disable": ("inplace",)},
        {"dllm_disable": ("mixed_rounds", "fused_commit", "skip_last_commit")},
        {"dllm_disable": ("masked_logits", "early_exit")},
        {"dllm_disable": ("skip_unread",), "max_num_seqs": 4},
        {"tensor_parallel_size": 2, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_no_switch_changes_a_token(
    checkpoint: SdarCheckpoint, alone: list[BlockOutput], options: dict[str, object]
) -> None:
    settings = {"max_num_seqs": 6, "kv_cache_tokens": 2048, **options}
    # A step of several ranks takes many times as long if they share a processor.
    count = 8 if "tensor_parallel_size" in options else COUNT
    with BlockEngine(checkpoint.folder, **settings) as engine:
        found = engine.serve(prompts(count), sampling(count))
    assert [one.token_ids for one in found] == [one.token_ids for one in alone[:count]]


def test_one_request_is_the_same_first_out_and_synchronous(checkpoint: SdarCheckpoint) -> None:
    singles = [([prompt], [one]) for prompt, one in zip(prompts(6), sampling(6), strict=True)]
    first_out = serve(checkpoint, singles, dllm_fdfo=True)
    assert first_out == serve(checkpoint, singles, dllm_fdfo=False)


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.long)])
def test_logits_processors_and_logprobs(checkpoint: SdarCheckpoint, backend: str) -> None:
    processors = Processors(
        frequency_penalty=0.4,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        min_tokens=9,
        logit_bias={EOS[0]: 6.0},
    )
    options = {"max_tokens": 2 * SIZE, "logprobs": 2, "temperature": 0.0}
    params = SamplingParams(
        diffusion=DiffusionParams(threshold=0.5),
        **{**options, **dataclasses.asdict(processors)},  # type: ignore[arg-type]  # fields by name
    )
    found = serve(checkpoint, [(prompts(2), [params] * 2)], cpu_backend=backend)
    for prompt, one in zip(prompts(2), found, strict=True):
        expected = answer(
            checkpoint.logits,
            prompt,
            block_size=SIZE,
            mask=MASK,
            max_tokens=2 * SIZE,
            terms=Terms(threshold=0.5),
            ends=EOS,
            processors=processors,
        )
        assert expected.margin > 1e-5
        assert one.token_ids == expected.token_ids
        assert one.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert len(one.token_ids) >= processors.min_tokens


def test_seeds_matter(checkpoint: SdarCheckpoint, alone: list[BlockOutput]) -> None:
    other = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=29, ignore_eos=True)
        for seed in (1, 2)
    ]
    first, second = serve(checkpoint, [([prompts()[0]] * 2, other)])
    assert first.token_ids != second.token_ids
    assert first.token_ids[0] != MASK


def test_leaving_at_the_end_token_saves_rounds_and_no_token(checkpoint: SdarCheckpoint) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(9, 20, 31, 42, 53, 64))
    ]
    rounds = {}
    outputs = {}
    for disable in ((), ("early_exit",)):
        found = serve(checkpoint, [(prompts(16), params * 16)], dllm_disable=disable)
        outputs[disable] = [(one.token_ids, one.finish_reason) for one in found]
        rounds[disable] = sum(sum(one.rounds) for one in found)
    assert outputs[()] == outputs[("early_exit",)]
    assert sum(reason == "stop" for _, reason in outputs[()]) > 2
    assert rounds[()] < rounds[("early_exit",)]
    # The oracle completes all blocks.
    terms = Terms(threshold=0.95)
    for prompt, (token_ids, _) in zip(prompts()[:4], outputs[()], strict=False):
        ends = (*EOS, *params[0].stop_token_ids)
        expected = answer(
            checkpoint.logits,
            prompt,
            block_size=SIZE,
            mask=MASK,
            max_tokens=60,
            terms=terms,
            ends=ends,
        )
        assert token_ids == expected.token_ids


def test_committed_blocks_are_found_again(checkpoint: SdarCheckpoint) -> None:
    prompt = list(range(1, 40))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with BlockEngine(checkpoint.folder, kv_cache_tokens=2048) as engine:
        (first,) = engine.serve([prompt], params)
        history = prompt + first.token_ids
        (second,) = engine.serve([history], params)
    (fresh,) = serve(checkpoint, [([history], [params])], enable_prefix_caching=False)
    assert second.token_ids == fresh.token_ids
    # The last block of the first request was never committed; its other pages were.
    assert second.num_forwards <= fresh.num_forwards


def test_drafts_tell_how_a_block_comes_about(
    checkpoint: SdarCheckpoint, alone: list[BlockOutput]
) -> None:
    sampling_params = [
        SamplingParams(
            **{
                **{name: getattr(one, name) for name in ("temperature", "top_k", "top_p", "seed")},
                "max_tokens": 29,
                "ignore_eos": True,
                "diffusion": msgspec.structs.replace(
                    one.diffusion or DiffusionParams(), stream_drafts=index % 3 > 0
                ),
            }
        )
        for index, one in enumerate(sampling())
    ]
    found = serve(checkpoint, [(prompts(), sampling_params)])
    for index, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert (one.token_ids, sum(one.rounds)) == (other.token_ids, sum(other.rounds))
        assert bool(one.drafts) == bool(index % 3)
        if index % 2:
            continue  # JointThreshold may replace drafted tokens
        for *draft, known in one.drafts:
            assert len(draft) - draft.count(-1) > 0
            shown = zip(draft, one.token_ids[known:], strict=False)
            assert all(token in (-1, final) for token, final in shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 4}, "--page-size 4 must be a multiple of this model's block size, 8"),
        ({"max_num_batched_tokens": 8}, "two blocks of this model"),
        ({"max_model_len": 5}, "less than one block"),
        ({"dllm_algorithm": "JointThresholdInDel"}, "requires delete_token_id and split_token_id"),
        ({"speculative_method": "ngram"}, "not supported for block-diffusion models: use none"),
    ],
)
def test_what_does_not_suit_blocks(
    checkpoint: SdarCheckpoint, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BlockEngine(checkpoint.folder, **options)


def test_the_default_page_size_follows_the_block_size(tmp_path: Path) -> None:
    wide = write_sdar(tmp_path, 32)
    with BlockEngine(wide.folder) as engine:
        [output] = engine.serve([[7, 8, 9]], SamplingParams(max_tokens=33, ignore_eos=True))
        assert len(output.token_ids) == 33
        assert engine.core.info.page_size == 32
    default = EngineConfig.of(model=wide.folder)
    check_engine(default)
    assert [default.with_page_size(size).cache.page_size for size in (1, 8, 32)] == [16, 16, 32]
    with pytest.raises(ValueError, match=r"--page-size 16 must be .*, 32: remove it, or set"):
        check_engine(default.with_options(page_size=16))


def test_a_model_of_blocks_drafts_for_none(checkpoint: SdarCheckpoint) -> None:
    config = EngineConfig.of(
        model="", speculative_method="draft", speculative_model=str(checkpoint.folder)
    )
    with pytest.raises(ValueError, match="block-diffusion models are not supported"):
        check_draft_model(config, load_model_config(config.draft_checkpoint), max_model_len=64)


def test_names_of_switches() -> None:
    with pytest.raises(
        ValueError, match="dllm_disable in --dllm-config: unknown optimization 'nothing'"
    ):
        EngineConfig.of(model="", dllm_disable=("nothing",))
    with pytest.raises(ValueError, match=r"dllm_threshold in --dllm-config must be in \[0, 1\]"):
        EngineConfig.of(model="", dllm_threshold=1.5)
    defaults = EngineConfig.of(model="", dllm_disable=("early_exit",))
    assert "early_exit" not in defaults.dllm.features


def test_server_defaults_and_request_parameters(tmp_path: Path) -> None:
    checkpoint = write_sdar(tmp_path, SIZE)
    prompt, own = prompts()[0], DiffusionParams(threshold=0.2)
    sampling_params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, diffusion=own)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (by_request,) = serve(checkpoint, [([prompt], [sampling_params])])
    (by_server,) = serve(checkpoint, [([prompt], [plain])], dllm_threshold=0.2)
    (strict,) = serve(checkpoint, [([prompt], [plain])])
    assert by_request == by_server
    assert sum(by_request.rounds) < sum(strict.rounds)


def test_offline_with_ranks_in_processes(
    checkpoint: SdarCheckpoint, alone: list[BlockOutput]
) -> None:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with forking_ranks():
        llm = LLM(checkpoint.folder, device="cpu", cpu_threads=1, kv_cache_tokens=2048)
    with llm:
        found = llm.generate(inputs, sampling(), detokenize=False)
        with pytest.raises(ValueError, match="prompt_logprobs is not supported for block-diff"):
            llm.generate(inputs[:1], SamplingParams(prompt_logprobs=1), detokenize=False)
    assert [one.outputs[0].token_ids for one in found] == [one.token_ids for one in alone]


def test_a_request_of_a_lost_worker_continues_at_a_border_of_its_blocks(
    checkpoint: SdarCheckpoint, alone: list[BlockOutput]
) -> None:
    """Its gateway has whole blocks; rounds of the running block are repeated."""
    begun, params, lengths, rests = [], [], [], []
    for prompt, one, whole in zip(prompts(), sampling(), alone, strict=True):
        for end in range(SIZE - len(prompt) % SIZE, len(whole.token_ids), SIZE):
            begun.append(prompt + whole.token_ids[:end])
            params.append(one)
            lengths.append(end)
            rests.append(whole.token_ids[end:])
    with BlockEngine(checkpoint.folder, kv_cache_tokens=2048, max_num_seqs=6) as engine:
        found = engine.serve(begun, params, lengths)
    assert len(found) > 2.5 * COUNT
    assert [output.token_ids for output in found] == rests
    assert {output.finish_reason for output in found} == {"length"}
