"""Rewrites JSON schemas so that grammars enforce them exactly; rejects all others."""
