"""Structured outputs: follows compiled grammars token by token and fills their masks."""
