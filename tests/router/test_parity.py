"""A worker that would write, tokenize or hash prompts differently is rejected, with the reason."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from router.tokens.encoder import ParityCheck
from worker.protocol.text.tokenizer import Tokenizer, load_tokenizer
from worker.protocol.tokenizer_fingerprint import fingerprint


def altered(tokenizer: Tokenizer, checkpoint: Path, tmp_path: Path, template: str) -> Tokenizer:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(tmp_path))


async def test_matching_workers_serve_and_others_are_refused_loudly(
    rig, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = altered(rig.tokenizer, checkpoint, tmp_path, "{{ messages[0].content }}!")
    info = rig.workers[0].info
    rig.workers[0].info.tokenizer_fingerprint = fingerprint(
        rig.tokenizer, info.page_size, info.block_hash_salt
    )
    rig.workers[1].info.tokenizer_fingerprint = fingerprint(
        other, info.page_size, info.block_hash_salt
    )
    with caplog.at_level(logging.ERROR):
        await rig.start(attached=1)
        await rig.until(lambda: "w1" in caplog.text)
    assert rig.attached() == ["w0"]
    assert "chat template" in caplog.text
    for _ in range(4):
        assert (await rig.chat()).status_code == 200
    assert rig.workers[1].batches == []


def test_each_stage_is_named(tokenizer: Tokenizer, checkpoint: Path, tmp_path: Path, rig) -> None:
    check = ParityCheck(tokenizer)
    info = rig.workers[0].info
    assert check(info) is None  # nothing to compare
    right = fingerprint(tokenizer, info.page_size, info.block_hash_salt)
    info.tokenizer_fingerprint = right
    assert check(info) is None
    for field, word in (("text", "chat template"), ("tokens", "tokenizer"), ("blocks", "hashes")):
        info.tokenizer_fingerprint = type(right)(
            **{n: getattr(right, n) + (n == field) for n in right.__struct_fields__}
        )
        problem = check(info)
        assert problem is not None
        assert word in problem


def test_the_time_of_day_makes_no_difference(
    tokenizer: Tokenizer, checkpoint: Path, tmp_path: Path
) -> None:
    template = "{{ strftime_now('%H:%M:%S.%f') }} {{ messages[0].content }}"
    dated = altered(tokenizer, checkpoint, tmp_path, template)
    assert dated.render_chat([{"content": "x"}]) != dated.render_chat([{"content": "x"}])
    assert fingerprint(dated, 4, "s") == fingerprint(dated, 4, "s")
