"""Anthropic-compatible API: /v1/messages, translated to chat completions."""
