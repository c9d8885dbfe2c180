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
    rest: int = 5
    """Of the forward pass beside its layers: inputs, embedding, norm, and a copy for draws."""
    draw: int = 7
    """Logits, masks and draw of rows without filters; 0 where graphs hold no draws."""
    filtered: int = 15
    """The same with filters."""


BUDGETS = {
    "CohereForCausalLM": Budget("CohereForAI/aya-23-8B", 16, 10, 8, 16),
    "Cohere2ForCausalLM": Budget("CohereForAI/c4ai-command-r7b-12-2024", 16, 10, 8, 16),
    "DeepseekV2ForCausalLM": Budget("deepseek-ai/DeepSeek-V2-Lite-Chat", 52),
    "DeepseekV3ForCausalLM": Budget("moonshotai/Moonlight-16B-A3B-Instruct", 56),
    "Ernie4_5ForCausalLM": Budget("baidu/ERNIE-4.5-0.3B-PT", 11),
    "Ernie4_5_MoeForCausalLM": Budget("baidu/ERNIE-4.5-21B-A3B-PT", 51),
    "Exaone4ForCausalLM": Budget("LGAI-EXAONE/EXAONE-4.0-32B", 15),
    "GemmaForCausalLM": Budget("google/gemma-2b", 11, 6),
    "Gemma2ForCausalLM": Budget("google/gemma-2-2b-it", 13, 6, 10, 18),
    "Gemma3ForCausalLM": Budget("google/gemma-3-1b-it", 15, 11),
    "GlmForCausalLM": Budget("zai-org/glm-4-9b-chat-hf", 11),
    "Glm4ForCausalLM": Budget("zai-org/GLM-4-9B-0414", 13),
    "Glm4MoeLiteForCausalLM": Budget("zai-org/GLM-4.7-Flash", 58),
    "Glm4MoeForCausalLM": Budget("zai-org/GLM-4.5-Air", 51),
    "GptOssForCausalLM": Budget("openai/gpt-oss-20b", 45, 6),
    "GraniteForCausalLM": Budget("ibm-granite/granite-3.3-8b-instruct", 13, 6, 8, 16),
    "InternLM3ForCausalLM": Budget("internlm/internlm3-8b-instruct", 11),
    "LLaDA2MoeModelLM": Budget("inclusionAI/LLaDA2.0-mini", 58, 7, 0, 0),
    "LlamaForCausalLM": Budget("meta-llama/Llama-3.1-8B-Instruct", 11),
    "MiniMaxM2ForCausalLM": Budget("MiniMaxAI/MiniMax-M2.5", 49),
    "MinistralForCausalLM": Budget("a Ministral-8B in transformers' own class", 11),
    "Ministral3ForCausalLM": Budget("mistralai/Ministral-3-8B-Base-2512", 14),
    "MistralForCausalLM": Budget("mistralai/Mistral-7B-v0.1", 11),
    "MixtralForCausalLM": Budget("mistralai/Mixtral-8x7B-v0.1", 46),
    "Olmo2ForCausalLM": Budget("allenai/OLMo-2-1124-7B", 15),
    "Olmo3ForCausalLM": Budget("allenai/Olmo-3-1025-7B", 15),
    "Phi3ForCausalLM": Budget("microsoft/Phi-3-mini-4k-instruct", 11),
    "Qwen2ForCausalLM": Budget("Qwen/Qwen1.5-1.8B-Chat", 11),
    "Qwen2MoeForCausalLM": Budget("Qwen/Qwen1.5-MoE-A2.7B", 50),
    "Qwen3ForCausalLM": Budget("Qwen/Qwen3-0.6B", 13),
    "Qwen3MoeForCausalLM": Budget("Qwen/Qwen3-30B-A3B", 48),
    "SDARForCausalLM": Budget("JetLM/SDAR-1.7B-Chat", 12, 7, 0, 0),
    "SDARMoeForCausalLM": Budget("JetLM/SDAR-30B-A3B-Chat", 47, 7, 0, 0),
    "SeedOssForCausalLM": Budget("ByteDance-Seed/Seed-OSS-36B-Instruct", 11),
    "SmolLM3ForCausalLM": Budget("HuggingFaceTB/SmolLM3-3B", 11),
}
"""By architecture."""
