"""What all tests share: small checkpoints with random weights, and runs beside the others.

A test marked `interpreted(FOLDER)` is a pytest run of its own under Triton's interpreter, whose
variable must be set before Triton is imported. These compute on one thread for half a minute each,
so they begin with the session, at the lowest priority, and take what the others leave.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUNS = pytest.StashKey[dict[str, "subprocess.Popen[str]"]]()

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint of random weights: bytes as tokens, a chat template, 2,048 positions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-chat"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def pytest_collection_finish(session: pytest.Session) -> None:
    marked = [item.get_closest_marker("interpreted") for item in session.items]
    folders = [marker.args[0] for marker in marked if marker is not None]
    planned = not session.config.option.collectonly
    runs = {folder: start_interpreted(folder) for folder in folders if planned}
    session.config.stash[RUNS] = runs


def pytest_sessionfinish(session: pytest.Session) -> None:
    for run in session.config.stash.get(RUNS, {}).values():
        run.kill()


def start_interpreted(folder: str) -> subprocess.Popen[str]:
    pytest_command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", folder]
    output = open(os.memfd_create(folder), "w+")  # noqa: SIM115  # read when the run has ended
    run = subprocess.Popen(
        ["nice", "-n", "19", sys.executable, *pytest_command],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run.stdout = output
    return run


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Exit status of the run that the test is, and the end of what it printed."""
    marker = request.node.get_closest_marker("interpreted")
    run = request.config.stash[RUNS][marker.args[0]]
    status = run.wait(timeout=240)
    assert run.stdout is not None
    run.stdout.seek(0)
    return status, run.stdout.read()[-6000:]
