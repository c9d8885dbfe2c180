"""Anthropic's API: /v1/messages, answered as chats are."""
