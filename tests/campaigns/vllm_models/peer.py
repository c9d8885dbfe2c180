"""Runs vLLM on checkpoint folders, with the Python of vLLM's environment; imports nothing of ours.

`python peer.py FOLDER...` continues the prompts of each FOLDER/prompts.json greedily and writes
tokens and log-probabilities to FOLDER/vllm.json, or the error. Every model runs in a forked
process, so that one that crashes does not end the others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_NEW = 6
"""Number of tokens per prompt."""


def outputs(folder: Path) -> list[dict[str, Any]]:
    """Tokens and log-probabilities of one checkpoint, per prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        model_impl="vllm",  # not transformers, the first reference
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
    )
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=1, detokenize=False
    )
    prompts = json.loads((folder / "prompts.json").read_text())
    found = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    answers = [request.outputs[0] for request in found]
    return [
        {
            "tokens": list(one.token_ids),
            "logprobs": [
                own[token].logprob for token, own in zip(one.token_ids, one.logprobs, strict=True)
            ],
        }
        for one in answers
    ]


def main() -> None:
    """Runs all folders in turn."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # enforce_eager does not apply to single functions
    }
    from vllm.model_executor.models import registry

    # Otherwise each model is inspected in a process that imports everything again (30 s).
    registry._run_in_subprocess = lambda inspect: inspect()
    for folder in map(Path, sys.argv[1:]):
        child = os.fork()
        if child == 0:
            try:
                result: dict[str, Any] = {"outputs": outputs(folder)}
            except BaseException as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            (folder / "vllm.json").write_text(json.dumps(result))
            os._exit(0)
        os.waitpid(child, 0)
        print(folder.name, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
