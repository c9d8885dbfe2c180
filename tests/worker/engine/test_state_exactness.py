"""Models whose layers keep a state per request: bitwise equal tokens and log-probabilities in all
modes, and prefix hits where snapshots exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints.families import write_specimen
from tests.support.checkpoints.specimen import VOCAB_SIZE
from tests.support.engines.engine_driver import Engine
from tests.support.engines.states_engine import PAGE, StatesEngine
from worker.protocol.sampling import SamplingParams

LENGTHS = (3, 8, 37, 64, 110)
SCARCE_TOKENS = 160
SAMPLING = [
    SamplingParams(temperature=0.9, seed=number, max_tokens=20, ignore_eos=True, logprobs=3)
    for number in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = Path(tmp_path_factory.mktemp("qwen3-next"))
    write_specimen("qwen3-next", folder)
    return folder


def make_prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def num_hit(engine: Engine, prompt: list[int], num_new: int = 1) -> tuple[int, list[int]]:
    """Number of cached tokens of a request, and its output."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    request_id, outcome = engine.submit(prompt, params)
    request = None
    while engine.core.has_work():
        engine.step({request_id: outcome})
        request = engine.core.scheduler.state.requests.get(request_id) or request
    assert request is not None
    return request.num_cached, outcome.token_ids


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3-next", 1),
        ("qwen3-5", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("qwen3-next", 2),
                ("qwen3-5", 1),
                ("nemotron-3", 1),
                ("lfm2", 1),
                ("granite-4", 1),
                ("falcon-h1", 1),
                ("kimi-linear", 1),
            )
        ),
    ],
)
def test_outputs_are_bitwise_equal(name: str, ranks: int, tmp_path: Path) -> None:
    """Alone, batched, with prefix hits, in chunks and after preemptions. Steps of two ranks take
    longer: without the longest prompt, and only the longest one of the others runs alone."""
    torch.set_num_threads(1)
    write_specimen(name, tmp_path)
    some, number_alone = (slice(None), len(LENGTHS)) if ranks == 1 else (slice(-1), 1)
    prompts, sampling = make_prompts()[some], SAMPLING[some]
    options = {"tensor_parallel_size": ranks}
    with StatesEngine(tmp_path, overlap_depth=1, **options) as engine:
        batched = engine.outcomes(prompts, sampling)
        assert engine.outcomes(prompts, sampling) == batched, "with hits"
    cold = {"enable_prefix_caching": False, "overlap_depth": 0}
    with StatesEngine(tmp_path, **cold, **options) as engine:
        pairs = list(zip(prompts, sampling, strict=True))[-number_alone:]
        alone = [engine.outcomes([prompt], [params])[0] for prompt, params in pairs]
        assert alone == batched[-number_alone:]
    scarce = {"kv_cache_tokens": SCARCE_TOKENS, "max_num_batched_tokens": 13}
    with StatesEngine(tmp_path, overlap_depth=1, **scarce, **options) as engine:
        assert engine.outcomes(prompts, sampling) == batched
        assert engine.num_preemptions > 0, "pages were not scarce"


def test_prefixes_hit_where_they_have_a_snapshot(folder: Path) -> None:
    prompt = make_prompts()[-1]
    with StatesEngine(folder, kv_cache_tokens=8192) as engine:
        hit, output = num_hit(engine, prompt, num_new=21)
        assert hit == 0
        # The last boundary that leaves a token to compute, as in a model without states.
        assert num_hit(engine, prompt, num_new=21) == (104, output)
        # The next turn of a conversation continues from the last full page of the answer.
        turn = [*prompt, *output, 5, 6, 7]
        hit, answer = num_hit(engine, turn, num_new=5)
        assert hit == (len(prompt) + len(output) - 1) // PAGE * PAGE == 128
        # Two prompts that diverge within an interval: the third continues from that point.
        for tail, expected in ((1, 0), (2, 48), (3, 48)):
            hit, _ = num_hit(engine, [*prompt[:50], tail, tail, tail])
            assert hit in {expected, _interval(engine, 50)}
    with StatesEngine(folder, enable_prefix_caching=False) as engine:
        assert num_hit(engine, turn, num_new=5) == (0, answer)


def _interval(engine: Engine, length: int) -> int:
    """Last whole interval of a prefix."""
    size = engine.core.scheduler.config.page_groups.snapshot_pages * PAGE
    return length // size * size


def test_an_aborted_request_leaves_nothing_behind(folder: Path) -> None:
    prompts = make_prompts()
    with StatesEngine(folder, overlap_depth=1) as engine:
        outputs = dict(engine.submit(*pair) for pair in zip(prompts, SAMPLING, strict=True))
        for request_id in list(outputs)[::2]:
            for _ in range(3):
                engine.step(outputs)
            engine.core.scheduler.abort(request_id, 0)
        while engine.core.has_work():
            engine.step(outputs)
        expected = engine.outcomes(prompts, SAMPLING)
        assert list(outputs.values())[1::2] == expected[1::2]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"cpu_backend": "native"}, "--cpu-backend native is not supported for models with linear"),
        (
            {"speculative_method": "ngram", "num_speculative_tokens": 16},
            "num_speculative_tokens in --speculative-config must be at most 15",
        ),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_goes_with_no_state_is_refused_before_weights_are_read(
    folder: Path, options: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_nothing(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("worker.rank.loaded_model.load_weights", load_nothing)
    with pytest.raises(ValueError, match=refusal):
        Engine(str(folder), **options)
