"""Structured outputs: advances compiled grammars token by token and fills their token masks."""
