"""`make check-vllm-models VLLM=PYTHON`: vLLM's CPU build as a second reference of model families.

PYTHON is the interpreter of an environment with vLLM's CPU build. A test checkpoint of each family,
with a head size that vLLM's attention on CPU supports, runs in both engines in float32; greedy
tokens and their log-probabilities must agree. Families without a path in vLLM on CPU are listed
with vLLM's error. A family that differs needs a documented reason.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from cluster.bench.report import Result, at_least, checks_json, exactly, note
from tests.campaigns.checks import check_main
from tests.campaigns.vllm_models.peer import NUM_NEW
from tests.campaigns.vllm_models.variants import LEFT_OUT, REASONS, VARIANTS, Variant
from tests.support.checkpoints.families import SPECIMENS
from tests.support.checkpoints.specimen import Specimen, settings_of, write
from tests.support.engines.family_checks import make_prompts
from tests.support.engines.plan_driver import Request, generate, make_runner

_HEAD_SIZE: Final = 32
"""Smallest head size that vLLM's attention on CPU supports."""
_HEAD_KEYS: Final = ("head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim")
_GLOBAL_KEY: Final = "global_head_dim"
"""Head size of full-attention layers, if it differs from that of the others."""
_LATENT_SIZES: Final = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
"""Sizes of latent attention that vLLM supports on CPU: those of DeepSeek."""
_LENGTHS: Final = (3, 29, 62, 110)
_TOLERANCE: Final = 2e-4
"""Maximum difference of log-probabilities. In float32, equal models differ by 1e-6 to 5e-5."""
_MIN_AGREEING: Final = 60
"""Number of families on which both engines agreed in the last run, rounded down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmModelsOptions:
    """Interpreter of vLLM's environment, and families."""

    vllm: str
    """Python interpreter of an environment with vLLM's CPU build."""
    names: tuple[str, ...] = field(default=(), metadata={"flag": "--name"})
    """Test checkpoints to compare, from SPECIMENS. Can be repeated. Default: all text models that
    transformers supports."""

    def __post_init__(self) -> None:
        if not Path(self.vllm).is_file():
            raise ValueError(f"--vllm: {self.vllm!r} is not a Python interpreter")
        if unknown := set(self.names) - SPECIMENS.keys():
            raise ValueError(f"--name: unknown test checkpoint {min(unknown)!r}")


def run_vllm_models(options: VllmModelsOptions) -> Result:
    """Writes the checkpoints, runs both engines and compares them."""
    torch.set_num_threads(1)
    names = options.names or [name for name in SPECIMENS if _is_comparable(name)]
    own, errors = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            folder = Path(directory, name)
            folder.mkdir()
            own[name] = _own_outputs(name, folder)
        peer = Path(__file__).with_name("peer.py")
        folders = [str(Path(directory, name)) for name in names]
        subprocess.run([options.vllm, str(peer), *folders], check=True, stdout=subprocess.DEVNULL)
        gaps: dict[str, float] = {}
        for name in names:
            file = Path(directory, name, "vllm.json")
            found = json.loads(file.read_text()) if file.exists() else {"error": "it crashed"}
            if "error" in found:
                errors[name] = " ".join(found["error"].split())[:300]
                continue
            gaps[name] = max(map(largest_gap, own[name], found["outputs"]))
            note(f"{name}: {gaps[name]:.1e}")
    return report(gaps, errors, is_whole=not options.names)


def report(gaps: Mapping[str, float], errors: Mapping[str, str], *, is_whole: bool) -> Result:
    """The result, with its checks.

    Args:
        gaps: largest difference of log-probabilities, keyed by test checkpoint.
        errors: vLLM's errors, keyed by test checkpoint.
        is_whole: whether all checkpoints ran.
    """
    different = {name: gap for name, gap in gaps.items() if not gap <= _TOLERANCE}
    unexplained = different.keys() - REASONS.keys()
    stale = REASONS.keys() & gaps.keys() - different.keys()
    num_agreeing = len(gaps) - len(different)
    checks = [
        exactly("unexplained_differences", len(unexplained), "families", 0),
        exactly("reasons_without_a_difference", len(stale), "families", 0),
    ]
    if is_whole:
        checks.append(at_least("agreeing", num_agreeing, "families", _MIN_AGREEING))
    return {
        "agreeing": num_agreeing,
        "largest_gap": max((gaps[name] for name in gaps.keys() - different.keys()), default=0.0),
        "different": {
            name: f"{gap:.1e}: {REASONS.get(name, 'unexplained')}"
            for name, gap in different.items()
        },
        "no_path_in_vllm": dict(errors),
        "checks": checks_json(checks),
    }


def largest_gap(own: Sequence[Mapping[int, float]], other: Mapping[str, Any]) -> float:
    """Largest difference between the engines' log-probabilities of the other engine's tokens, as
    long as both chose the same ones; after a different choice, its distance to the best. Infinite
    if one is NaN.

    Args:
        own: log-probabilities of all tokens at each position, given this engine's tokens before.
        other: "tokens" and "logprobs" of the other engine.
    """
    gaps = [0.0]
    for mine, token, logprob in zip(own, other["tokens"], other["logprobs"], strict=True):
        best = max(mine, key=mine.__getitem__)
        gaps += abs(mine[token] - logprob), mine[best] - mine[token]
        if token != best:
            break
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _is_comparable(name: str) -> bool:
    """Whether this is a text model of transformers, whose config.json vLLM reads as well."""
    one = SPECIMENS[name]
    return not (one.maths or one.multimodal or one.wrapper or name in LEFT_OUT)


def _own_outputs(name: str, folder: Path) -> list[list[dict[int, float]]]:
    """Writes a checkpoint and its prompts; returns this engine's log-probabilities by prompt,
    position and token."""
    variant = VARIANTS.get(name, Variant())
    write(_with_head_size(SPECIMENS[name], variant), folder)
    prompts = make_prompts(_LENGTHS)
    requests = [
        Request(prompt=prompt, slot=slot, new_tokens=NUM_NEW) for slot, prompt in enumerate(prompts)
    ]
    generate(make_runner(str(folder)), requests)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    config = json.loads((folder / "config.json").read_text()) | variant.vllm_keys
    for key in variant.without:
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return [
        [dict(enumerate(logits.float().log_softmax(-1).tolist())) for logits in one.logits]
        for one in requests
    ]


def _with_head_size(specimen: Specimen, variant: Variant) -> Specimen:
    """The test checkpoint with head sizes that vLLM supports, and the variant's settings."""
    settings = settings_of(specimen)
    if "kv_lora_rank" in settings:
        sizes = dict(_LATENT_SIZES)
    elif specimen.lacks_head_dim:
        num_heads = settings["hidden_size"] // _HEAD_SIZE
        sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2}
    else:
        sizes = {key: _HEAD_SIZE for key in _HEAD_KEYS if isinstance(settings.get(key), int)}
        sizes |= {_GLOBAL_KEY: 2 * _HEAD_SIZE} if settings.get(_GLOBAL_KEY) else {}
    return replace(specimen, settings={**specimen.settings, **sizes, **variant.settings})


if __name__ == "__main__":
    sys.exit(check_main(run_vllm_models, VllmModelsOptions))
