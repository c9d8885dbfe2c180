"""Most launches that a captured step of each family may take.

The counts are those of today's sources: who needs fewer lowers them, who needs more says why. What
torch does in one operation counts as one launch, though a sort, say, is several of a device's.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Launches of a step of 4 rows."""

    model: str
    """Whose config.json is taken, of the corpus in tests/worker/models/configs."""
    layer: int
    """Of the layer that has most."""
    rest: int = 6
    """Of the forward pass beside its layers: inputs, embedding, norm, and a copy for draws."""
    draw: int = 7
    """Logits, masks and draw of rows without filters; 0 where graphs hold no draws."""
    filtered: int = 15
    """The same with filters."""


BUDGETS = {
    "CohereForCausalLM": Budget("CohereForAI/aya-23-8B", 15, 11, 8, 16),
    "Cohere2ForCausalLM": Budget("CohereForAI/c4ai-command-r7b-12-2024", 15, 11, 8, 16),
    "DeepseekV2ForCausalLM": Budget("deepseek-ai/DeepSeek-V2-Lite-Chat", 52),
    "DeepseekV3ForCausalLM": Budget("moonshotai/Moonlight-16B-A3B-Instruct", 56),
    "Ernie4_5ForCausalLM": Budget("baidu/ERNIE-4.5-0.3B-PT", 10),
    "Ernie4_5_MoeForCausalLM": Budget("baidu/ERNIE-4.5-21B-A3B-PT", 50),
    "Exaone4ForCausalLM": Budget("LGAI-EXAONE/EXAONE-4.0-32B", 14),
    "GemmaForCausalLM": Budget("google/gemma-2b", 10, 7),
    "Gemma2ForCausalLM": Budget("google/gemma-2-2b-it", 12, 7, 10, 18),
    "Gemma3ForCausalLM": Budget("google/gemma-3-1b-it", 14, 17),
    "Gemma4ForCausalLM": Budget("google/gemma-4-26B-A4B", 61, 17, 10, 18),
    "GlmForCausalLM": Budget("zai-org/glm-4-9b-chat-hf", 10),
    "Glm4ForCausalLM": Budget("zai-org/GLM-4-9B-0414", 12),
    "Glm4MoeLiteForCausalLM": Budget("zai-org/GLM-4.7-Flash", 58),
    "Glm4MoeForCausalLM": Budget("zai-org/GLM-4.5-Air", 50),
    "GptOssForCausalLM": Budget("openai/gpt-oss-20b", 44, 8),
    "GraniteForCausalLM": Budget("ibm-granite/granite-3.3-8b-instruct", 12, 7, 8, 16),
    "InternLM3ForCausalLM": Budget("internlm/internlm3-8b-instruct", 10),
    "LLaDA2MoeModelLM": Budget("inclusionAI/LLaDA2.0-mini", 58, 8, 0, 0),
    "Llama4ForCausalLM": Budget("meta-llama/Llama-4-Scout-17B-16E-Instruct", 49),
    "LlamaForCausalLM": Budget("meta-llama/Llama-3.1-8B-Instruct", 10),
    "MiniMaxM2ForCausalLM": Budget("MiniMaxAI/MiniMax-M2.5", 48),
    "MinistralForCausalLM": Budget("a Ministral-8B in transformers' own class", 10),
    "Ministral3ForCausalLM": Budget("mistralai/Ministral-3-8B-Base-2512", 13),
    "MistralForCausalLM": Budget("mistralai/Mistral-7B-v0.1", 10),
    "MixtralForCausalLM": Budget("mistralai/Mixtral-8x7B-v0.1", 45),
    "Olmo2ForCausalLM": Budget("allenai/OLMo-2-1124-7B", 14),
    "Olmo3ForCausalLM": Budget("allenai/Olmo-3-1025-7B", 14),
    "Phi3ForCausalLM": Budget("microsoft/Phi-3-mini-4k-instruct", 10),
    "Qwen2ForCausalLM": Budget("Qwen/Qwen1.5-1.8B-Chat", 10),
    "Qwen2MoeForCausalLM": Budget("Qwen/Qwen1.5-MoE-A2.7B", 49),
    "Qwen3ForCausalLM": Budget("Qwen/Qwen3-0.6B", 12),
    "Qwen3MoeForCausalLM": Budget("Qwen/Qwen3-30B-A3B", 47),
    "SDARForCausalLM": Budget("JetLM/SDAR-1.7B-Chat", 12, 8, 0, 0),
    "SDARMoeForCausalLM": Budget("JetLM/SDAR-30B-A3B-Chat", 47, 8, 0, 0),
    "SeedOssForCausalLM": Budget("ByteDance-Seed/Seed-OSS-36B-Instruct", 10),
    "SmolLM3ForCausalLM": Budget("HuggingFaceTB/SmolLM3-3B", 10),
}
"""By architecture."""
