"""Rewrites JSON schemas so that grammars enforce them exactly, and rejects those that cannot be."""
