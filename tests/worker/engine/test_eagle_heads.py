"""Drafts of EAGLE-3 heads: they are those of the formulae, tokens equal plain decoding, and drafts
depend on nothing but the text before them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints.eagle import (
    LATENT,
    SPECULATORS,
    TAPS,
    ReferenceHead,
    write_head,
    write_model,
    write_predicting,
)
from tests.support.effort import IS_LONG
from tests.support.engines.device_lengths import ByDeviceLengths
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.engines.mixtures import Mixture, cases_of, drafting_engine
from worker.config import EngineConfig
from worker.models.config.eagle_config import read_eagle
from worker.models.config.model_config import load_model_config
from worker.protocol.sampling import SamplingParams
from worker.rank.preflight import check_engine
from worker.rank.speculation import factory
from worker.rank.speculation.base import DraftRequest, Guesses
from worker.rank.speculation.eagle_heads import EagleProposer

SIZES: dict[str, Any] = {"max_model_len": 256, "batch_invariant": True, "cpu_backend": "torch"}
NUM_PROMPTS = 24 if IS_LONG else 6
Drafts = dict[tuple[int, ...], int]
"""First draft after each text."""


def eagle(head: Path, num_drafts: int = 3) -> dict[str, Any]:
    """Options that draft with a head."""
    return {
        "speculative_method": "eagle3",
        "speculative_model": str(head),
        "speculative_adaptive": False,
        "num_speculative_tokens": num_drafts,
    }


class EagleEngine(Engine):
    """An engine that reports its acceptance."""

    def __init__(self, folder: Path, **options: Any) -> None:
        options = {"kv_cache_tokens": 4096, **options}
        super().__init__(str(folder), **SIZES, **options)

    def acceptance(self) -> float:
        """Share of accepted drafts."""
        gate = self.core.scheduler.steps.speculation
        assert gate is not None
        totals = gate.totals
        assert totals.num_draft_tokens > 40, "too few drafts"
        return totals.num_accepted_tokens / totals.num_draft_tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a head that predicts nearly as well."""
    torch.set_num_threads(1)
    return write_predicting(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def latent_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same, both with latent attention."""
    torch.set_num_threads(1)
    return write_predicting(tmp_path_factory.mktemp("latent"), LATENT)


def prompts(count: int = NUM_PROMPTS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [20 + 11 * (i % 5) for i in range(count)]
    return [torch.randint(8, 97, (n,), generator=generator).tolist() for n in lengths]


def settings(count: int = NUM_PROMPTS) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=(0.0, 0.0, 0.8)[i % 3], seed=i, max_tokens=30 + i % 4, ignore_eos=True
        )
        for i in range(count)
    ]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The first drafts that engines propose from now on."""
    found, propose = Drafts(), EagleProposer.propose

    def noting(
        self: EagleProposer, requests: Sequence[DraftRequest], threshold: float
    ) -> list[Guesses]:
        guesses, pool = propose(self, requests, threshold), self._tables.token_pool
        for request, guess in zip(requests, guesses, strict=True):
            text = pool[request.slot, : request.num_tokens].tolist()
            found[tuple(text)] = guess.token_ids[0]
        return guesses

    monkeypatch.setattr(EagleProposer, "propose", noting)
    return found


def check_same(drafts: Drafts, expected: Drafts, *, least: int = 40) -> None:
    """Checks that drafts after the same texts are equal, and clears them."""
    common = drafts.keys() & expected.keys()
    assert len(common) > least, "too few texts with drafts in both runs"
    assert {text: drafts[text] for text in common} == {text: expected[text] for text in common}
    drafts.clear()


def plain(folder: Path, **options: Any) -> list[Outcome]:
    with EagleEngine(folder, **options) as engine:
        return engine.outcomes(prompts(), settings())


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("plain", {"norm_before_residual": True, "fc_norm": True}),
    ("plain", {"norm_before_fc": True, "norm_output": True}),
    ("plain", {"eagle_aux_hidden_state_layer_ids": [0, 2], "draft_vocab_size": None}),
    ("deepseek-v3", {"draft_vocab_size": 97}),
    ("deepseek-v3.2", {}),
    ("qwen3-moe", {}),
    ("gpt-oss", {"num_key_value_heads": 1}),
    ("deepseek-v3", dict(LATENT)),
    ("plain", {**LATENT, "q_lora_rank": None, "fc_norm": True, "norm_output": True}),
]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param(*case, marks=() if number in (1, 3, 4, 9) else pytest.mark.long)
        for number, case in enumerate(FLAGS)
    ],
    ids=str,
)
def test_drafts_are_those_of_the_formulae(
    tmp_path: Path, name: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    model = write_model(name, tmp_path)
    tensors = write_head(tmp_path / "head", keys, prefix="layers.0." if keys else "midlayer.")
    taps = keys.get("eagle_aux_hidden_state_layer_ids", TAPS)
    reference = ReferenceHead(tensors, {**keys, "taps": taps}, model)
    found: list[tuple[int, list[int]]] = []
    propose = EagleProposer.propose

    def noting(
        self: EagleProposer, requests: Sequence[DraftRequest], threshold: float
    ) -> list[Guesses]:
        guesses = propose(self, requests, threshold)
        found.append((requests[0].num_tokens, guesses[0].token_ids))
        return guesses

    monkeypatch.setattr(EagleProposer, "propose", noting)
    prompt = prompts(2)[1]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with EagleEngine(tmp_path) as engine:
        [expected] = engine.generate([prompt], params)
    options = {**eagle(tmp_path / "head", 2), "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with EagleEngine(tmp_path, **options) as engine:
        assert engine.generate([prompt], params) == [expected]
    assert len(found) > 5
    for num_tokens, drafts in found:
        known = (prompt + expected)[:num_tokens]
        assert drafts == reference.drafts(known, len(drafts)), num_tokens


def test_chunks_and_scarce_pages_change_neither_tokens_nor_drafts(
    folders: tuple[Path, Path], drafts: Drafts
) -> None:
    model, head = folders
    expected = plain(model)
    with EagleEngine(model, **eagle(head, 1)) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.acceptance() > 0.5, "the head does not predict what the model does"
    undisturbed = drafts.copy()
    chunks = {"max_num_batched_tokens": 24, "max_num_seqs": 16}
    with EagleEngine(model, **eagle(head, 1), **chunks) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
    check_same(drafts, undisturbed)
    with EagleEngine(model, **eagle(head), kv_cache_tokens=192) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.num_preemptions > 0, "pages were not scarce"
    check_same(drafts, undisturbed)


def test_prefix_hits_and_resumed_requests_keep_the_drafts(
    folders: tuple[Path, Path], drafts: Drafts
) -> None:
    model, head = folders
    texts = [text * 3 for text in prompts()]
    with EagleEngine(model, **eagle(head, 1)) as engine:
        first, undisturbed = engine.outcomes(texts, settings()), drafts.copy()
        drafts.clear()
        assert engine.outcomes(texts, settings()) == first
        check_same(drafts, undisturbed)
    # Another worker, from half of the output on.
    with EagleEngine(model, **eagle(head, 1)) as engine:
        halves = [text + one.token_ids[:15] for text, one in zip(texts, first, strict=True)]
        outputs = [
            engine.submit(half, one, num_resumed=15)
            for half, one in zip(halves, settings(), strict=True)
        ]
        engine.drain(dict(outputs))
        for (_, outcome), whole in zip(outputs, first, strict=True):
            assert outcome.token_ids == whole.token_ids[15:]
    check_same(drafts, undisturbed, least=20)


@pytest.mark.long  # their drafts are compared with the formulae, and other heads do the same
def test_heads_with_latents_keep_tokens_and_drafts(
    latent_folders: tuple[Path, Path], drafts: Drafts
) -> None:
    """With prefix hits, in chunks, and with preemptions."""
    model, head = latent_folders
    expected = plain(model)
    with EagleEngine(model, **eagle(head, 1)) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.acceptance() > 0.5, "the head does not predict what the model does"
        undisturbed = drafts.copy()
        drafts.clear()
        assert engine.outcomes(prompts(), settings()) == expected
        check_same(drafts, undisturbed)
    scarce = {"kv_cache_tokens": 192, "max_num_batched_tokens": 24, "max_num_seqs": 16}
    with EagleEngine(model, **eagle(head), **scarce) as engine:
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.num_preemptions > 0, "pages were not scarce"
    check_same(drafts, undisturbed)


def test_mixtures_change_no_bit(folders: tuple[Path, Path]) -> None:
    """With log-probabilities, penalties, grammars, aborted and resumed requests, on pages that are
    also copied to the host."""
    model, head = folders
    cases = cases_of(model, 24 if IS_LONG else 8, cpu_backend="torch", page_size=8)
    scarce = {"kv_cache_tokens": 256, "max_num_batched_tokens": 24}
    host = {"host_cache_gib": 0.01, "host_cache_policy": "always"}
    rng, engines = random.Random(3), [(False, {**scarce, **host}), (True, {})]
    for on_device, options in engines if IS_LONG else engines[:1]:
        own = {**eagle(head), "page_size": 8, **options}
        with drafting_engine(model, on_device=on_device, **own) as engine:
            for _ in range(12 if IS_LONG else 1):
                assert Mixture(engine, cases, rng, 12).run() == []
            assert engine.counts[1] > 10, "too few drafts were accepted"


@pytest.mark.parametrize(
    "checkpoints", ["folders", pytest.param("latent_folders", marks=pytest.mark.long)]
)
def test_ranks_draft_alike(checkpoints: str, request: pytest.FixtureRequest) -> None:
    model, head = request.getfixturevalue(checkpoints)
    with EagleEngine(model, **eagle(head), tensor_parallel_size=2) as engine:
        outcomes, acceptance = engine.outcomes(prompts(), settings()), engine.acceptance()
    assert outcomes == plain(model, tensor_parallel_size=2)
    assert acceptance > 0.2, "three drafts, most of them after a wrong one"


def test_rows_that_the_device_places(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = folders
    expected = plain(model)
    monkeypatch.setattr(factory, "drafts_on_device", lambda *_: True)
    with EagleEngine(model, **eagle(head)) as engine:
        backend, heads = ByDeviceLengths(), engine.runner._heads
        assert isinstance(heads, EagleProposer)
        engine.runner._attention = heads._backend = backend
        assert engine.outcomes(prompts(), settings()) == expected
        assert engine.acceptance() > 0.2, "three drafts, most of them after a wrong one"


def test_heads_in_the_format_of_speculators(folders: tuple[Path, Path], tmp_path: Path) -> None:
    write_head(tmp_path, SPECULATORS | {"draft_vocab_size": 90, "norm_before_residual": True})
    found = read_eagle(str(tmp_path), load_model_config(str(folders[0])))
    assert (found.taps, found.draft_vocab_size, found.is_reduced) == (TAPS, 90, True)
    assert found.norm_before_residual
    assert found.has_lm_head
    assert not found.has_embedding


def test_heads_in_the_format_of_modelopt(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The model's keys are included, also those of experts, which the head does not have."""
    experts = {"n_routed_experts": 384, "n_group": 1, "scoring_func": "sigmoid", "seq_aux": True}
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    own = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    own |= {"next_layer_regular": True, "parallel_draft_step": 1, "use_mtp_layernorm": False}
    keys = {"rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}, "eagle_config": own}
    write_head(tmp_path, {**LATENT, **experts, **keys})
    found = read_eagle(str(tmp_path), load_model_config(str(folders[0]))).head
    assert found.moe is None
    assert found.mla is not None
    assert (found.mla.q_rank, found.mla.kv_rank, found.rotary_dim) == (24, 20, 8)
    assert found.mla.score_factor == pytest.approx((0.1 * math.log(64) + 1) ** 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not supported as an EAGLE-3 head"),
        (
            {"target_hidden_size": 128},
            "target_hidden_size = 128, but the model's hidden_size is 64",
        ),
        ({"vocab_size": 99}, "vocab_size = 99, but the model's vocab_size is 97"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "in \\[0, 2\\]"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2 .* must be 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step = 4 .* must be 1"),
        ({**LATENT, "mla_use_nope": True}, "mla_use_nope"),
    ],
)
def test_other_heads_are_rejected(
    folders: tuple[Path, Path], tmp_path: Path, keys: Mapping[str, Any], message: str
) -> None:
    config = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(ValueError, match=rf"--speculative-model .*{message}"):
        read_eagle(str(tmp_path), load_model_config(str(folders[0])), weights=False)


def test_heads_that_ranks_cannot_share_are_rejected(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    write_head(tmp_path, {"num_attention_heads": 6, "num_key_value_heads": 3})
    options = eagle(tmp_path) | {"tensor_parallel_size": 4}
    with pytest.raises(ValueError, match=rf"--speculative-model {tmp_path}: .*heads \(6\)"):
        check_engine(EngineConfig.of(model=str(folders[0]), **options))


def test_models_without_taps_and_other_options_are_rejected(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="eagle3 and --speculative-model must be set together"):
        EngineConfig.of(model="m", speculative_method="eagle3")
    with pytest.raises(ValueError, match="native does not support --speculative-method eagle3"):
        EngineConfig.of(model="m", **eagle(folders[1]), cpu_backend="native")
    write_model("granite", tmp_path)
    with pytest.raises(ValueError, match="eagle3 is not supported for GraniteForCausalLM"):
        EagleEngine(tmp_path, **eagle(folders[1]))
