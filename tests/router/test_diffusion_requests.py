"""Requests to block diffusion models: parameters, rejections, blocks in streams, usage, metrics."""

from __future__ import annotations

import pytest

from worker.protocol.diffusion import CANVAS_ALGORITHM, DiffusionParams

FIELDS = {"algorithm": "JointThreshold", "threshold": 0.7, "max_post_edit_steps": 4}


def make_diffusion(rig) -> None:
    for worker in rig.workers:
        worker.info.block_size = 4


async def test_parameters_reach_the_worker(rig) -> None:
    make_diffusion(rig)
    await rig.start()
    for send in (rig.chat, rig.complete):
        response = await send(diffusion=FIELDS)
        assert response.status_code == 200, response.text
        assert (await send()).status_code == 200
    expected = DiffusionParams(algorithm="JointThreshold", threshold=0.7, max_post_edit_steps=4)
    assert {s.sampling.diffusion for s in rig.submits()} == {expected, None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"threshold": 1.5}, "diffusion.threshold must be in [0, 1], got 1.5"),
        ({"algorithm": "Magic"}, "Magic"),
        ({"speed": 3}, "unknown field 'speed' of diffusion: choose from algorithm, threshold, "),
        ({"steps": 0}, "diffusion.steps must be in [1, 1024], got 0"),
        ({"max_post_edit_steps": -1}, "diffusion.max_post_edit_steps must be in [0, 1024]"),
        ({"penalty": "much"}, "float"),
    ],
)
async def test_parameters_out_of_range(rig, fields, message) -> None:
    make_diffusion(rig)
    await rig.start()
    response = await rig.chat(diffusion=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == "diffusion"


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"bad_words": ["quick"]}], ids=str)
async def test_what_blocks_cannot_do(rig, fields) -> None:
    make_diffusion(rig)
    await rig.start()
    response = await rig.chat(**fields)
    assert response.status_code == 400, response.text
    assert "block-diffusion models" in response.json()["error"]["message"]
    assert not rig.submits()


async def test_structured_outputs_need_an_algorithm_that_never_edits(rig) -> None:
    make_diffusion(rig)
    await rig.start()
    form = {"response_format": {"type": "json_object"}}
    response = await rig.chat(**form, diffusion={"algorithm": "JointThreshold"})
    assert response.status_code == 400
    assert '"algorithm": "LowConfidence"' in response.json()["error"]["message"]
    assert (await rig.chat(**form)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 3}, "min_tokens is not supported with JointThresholdInDel"),
        ({"logprobs": True}, "logprobs is not supported with JointThresholdInDel"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported with JointThresholdInDel"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs is not supported"),
    ],
    ids=str,
)
async def test_what_moving_tokens_excludes(rig, fields, message) -> None:
    make_diffusion(rig)
    for worker in rig.workers:
        worker.info.has_edit_tokens = True
    await rig.start()
    moving = {"diffusion": {"algorithm": "JointThresholdInDel"}}
    assert (await rig.chat(**moving)).status_code == 200
    response = await rig.chat(**moving, **fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_moving_tokens_needs_a_model_that_does(rig) -> None:
    make_diffusion(rig)
    await rig.start()
    response = await rig.chat(diffusion={"algorithm": "JointThresholdInDel"})
    assert response.status_code == 400
    assert "delete_token_id and split_token_id" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"diffusion": {"algorithm": "LowConfidence"}}, "diffusion.algorithm"),
        ({"diffusion": {"threshold": 0.5}}, "diffusion.threshold"),
    ],
    ids=str,
)
async def test_what_canvases_exclude(rig, fields, name) -> None:
    make_diffusion(rig)
    for worker in rig.workers:
        worker.info.dllm_algorithm = CANVAS_ALGORITHM
    await rig.start()
    allowed = {"diffusion": {"steps": 20, "entropy_bound": 0.2}, "temperature": 0.5}
    assert (await rig.chat(**allowed)).status_code == 200
    response = await rig.chat(**fields)
    assert response.status_code == 400
    assert f"{name} is not supported for this model" in response.json()["error"]["message"]


async def test_drafts_of_blocks(rig, events) -> None:
    make_diffusion(rig)
    await rig.start()
    response = await rig.chat(diffusion={"stream_drafts": True})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "diffusion.stream_drafts requires stream: true"
    response = await rig.chat(diffusion={"stream_drafts": True}, stream=True)
    choices = [chunk["choices"][0] for chunk in events(response)]
    drafts = [choice for choice in choices if "draft" in choice]
    assert drafts
    for choice in drafts:
        assert choice["delta"] == {"content": ""}
        assert choice["finish_reason"] is None
        assert choice["draft"][1::2] == [None, None]
        assert all(choice["draft"][::2])
    plain = await rig.chat(stream=True)
    texts = ["".join(c["delta"]["content"] for c in choices)]
    texts += ["".join(c["choices"][0]["delta"]["content"] for c in events(plain))]
    assert texts[0] == texts[1] != ""


async def test_autoregressive_models_have_no_diffusion(rig) -> None:
    await rig.start()
    response = await rig.complete(diffusion={})
    assert response.status_code == 400
    assert "autoregressive" in response.json()["error"]["message"]
    response = await rig.complete()
    assert "diffusion" not in response.json()["usage"]


async def test_a_chunk_per_block_and_usage(rig, events) -> None:
    make_diffusion(rig)
    await rig.start()
    response = await rig.complete(
        stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    chunks = events(response)
    sizes = [len(c["choices"][0].get("token_ids", ())) for c in chunks if c["choices"]]
    tokens = rig.script(rig.submits()[0])
    assert sum(sizes) in (len(tokens), len(tokens) - 1)
    blocks = -(-len(tokens) // 4)
    assert len([size for size in sizes if size]) <= blocks
    rounds = 3 * blocks
    usage = chunks[-1]["usage"]
    assert usage["diffusion"] == {
        "rounds": rounds,
        "forwards": rounds + 1,
        "tokens_per_forward": round(usage["completion_tokens"] / (rounds + 1), 4),
    }
