"""Benchmarks: load on an endpoint, offline engine, routing, kernels, and comparisons in turn."""
