"""Command line options for a model's template, tokenizer and sampling, and for paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.config import GatewayConfig, ModelRoute
from router.gateway import Gateway
from router.tokens.encoder import ParityCheck
from tests.support.router.rig import build_checkpoint
from worker.protocol.options import from_options, option_values
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer
from worker.protocol.tokenizer_fingerprint import fingerprint

SHOUTED = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}"


def changed(route: ModelRoute, **options: Any) -> ModelRoute:
    return from_options(ModelRoute, option_values(route) | options)


async def start(rig: Any, **options: Any) -> ModelRoute:
    route = changed(rig.config.models[0], **options)
    await rig.start(models=(route,))
    return route


async def prompt_of(rig: Any) -> str:
    response = await rig.chat("hello")
    assert response.status_code == 200, response.text
    [submit] = rig.submits()
    token_ids = np.frombuffer(submit.prompt, "<i4").tolist()
    text: str = rig.tokenizer.decode(token_ids, skip_special_tokens=False)
    return text


@pytest.mark.parametrize("form", ["source", "file"])
async def test_another_chat_template_makes_the_prompt(rig: Any, tmp_path: Path, form: str) -> None:
    file = tmp_path / "shout.jinja"
    file.write_text(SHOUTED)
    await start(rig, chat_template=SHOUTED if form == "source" else str(file))
    assert await prompt_of(rig) == "HELLO!"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"chat_template": "nowhere"}, "--chat-template: cannot read nowhere"),
        ({"chat_template": "{% for %}"}, "syntax error"),
        ({"generation_config": "/"}, "no generation_config.json"),
    ],
)
async def test_what_cannot_be_read_ends_the_start(
    rig: Any, options: dict[str, str], problem: str
) -> None:
    config = GatewayConfig(models=(changed(rig.config.models[0], **options),))
    gateway = Gateway(config, {"stub": rig.transport})
    with pytest.raises(ValueError, match=problem):
        await gateway.start()
    await gateway.close()


@pytest.mark.parametrize(
    ("source", "temperature", "top_k"),
    [("auto", 0.5, 20), ("vllm", 1.0, 0), ("folder", 0.25, 0)],
)
async def test_sampling_is_as_the_named_file_recommends(
    rig: Any, tmp_path: Path, source: str, temperature: float, top_k: int
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    await start(rig, generation_config=str(tmp_path) if source == "folder" else source)
    assert (await rig.chat("hello")).status_code == 200
    [submit] = rig.submits()
    assert submit.sampling.temperature == temperature
    assert max(submit.sampling.top_k, 0) == top_k


async def test_end_tokens_of_the_named_file_end_requests(rig: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    await start(rig, generation_config=str(tmp_path))
    for fields, expected in (
        ({}, (7, 9)),
        ({"stop_token_ids": [8, 7]}, (8, 7, 9)),
        ({"stop_token_ids": [8], "ignore_eos": True}, (8,)),
    ):
        assert (await rig.chat("hello", **fields)).status_code == 200
        assert rig.submits()[-1].sampling.stop_token_ids == expected


async def test_another_tokenizer_makes_the_tokens(rig: Any, tmp_path: Path) -> None:
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SHOUTED)
    await start(rig, tokenizer=str(tmp_path))
    assert await prompt_of(rig) == "HELLO!"


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(
    tokenizer: Tokenizer, checkpoint: Path, rig: Any
) -> None:
    info = rig.workers[0].info
    other = load_tokenizer(str(checkpoint))
    of_model = fingerprint(other, info.page_size, info.block_hash_salt)
    info.tokenizer, info.tokenizer_fingerprint = "other", of_model
    info.vocab_size = tokenizer.vocab_size
    assert ParityCheck(tokenizer)(info) is None
    info.vocab_size -= 1
    assert "use the model's own" in str(ParityCheck(tokenizer)(info))


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models", "/llm/v1/models/"])
async def test_paths_may_begin_as_the_proxy_in_front_has_them(rig: Any, path: str) -> None:
    await rig.start(root_path="/llm", api_keys=("key",))
    keyed = {"authorization": "Bearer key"}
    assert (await rig.client.get(path, headers=keyed)).status_code == 200
    assert (await rig.client.get(path)).status_code == 401
    assert (await rig.client.get("/llm/health")).status_code == 200
    assert (await rig.client.get("/llmore/health", headers=keyed)).status_code == 404
    document = (await rig.client.get("/openapi.json", headers=keyed)).json()
    assert document["servers"] == [{"url": "/llm"}]
