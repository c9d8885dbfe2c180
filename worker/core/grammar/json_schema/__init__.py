"""Rewrites JSON schemas so that grammars enforce them exactly, and rejects all that it cannot
rewrite."""
