"""Benchmarks: load on an endpoint, the offline engine, jobs, and comparisons."""
