"""Benchmark jobs: load on an OpenAI-compatible endpoint, from one or many nodes, with a report."""
