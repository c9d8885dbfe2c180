from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from worker.protocol.text.tokenizer import SHORT_TEXT, load_tokenizer

TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' and loop.first %}[SYS]{{ m.content | trim }}[/SYS]
    {%- elif m.role == 'assistant' %}
        {%- generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}
    {%- else %}
        {%- if m.content == 'stop' %}{% break %}{% endif %}
        {{- '<' ~ m.role ~ '>' ~ (m | tojson) }}
    {%- endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% if mood is defined %}{{ mood }}{% endif %}{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": " be <kind> & 'quick' "},
    {"role": "user", "content": "grüße ☃"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": 'say "hi"'},
    {"role": "user", "content": "stop"},
    {"role": "user", "content": "never seen"},
]


@pytest.fixture
def folder(tmp_path: Path, byte_level: Backend) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<|im_start|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def test_encoding_a_long_text_lets_other_threads_run(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("hello wörld, 你好 ")
    marks: list[str] = []

    def encode() -> None:
        marks.append("begun")
        assert tokenizer.encode("hello wörld, 你好 " * 40_000)[: len(ids) - 1] == ids[:-1]
        marks.append("ended")

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while marks != ["begun", "ended"]:
        turns += marks == ["begun"]
        assert thread.is_alive() or len(marks) == 2
        time.sleep(0)
    thread.join()
    assert turns > 50


def test_long_and_short_texts_are_encoded_alike(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    for length in (SHORT_TEXT - 1, SHORT_TEXT, SHORT_TEXT + 1, 3 * SHORT_TEXT):
        text = ("hello <|im_end|> wörld 你好 " * length)[:length]
        for special in (False, True):
            expected = backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == expected


@pytest.mark.slow
def test_templates_render_as_in_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    tools = [{"type": "function", "function": {"name": "é<b>", "parameters": {}}}]
    for arguments in ({}, {"tools": tools}, {"mood": "gay"}, {"add_generation_prompt": False}):
        options = {"add_generation_prompt": True, **arguments}
        expected = reference.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert tokenizer.render_chat(MESSAGES, **options) == expected
    text = "hello <|im_end|> wörld"
    assert tokenizer.encode(text) == reference.encode(text)
    ids = tokenizer.encode(text)
    for skip in (False, True):
        expected = reference.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_template_in_the_configuration(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(str(folder)).chat_template is None
    for template in (
        "plain",
        [{"name": "rag", "template": "no"}, {"name": "default", "template": "plain"}],
    ):
        config = {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_tokenizer(str(folder)).render_chat([]) == "plain"


def test_errors_are_descriptive(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="no system role"):
        load_tokenizer(str(folder)).render_chat(MESSAGES)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="syntax error"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(str(folder))
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer("/nowhere/at/all")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
    ],
)
def test_templates_stay_in_their_sandbox(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="rejected"):
        load_tokenizer(str(folder)).render_chat(list(MESSAGES))
