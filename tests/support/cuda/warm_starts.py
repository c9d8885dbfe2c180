"""Kernels that serving still compiles after startup, for complete engines with the shapes of
released models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.cuda.counted import write_config
from tests.support.cuda.turns import TurnsExecutor
from tests.support.cuda.variants import noting_variants
from tests.support.engines.engine_driver import Engine, Outcome
from tests.support.worker.real_configs import RealConfig, load_corpus
from worker.protocol.sampling import SamplingParams
from worker.protocol.structured import StructuredOutputsParams

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "kv_cache_tokens": 20_000,
    "page_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "cudagraph_capture_sizes": (1, 8),
}
"""Engine options; steps with more than eight rows run without graphs."""
DRAFTS: dict[str, Any] = {
    "speculative_adaptive": False,
    "speculative_max_utilization": 2.0,
}
"""Options that enable drafts for any number of running requests."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 1.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "logit_bias": {5: 1.0, 7: -2.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 2, 3]},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [9]},
]
"""Kinds of requests."""
BLOCK_KINDS = [kind for kind in KINDS if "prompt_logprobs" not in kind]
"""Kinds that block-diffusion models also support."""
LENGTHS = (1, 2, 3, 15, 16, 17, 32, 50, 100, 255, 256, 1000, 3000)
"""Prompt lengths: odd numbers, multiples of 16, one per tile size, and longer than a step."""
CROWDS = (2, 3, 9, 16)
"""Numbers of concurrent requests."""
ARRIVALS = (2, 5, 17, 64, 100, 300, 33)
"""Prompt lengths, repeated, of requests that arrive while earlier ones run."""


@cache
def corpus() -> dict[str, RealConfig]:
    return {real.name: real for real in load_corpus()}


def write_model(name: str, folder: Path, num_layers: int, **changed: Any) -> str:
    """Writes a corpus model with this number of layers and without weights; returns the folder.
    `changed` replaces values of its config.json."""
    real = corpus()[name]
    real.write(folder)
    return str(write_config(folder, {**real.config, **changed}, num_layers))


def write_demo(source: str, folder: Path) -> str:
    """Writes two layers of a demo model and its tokenizer, without weights; returns the folder."""
    unread = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(source, folder, ignore=unread, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(write_config(folder, config, 2))


def new_variants(
    folder: str,
    *,
    kinds: Sequence[dict[str, Any]] = KINDS,
    grammars: bool = False,
    brief: bool = False,
    meddle: Callable[[], object] = lambda: None,
    engine: type[Engine] = Engine,
    **options: Any,
) -> list[str]:
    """Starts an engine and serves all kinds of requests; returns what it had to compile while
    serving.

    Args:
        folder: folder with a config.json.
        kinds: kinds of requests.
        grammars: whether to also use grammars; the model then needs a tokenizer.
        brief: whether to only serve single requests.
        meddle: called between startup and serving.
        engine: class of the engine.
        options: options of the engine. With `tensor_parallel_size` all ranks run in this process,
            and each must have compiled its kernels.
    """
    with noting_variants() as variants:
        kind = engine
        if "tensor_parallel_size" in options:
            own = {"executor_class": partial(TurnsExecutor, variants)}
            kind = type("TurnsEngine", (Engine,), own)
        with kind(folder, **{**OPTIONS, **options}) as served:
            known = set(variants.sites)
            assert known, "start-up has launched nothing"
            meddle()
            if not brief:
                _serve(served, kinds, grammars=grammars)
            _interleave(served, kinds)
            return variants.since(known)


def _serve(engine: Engine, kinds: Sequence[dict[str, Any]], *, grammars: bool) -> None:
    for number, asked in enumerate(kinds):  # alone
        _generate(engine, [LENGTHS[number % len(LENGTHS)]], [asked])
    for length in LENGTHS:
        _generate(engine, [length + 5], [{}])  # with a prefix cached by an earlier one
    for count in CROWDS:
        own = [kinds[(count + index) % len(kinds)] for index in range(count)]
        _generate(engine, [1 + 7 * index for index in range(count)], own)
        _generate(engine, [3] * count, [{}] * count)
    if grammars:
        form = {"structured_outputs": StructuredOutputsParams(regex=r"\d{3}-\d{4}")}
        for crowd in ([form], [form, {}], [form] * 3, [form, *kinds]):
            _generate(engine, [9] * len(crowd), crowd)


def _interleave(engine: Engine, kinds: Sequence[dict[str, Any]]) -> None:
    """Adds one request per step, up to the limit. Prompts follow a growing number of decode rows,
    so that their arrays have a new offset each time."""
    outputs: dict[str, Outcome] = {}
    for number in range(engine.config.scheduling.max_num_seqs):
        length = ARRIVALS[number % len(ARRIVALS)]
        prompt, params = _request(engine, length, kinds[number % len(kinds)], max_tokens=20)
        request_id, outcome = engine.submit(prompt, params)
        outputs[request_id] = outcome
        engine.step(outputs)
    engine.drain(outputs)


def _generate(engine: Engine, lengths: Sequence[int], kinds: Sequence[dict[str, Any]]) -> None:
    """Serves requests with repetitive prompts, so that there are drafts."""
    pairs = [_request(engine, *one) for one in zip(lengths, kinds, strict=True)]
    prompts, asked = [prompt for prompt, _ in pairs], [params for _, params in pairs]
    engine.outcomes(prompts, asked)


def _request(
    engine: Engine, length: int, kind: dict[str, Any], *, max_tokens: int = 3
) -> tuple[list[int], SamplingParams]:
    """A prompt within the engine's limits, and its sampling parameters."""
    most = (engine.config.max_model_len or length) - max_tokens - 5
    prompt = [1 + place % 3 for place in range(min(length, most))]
    return prompt, SamplingParams(seed=length, max_tokens=max_tokens, ignore_eos=True, **kind)
