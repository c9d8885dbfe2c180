"""Benchmark jobs: load on an OpenAI endpoint, from one or many nodes, with a report."""
