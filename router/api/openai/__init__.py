"""OpenAI-compatible API: /v1/completions, /v1/chat/completions and vLLM's extensions."""
