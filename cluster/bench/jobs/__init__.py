"""Benchmarks for `ray job submit`: load from many places on any OpenAI endpoint, and a report."""
