"""Benchmark jobs: load against an OpenAI-compatible endpoint, from one or many nodes, with a
report."""
