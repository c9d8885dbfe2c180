"""Benchmark jobs for `ray job submit`: load from many nodes on an OpenAI endpoint, and a report."""
