"""Benchmarks: a load client, the offline engine, the gateway's cost, and alternated comparisons."""
