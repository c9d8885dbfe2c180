"""Maximum launches of a captured step, by model family.

The counts match the current code: lower them when a change needs fewer, and give the reason when it
needs more. A torch operation counts as one launch, although a sort, for example, is several on a
device.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Launches of a step of 4 rows."""

    model: str
    """Model whose config.json is used, from the corpus in tests/worker/models/configs."""
    layer: int
    """Of the layer with the most launches."""
    rest: int = 6
    """Of the forward pass outside its layers: inputs, embedding, norm, and a copy for sampling."""
    draw: int = 5
    """Logits, masks and sampling without filters; 0 if graphs contain no sampling."""
    filtered: int = 10
    """Logits, masks and sampling with filters."""


BUDGETS = {
    "ApertusForCausalLM": Budget("swiss-ai/Apertus-8B-Instruct-2509", 9),
    "ArceeForCausalLM": Budget("arcee-ai/AFM-4.5B", 9),
    "BaichuanForCausalLM": Budget("baichuan-inc/Baichuan2-7B-Chat", 9),
    "Cohere2ForCausalLM": Budget("CohereForAI/c4ai-command-r7b-12-2024", 9, 6, 6, 11),
    "CohereForCausalLM": Budget("CohereForAI/aya-23-8B", 9, 6, 6, 11),
    "DeepseekForCausalLM": Budget("deepseek-ai/deepseek-moe-16b-chat", 12),
    "DeepseekV2ForCausalLM": Budget("deepseek-ai/DeepSeek-V2-Lite-Chat", 14, 5),
    "DeepseekV3ForCausalLM": Budget("moonshotai/Moonlight-16B-A3B-Instruct", 14, 5),
    "Ernie4_5_MoeForCausalLM": Budget("baidu/ERNIE-4.5-21B-A3B-PT", 12),
    "Ernie4_5ForCausalLM": Budget("baidu/ERNIE-4.5-0.3B-PT", 9),
    "Exaone4ForCausalLM": Budget("LGAI-EXAONE/EXAONE-4.0-32B", 9),
    "FalconForCausalLM": Budget("tiiuae/falcon-7b-instruct", 9),
    "FlexOlmoForCausalLM": Budget("allenai/FlexOlmo-7x7B-1T", 14),
    "Gemma2ForCausalLM": Budget("google/gemma-2-2b-it", 10, 7, 6, 11),
    "Gemma3ForCausalLM": Budget("google/gemma-3-1b-it", 10, 17),
    "Gemma4ForCausalLM": Budget("google/gemma-4-26B-A4B", 16, 17, 6, 11),
    "GemmaForCausalLM": Budget("google/gemma-2b", 9, 7),
    "Glm4ForCausalLM": Budget("zai-org/GLM-4-9B-0414", 10),
    "Glm4MoeForCausalLM": Budget("zai-org/GLM-4.5-Air", 12),
    "Glm4MoeLiteForCausalLM": Budget("zai-org/GLM-4.7-Flash", 16, 5),
    "GlmForCausalLM": Budget("zai-org/glm-4-9b-chat-hf", 9),
    "GptOssForCausalLM": Budget("openai/gpt-oss-20b", 12, 8),
    "GraniteForCausalLM": Budget("ibm-granite/granite-3.3-8b-instruct", 9, 7, 6, 11),
    "HeliumForCausalLM": Budget("kyutai/helium-1-preview-2b", 9),
    "HunYuanDenseV1ForCausalLM": Budget("tencent/Hunyuan-7B-Instruct", 9),
    "InternLM2ForCausalLM": Budget("internlm/internlm2-chat-7b", 9),
    "GraniteMoeForCausalLM": Budget("ibm-granite/granite-3.1-3b-a800m-instruct", 12, 7, 6, 11),
    "HunYuanMoEV1ForCausalLM": Budget("tencent/Hunyuan-A13B-Instruct", 12),
    "InternLM3ForCausalLM": Budget("internlm/internlm3-8b-instruct", 9),
    "InternLMForCausalLM": Budget("internlm/internlm-chat-7b", 9),
    "IQuestCoderForCausalLM": Budget("IQuestLab/IQuest-Coder-V1-40B-Instruct", 9),
    "LLaDA2MoeModelLM": Budget("inclusionAI/LLaDA2.0-mini", 12, 8, 0, 0),
    "Llama4ForCausalLM": Budget("meta-llama/Llama-4-Scout-17B-16E-Instruct", 12),
    "LlamaForCausalLM": Budget("meta-llama/Llama-3.1-8B-Instruct", 9),
    "MiMoForCausalLM": Budget("XiaomiMiMo/MiMo-7B-Base", 9),
    "MiniCPMForCausalLM": Budget("openbmb/MiniCPM-2B-sft-bf16", 9, 7, 6, 11),
    "LongcatFlashForCausalLM": Budget("meituan-longcat/LongCat-Flash-Chat", 17, 5),
    "MiniMaxM2ForCausalLM": Budget("MiniMaxAI/MiniMax-M2.5", 13),
    "Ministral3ForCausalLM": Budget("mistralai/Ministral-3-8B-Base-2512", 9),
    "MinistralForCausalLM": Budget("a Ministral-8B in transformers' own class", 9),
    "MistralForCausalLM": Budget("mistralai/Mistral-7B-v0.1", 9),
    "Mistral4ForCausalLM": Budget("mistralai/Mistral-Small-4-119B-2603", 16, 5),
    "MixtralForCausalLM": Budget("mistralai/Mixtral-8x7B-v0.1", 12),
    "NemotronForCausalLM": Budget("nvidia/Minitron-8B-Base", 9),
    "Olmo2ForCausalLM": Budget("allenai/OLMo-2-1124-7B", 10),
    "Olmo3ForCausalLM": Budget("allenai/Olmo-3-1025-7B", 10),
    "OrionForCausalLM": Budget("OrionStarAI/Orion-14B-Chat", 9),
    "Phi3ForCausalLM": Budget("microsoft/Phi-3-mini-4k-instruct", 9),
    "PhiForCausalLM": Budget("microsoft/phi-2", 9),
    "Phi3VForCausalLM": Budget("microsoft/Phi-3.5-vision-instruct", 9),
    "Qwen2ForCausalLM": Budget("Qwen/Qwen1.5-1.8B-Chat", 9),
    "Qwen2MoeForCausalLM": Budget("Qwen/Qwen1.5-MoE-A2.7B", 12),
    "Qwen3ForCausalLM": Budget("Qwen/Qwen3-0.6B", 9),
    "Qwen3MoeForCausalLM": Budget("Qwen/Qwen3-30B-A3B", 12),
    "Qwen3NextForCausalLM": Budget("Qwen/Qwen3-Next-80B-A3B-Instruct", 15),
    "Qwen3_5ForCausalLM": Budget("Qwen/Qwen3.5-9B", 12),
    "Qwen3_5MoeForCausalLM": Budget("Qwen/Qwen3.5-35B-A3B", 15),
    "QWenLMHeadModel": Budget("Qwen/Qwen-1_8B-Chat", 9),
    "SDARForCausalLM": Budget("JetLM/SDAR-1.7B-Chat", 9, 8, 0, 0),
    "SDARMoeForCausalLM": Budget("JetLM/SDAR-30B-A3B-Chat", 12, 8, 0, 0),
    "SeedOssForCausalLM": Budget("ByteDance-Seed/Seed-OSS-36B-Instruct", 9),
    "SmolLM3ForCausalLM": Budget("HuggingFaceTB/SmolLM3-3B", 9),
    "StableLmForCausalLM": Budget("stabilityai/stablelm-2-zephyr-1_6b", 9),
    "Starcoder2ForCausalLM": Budget("bigcode/starcoder2-7b", 9),
    "SolarOpenForCausalLM": Budget("upstage/Solar-Open-100B", 12),
}
"""By architecture."""
