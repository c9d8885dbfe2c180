"""Benchmarks: endpoints under load, the offline engine, jobs, and comparisons."""
