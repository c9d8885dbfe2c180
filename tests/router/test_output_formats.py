"""Formats of tool calls and reasoning: of every served family, as detected in chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer as Backend

from router.parsers import (
    FORMATS,
    THOUGHTS,
    Call,
    CallArguments,
    Content,
    OutputParser,
    Thought,
    dialect_of,
)
from router.parsers.formats import format_of
from router.parsers.response_template import tools_of_response
from router.parsers.thoughts import thoughts_of
from tests.support.router.rig import build_checkpoint
from worker.protocol.text.chat_template import ChatTemplate
from worker.protocol.text.tokenizer import load_tokenizer

REASONED = [
    ("command", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "a", "b"),
    ("command", "<|START_THINKING|>a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", "a", "b"),
    ("hy_v3", "<think:opensource>a</think:opensource>b", "a", "b"),
    ("command", "<|START_RESPONSE|>b<|END_RESPONSE|>", "", "b"),
    ("gemma4", "<|channel>thought\na\n<channel|>b", "a", "b"),
    ("seed_oss", "<seed:think>a</seed:think>\nb", "a", "b"),
    ("longcat", "<longcat_think>\na\n</longcat_think>b", "a", "b"),
    ("apertus", "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    ("solar_open", "<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", "a", "b"),
    ("solar_open", "<|content|>b", "", "b"),
    ("hunyuan", "<think>\na\n</think>\n<answer>\nb <answer> c\n</answer>", "a", "b <answer> c"),
    ("hunyuan", "b <answer></answer>", "", "b <answer></answer>"),
    ("response", "<think>a</think>\n<response>b</response>", "a", "b"),
    ("granite", "Here is my thought process: a\nHere's my response:\nb", "a", "b"),
    ("granite", "Here's my thought process: Here we go", "Here we go", ""),
    ("granite", "Here is my cat", "", "Here is my cat"),
]


def read(name: str, parts: list[str]) -> tuple[str, str]:
    parser = OutputParser(
        thoughts=THOUGHTS[name], is_thinking=False, tools=None, properties={}, single_call=False
    )
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.end()
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


@pytest.mark.parametrize(("name", "text", "thought", "content"), REASONED)
def test_reasoning_does_not_depend_on_the_cuts(
    name: str, text: str, thought: str, content: str
) -> None:
    assert read(name, list(text)) == (thought, content)
    for place in range(len(text)):
        assert read(name, [text[:place], text[place:]]) == (thought, content)


class Excerpt(NamedTuple):
    """Parts of a released chat template."""

    text: str
    tools: str | None = None
    thoughts: str | None = None


BAR, GAP = "\uff5c", "\u2581"
HERMES = Excerpt("<tool_call>\n{'name': ", "hermes")
QWEN3 = Excerpt(
    "<tool_call>\n{'name': {{ c }}</tool_call><tool_response></think>", "hermes", "think"
)
QWEN3_CODER = Excerpt("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder")
QWEN3_5 = QWEN3_CODER._replace(text=QWEN3_CODER.text + "</think>", thoughts="think")
THINKING = Excerpt("{{ content.split('</think>') }}", None, "think")
LLAMA3 = Excerpt('{"name": function name, "parameters": dictionary of argument name', "llama3_json")
LFM2 = Excerpt("<|tool_list_start|>[{{ tools }}]<|tool_list_end|>", "pythonic")
LLAMA4 = Excerpt("<|python_start|>{{ calls }}<|python_end|>", "pythonic")
NEMOTRON = Excerpt('<TOOLCALL>[{"name": ', "nemotron")
MISTRAL = Excerpt("{{ '[TOOL_CALLS]' }}[AVAILABLE_TOOLS]", "mistral")
MAGISTRAL = Excerpt("[TOOL_CALLS]{{ name }}[ARGS][THINK]{{ t }}[/THINK]", "mistral", "mistral")
DEEPSEEK = Excerpt(f"<{BAR}tool{GAP}call{GAP}begin{BAR}></think>", "deepseek_v31", "think")
DEEPSEEK_32 = Excerpt(
    f"{{% set dsml_token = '{BAR}DSML{BAR}' %}}function_calls></think>", "deepseek_v32", "think"
)
KIMI = Excerpt("<|im_system|>tool_declare<|im_middle|>", "kimi_k2")
KIMI_THINKING = Excerpt(
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|></think>",
    *("kimi_k2", "think"),
)
GLM = Excerpt("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key></think>", "glm45", "think")
GLM4 = Excerpt("<|observation|>\n<|assistant|>{{ message.metadata }}\n", "glm4")
HARMONY = Excerpt("<|channel|>analysis<|message|>", "harmony", "harmony")
PHI4 = Excerpt("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4_mini")
MINIMAX = Excerpt(
    "<minimax:tool_call><invoke name= '<response>' '</response>' </think>", "minimax_m2", "think"
)
COMMAND = Excerpt("<|START_THINKING|><|END_THINKING|><|START_ACTION|>", "command", "command")
GRANITE = Excerpt("respond only with <|tool_call|> followed by a JSON list", "granite")
GRANITE_32 = Excerpt(GRANITE.text + " Here is my thought process:", "granite", "granite")
GRANITE_33 = Excerpt(
    GRANITE.text + " between <think></think> and <response></response>", "granite", "response"
)
OLMO3 = Excerpt("<function_calls>\nget_weather()\n</function_calls></think>", "olmo3", "think")
ERNIE = Excerpt("<tool_call>\n</think>\n'<response>\\n' + content", "hermes", "response")
HUNYUAN = Excerpt("<tool_calls>[</tool_calls> '<think>\n\n</think>' <answer>", "hunyuan", "hunyuan")
HY3 = Excerpt("'<tool_calls:opensource>' '</think:opensource>' <arg_key", "hy_v3", "hy_v3")
HY3_PREVIEW = Excerpt("<tool_calls><tool_sep><arg_key></think>", "hy_v3_preview", "think")
SEED = Excerpt("<seed:tool_call>\n<function=<parameter=</seed:think>", "seed_oss", "seed_oss")
LONGCAT = Excerpt("<longcat_tool_call>\n{'name'", "longcat")
LONGCAT_XML = Excerpt(
    "<longcat_tool_call><longcat_arg_key></longcat_think>", "longcat_xml", "longcat"
)
INTERNLM = Excerpt("<|action_start|><|plugin|>\n", "internlm")
APERTUS = Excerpt("'<|tools_prefix|>' '<|inner_suffix|>'", "apertus", "apertus")
SOLAR = Excerpt("<|think|><|tool_calls|><|tool_call:begin|>", "solar_open", "solar_open")
GEMMA4 = Excerpt("'<|tool_call>call:' <channel|> <|think|>", "gemma4", "gemma4")

FAMILIES: dict[str, tuple[Excerpt, ...]] = {
    "LlamaForCausalLM": (LLAMA3, NEMOTRON, DEEPSEEK),
    "Llama4ForCausalLM": (LLAMA4,),
    "Llama4ForConditionalGeneration": (LLAMA4,),
    "Qwen2ForCausalLM": (HERMES, QWEN3),
    "Qwen3ForCausalLM": (QWEN3, DEEPSEEK),
    "Qwen3MoeForCausalLM": (QWEN3, QWEN3_CODER),
    "Qwen3NextForCausalLM": (HERMES,),
    "Qwen3_5ForCausalLM": (QWEN3_5,),
    "Qwen3_5MoeForCausalLM": (QWEN3_5,),
    "Qwen3_5ForConditionalGeneration": (QWEN3_5,),
    "Qwen3_5MoeForConditionalGeneration": (QWEN3_5,),
    "Qwen3VLForConditionalGeneration": (HERMES,),
    "Qwen3VLMoeForConditionalGeneration": (HERMES,),
    "SDARForCausalLM": (QWEN3,),
    "SDARMoeForCausalLM": (QWEN3,),
    "DeepseekV3ForCausalLM": (DEEPSEEK, DEEPSEEK_32, KIMI, KIMI_THINKING),
    "KimiLinearForCausalLM": (KIMI,),
    "KimiK25ForConditionalGeneration": (KIMI_THINKING,),
    "Kimi_K25ForConditionalGeneration": (KIMI_THINKING,),
    "DiffusionGemmaForBlockDiffusion": (GEMMA4,),
    "Gemma4ForCausalLM": (GEMMA4,),
    "Gemma4ForConditionalGeneration": (GEMMA4,),
    "Gemma4UnifiedForCausalLM": (GEMMA4,),
    "Gemma4UnifiedForConditionalGeneration": (GEMMA4,),
    "MistralForCausalLM": (MISTRAL, MAGISTRAL),
    "MinistralForCausalLM": (MISTRAL,),
    "Ministral3ForCausalLM": (MAGISTRAL,),
    "Mistral3ForConditionalGeneration": (MISTRAL, MAGISTRAL),
    "Mistral4ForCausalLM": (MAGISTRAL,),
    "MixtralForCausalLM": (MISTRAL,),
    "VoxtralForConditionalGeneration": (MISTRAL,),
    "GlmForCausalLM": (GLM4,),
    "Glm4ForCausalLM": (GLM4,),
    "Glm4MoeForCausalLM": (GLM,),
    "Glm4MoeLiteForCausalLM": (GLM,),
    "Glm4vForConditionalGeneration": (THINKING,),
    "Glm46VForConditionalGeneration": (GLM,),
    "Glm4vMoeForConditionalGeneration": (GLM,),
    "GlmMoeDsaForCausalLM": (GLM,),
    "GptOssForCausalLM": (HARMONY,),
    "Phi3ForCausalLM": (PHI4,),
    "MiniMaxM2ForCausalLM": (MINIMAX,),
    "Cohere2ForCausalLM": (COMMAND,),
    "Cohere2MoeForCausalLM": (COMMAND,),
    "GraniteForCausalLM": (GRANITE, GRANITE_32, GRANITE_33),
    "GraniteMoeForCausalLM": (GRANITE,),
    "GraniteSWAForCausalLM": (HERMES,),
    "GraniteMoeHybridForCausalLM": (HERMES,),
    "GraniteMoeSWAForCausalLM": (HERMES,),
    "GraniteMoeSharedForCausalLM": (GRANITE,),
    "Lfm2ForCausalLM": (LFM2,),
    "Lfm2VlForConditionalGeneration": (LFM2,),
    "Lfm2MoeForCausalLM": (LFM2,),
    "FalconH1ForCausalLM": (HERMES,),
    "NemotronHForCausalLM": (QWEN3_5,),
    "Olmo3ForCausalLM": (OLMO3,),
    "OlmoHybridForCausalLM": (OLMO3,),
    "Ernie4_5_MoeForCausalLM": (ERNIE,),
    "HunYuanDenseV1ForCausalLM": (HUNYUAN,),
    "HunYuanMoEV1ForCausalLM": (HUNYUAN,),
    "HYV3ForCausalLM": (HY3, HY3_PREVIEW),
    "SeedOssForCausalLM": (SEED,),
    "SmolLM3ForCausalLM": (QWEN3,),
    "LLaDA2MoeModelLM": (HERMES,),
    "InternLM2ForCausalLM": (INTERNLM,),
    "InternLM3ForCausalLM": (INTERNLM,),
    "Exaone4ForCausalLM": (QWEN3,),
    "Exaone4_5_ForConditionalGeneration": (QWEN3,),
    "ExaoneMoeForCausalLM": (QWEN3,),
    "ExaoneMoEForCausalLM": (QWEN3,),
    "AfmoeForCausalLM": (QWEN3,),
    "BailingMoeV2ForCausalLM": (HERMES,),
    "InternVLForConditionalGeneration": (QWEN3,),
    "DeepseekV32ForCausalLM": (DEEPSEEK_32,),
    "LongcatFlashForCausalLM": (LONGCAT, LONGCAT_XML),
    "SolarOpenForCausalLM": (SOLAR,),
    "MiMoForCausalLM": (QWEN3,),
    "ArceeForCausalLM": (HERMES,),
    "IQuestCoderForCausalLM": (QWEN3_CODER,),
    "ApertusForCausalLM": (APERTUS,),
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), (QWEN3_5,)),
    "LagunaForCausalLM": (GLM,),
    **dict.fromkeys(("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), (QWEN3_5,)),
}
"""Chat templates with tools or reasoning, by family."""

PLAIN = {
    *("QWenLMHeadModel", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
    *("DeepseekForCausalLM", "DeepseekV2ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM"),
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "PhiForCausalLM", "Phi3VForCausalLM"),
    *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    *("CohereForCausalLM", "Olmo2ForCausalLM", "FlexOlmoForCausalLM", "Ernie4_5ForCausalLM"),
    *("InternLMForCausalLM", "NemotronForCausalLM", "MiniCPMForCausalLM", "BaichuanForCausalLM"),
    *("Starcoder2ForCausalLM", "HeliumForCausalLM", "OrionForCausalLM", "StableLmForCausalLM"),
    *("FalconForCausalLM", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    *("LlavaOnevisionForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    *("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration", "OlmoeForCausalLM"),
    *("LLaMAForCausalLM", "AquilaForCausalLM", "XverseForCausalLM", "PhimoeForCausalLM"),
    *("PhiMoEForCausalLM", "CwmForCausalLM", "Dots1ForCausalLM", "ExaoneForCausalLM"),
    *("HyperCLOVAXForCausalLM", "Jais2ForCausalLM", "MellumForCausalLM", "MiniCPM3ForCausalLM"),
    *("YoutuForCausalLM", "GPTNeoXForCausalLM", "MiniMaxM3SparseForCausalLM"),
    *("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
}
"""Families whose released default chat templates, if any, have neither."""


def test_every_family_with_tools_or_reasoning_has_a_format() -> None:
    from worker.models.config import families

    served = {*families.FAMILIES, *families.MULTIMODAL}
    assert served - set(FAMILIES) - PLAIN == set(), "add its template to FAMILIES, or it to PLAIN"
    assert not PLAIN & set(FAMILIES)
    for family, excerpts in FAMILIES.items():
        for excerpt in excerpts:
            tools, thoughts = format_of(excerpt.text), thoughts_of(excerpt.text)
            found = (tools and tools.name, thoughts and thoughts.name)
            assert found == (excerpt.tools, excerpt.thoughts), (family, excerpt.text)


def test_tools_in_a_field_of_the_system_message() -> None:
    """As in Phi-4-mini's template, which has no variable for them."""
    source = (
        "{% for message in messages %}{{ message['content'] }}{% if message['tools'] is not none %}"
        "<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "now"}}]
    user = {"role": "user", "content": "U", "tools": None}
    system = {"role": "system", "content": "S", "tools": None}
    template, listed = ChatTemplate(source, {}), '<|tool|>[{"name": "now"}]<|/tool|>'
    assert template.render([user], tools=tools) == f"{listed}U"
    assert template.render([system, user], tools=tools) == f"S{listed}U"
    assert template.render([system, user]) == "SU"


def test_an_unknown_format_is_a_json_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools }} <call>NAME</call>")
    tokenizer = load_tokenizer(str(tmp_path))
    assert dialect_of(tokenizer).tools is FORMATS["json"]
    assert "set --tool-call-parser" in caplog.text
    assert dialect_of(tokenizer, "none").tools is None


@pytest.mark.parametrize(
    ("excerpt", "markers", "reasons"),
    [
        (GEMMA4, ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'], True),
        (SOLAR, ["<|think|>", "<|end|>", "<|begin|>", "<|content|>", "<|tool_call:begin|>"], True),
        (DEEPSEEK_32, [f"{BAR}DSML{BAR}", "</think>"], False),
    ],
    ids=["gemma4", "solar_open", "deepseek_v32"],
)
def test_parts_of_markers_that_are_special_tokens_are_kept(
    tmp_path: Path, excerpt: Excerpt, markers: list[str], reasons: bool
) -> None:
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{# " + excerpt.text + " #}")
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(markers)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    dialect = dialect_of(tokenizer)
    assert dialect.special == set(markers)
    assert (dialect.thought_tokens is not None) == reasons
    shown = tokenizer.detokenizer(shown=dialect.special).push(tokenizer.encode("".join(markers)))
    assert shown == "".join(markers)


def test_a_checkpoint_may_describe_its_output(tmp_path: Path) -> None:
    build_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tools }} <call>NAME</call>")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    function = {"type": "function", "function": "{content}"}
    fields = {
        "thinking": {"open": ["<why>\n", "<because>"], "close": "</why>"},
        "content": {},
        "tool_calls": {
            **{"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
            "transform": function,
        },
    }
    config["response_template"] = {"version": 1, "fields": fields, "start_anchor": "x"}
    path.write_text(json.dumps(config))
    dialect = dialect_of(load_tokenizer(str(tmp_path)))
    parser = dialect.new_parser(
        tools=dialect.tools, properties={}, is_thinking=False, single_call=False
    )
    text = '<because>a</why>b<call>{"name": "now", "arguments": {}}</call>'
    pieces = [piece for char in text for piece in parser.push(char)] + parser.end()
    assert pieces == [Thought("a"), Content("b"), Call("now"), *map(CallArguments, "{}")]
    assert tools_of_response({"fields": {"tool_calls": {"open_pattern": "<(?P<n>)>"}}}) is None
    assert tools_of_response({"fields": []}) is None
    fields["tool_calls"]["transform"] = {"name": "{content.fn}"}
    assert tools_of_response(config["response_template"]) is None
